// The matrix with its filters and details, the differences, and the way between the views.
"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const $ = (id) => document.getElementById(id);
  const el = (tag, attributes = {}, ...children) => {
    const made = document.createElement(tag);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    made.append(...children);
    return made;
  };
  const [ID, AREA, LEVEL, STATEMENT, SOURCE, RATIONALE, SINCE] = [0, 1, 2, 3, 4, 5, 6];
  const place = new Map(data.clauses.map((clause, index) => [clause[ID], index]));
  const outcome = (run, clause) => {
    const cell = data.cells[run][clause];
    return cell ? data.outcomes[cell[0]] : "none";
  };
  const WORDS = {
    "pass": "pass", "fail": "fail", "error": "error", "known": "known", "recorded": "recorded",
    "unexpected-pass": "unexpected", "could not run": "could not run", "not claimed": "not claimed", "none": "not run",
  };
  const SAID = {
    "pass": "passes", "fail": "fails", "error": "breaks", "known": "fails, as known",
    "unexpected-pass": "passes, though listed as a known failure", "recorded": "recorded",
    "could not run": "could not run here", "not claimed": "not claimed", "none": "not run",
  };
  const SIGNS = { "pass": "✓", "not claimed": "–", "none": "·" };
  const UNSUPPORTED = ["could not run", "not claimed", "none"];
  const BAD = ["fail", "error", "known", "unexpected-pass"];

  const styled = (what) => what.replaceAll(" ", "-");
  // What implementations do alike, where a clause has no right answer, has the same letter.
  const letters = (clause) => {
    const seen = [];
    return data.runs.map((_, run) => {
      const text = data.records[run][clause];
      if (text === undefined) return "";
      if (!seen.includes(text)) seen.push(text);
      return String.fromCharCode(65 + Math.min(seen.indexOf(text), 25));
    });
  };

  // --- the matrix -------------------------------------------------------------------------------
  const body = $("clauses");
  const rows = [];
  const cellOf = (run, clause, letter) => {
    const what = outcome(run, clause);
    const cell = data.cells[run][clause];
    const bad = BAD.includes(what) && cell[2] < cell[1] ? ` ${cell[2]}/${cell[1]}` : "";
    const must = BAD.includes(what) && data.clauses[clause][LEVEL] === "must" ? " must" : "";
    const text = what === "recorded" && letter ? `${letter}` : WORDS[what] + must + bad;
    const made = el("td", { role: "cell", class: `o ${styled(what)}${must}` }, SIGNS[what] || el("span", {}, text));
    made.dataset.run = data.runs[run].name; // shown on a phone, where cells have no heading
    made.title = `${data.runs[run].name}: ${SAID[what]}${bad ? `, ${cell[2]} of ${cell[1]} cases` : ""}`;
    return made;
  };
  const build = () => {
    if (rows.length) return;
    const all = document.createDocumentFragment();
    data.clauses.forEach((clause, index) => {
      const button = el("button", { type: "button", "aria-expanded": "false", "data-clause": index }, clause[ID]);
      const head = el("th", { role: "rowheader" }, button, el("small", { class: `level ${clause[LEVEL]}` }, clause[LEVEL]));
      const row = el("tr", { role: "row" }, head, el("td", { role: "cell", class: "statement" }, el("span", {}, clause[STATEMENT])));
      const letter = clause[LEVEL] === "recorded" ? letters(index) : [];
      data.runs.forEach((_, run) => row.append(cellOf(run, index, letter[run])));
      const found = data.runs.map((_, run) => outcome(run, index));
      const failing = data.runs.flatMap((_, run) => (data.failures[run][index] || []).flat());
      rows.push({
        row, button, detail: null, found,
        text: [...clause.slice(2), clause[ID], data.areas[clause[AREA]], ...failing].join("\n").toLowerCase(),
        differs: new Set(clause[LEVEL] === "recorded" ? letter.filter(Boolean)
          : found.filter((one) => !UNSUPPORTED.includes(one))).size > 1,
      });
      all.append(row);
    });
    body.append(all);
    body.parentElement.style.setProperty("--columns", data.runs.length);
  };
  const controls = ["area", "level", "outcome", "run", "text"].map((name) => $(`filter-${name}`));
  const options = (control) => [...control.options || []];
  controls.flatMap(options).forEach((option) => { option.dataset.name = option.textContent; });
  const fits = (one, clause, [area, level, wanted, run]) => {
    const found = run === "" ? one.found : [one.found[run]];
    return (area === "" || data.areas[clause[AREA]] === area) && (level === "" || clause[LEVEL] === level)
      && (wanted === "" || (wanted === "differs" ? one.differs
        : wanted === "bad" ? found.some((each) => BAD.includes(each)) : found.includes(wanted)));
  };
  const filter = () => {
    build();
    const chosen = controls.map((control) => control.value);
    const text = chosen.pop();
    const words = text.toLowerCase().split(/\s+/).filter(Boolean);
    const said = rows.map((one) => words.every((word) => one.text.includes(word)));
    const matching = (values) => rows.map((one, index) => said[index] && fits(one, data.clauses[index], values));
    let count = 0;
    matching(chosen).forEach((shown, index) => {
      const { row, detail } = rows[index];
      if (row.hidden === shown) row.hidden = !shown;
      if (detail) detail.hidden = !shown;
      count += shown;
    });
    // Each choice says how many clauses it would show beside the other filters.
    chosen.forEach((_, which) => options(controls[which]).forEach((option) => {
      const clauses = matching(chosen.map((value, at) => at === which ? option.value : value)).filter(Boolean).length;
      option.textContent = `${option.dataset.name} (${clauses})`;
    }));
    $("count").textContent = `${count} of ${rows.length} clauses`;
    $("nothing").hidden = count > 0;
  };
  const part = (title, ...children) => el("div", { class: "part" }, el("h3", {}, title), ...children);
  const list = (pairs) => {
    const made = el("dl");
    for (const [term, value, kind] of pairs) if (value) made.append(el("dt", {}, term), el("dd", kind ? { class: kind } : {}, value));
    return made;
  };
  const linked = (text) => /^https?:\/\/\S+$/.test(text)
    ? el("a", { href: text, rel: "noreferrer noopener" }, text) : text;
  const command = (run, name) => `keyedopt replay ${quoted(data.runs[run].file)} ${quoted(name)} --run`;
  const quoted = (text) => /^[\w@%+=:,./-]+$/.test(text) ? text : `'${text.replaceAll("'", "'\"'\"'")}'`;
  // Where the clipboard is closed to a page, the text is selected.
  const copyButton = (code) => {
    const button = el("button", { type: "button", class: "copy" }, "Copy");
    button.addEventListener("click", async () => {
      getSelection().selectAllChildren(code);
      try { await navigator.clipboard.writeText(code.textContent); button.textContent = "Copied"; } catch { /* selected */ }
    });
    return button;
  };
  const copied = (text) => {
    const code = el("code", {}, text);
    return el("span", {}, code, " ", copyButton(code));
  };
  const counted = (cases) => `${cases} case${cases === 1 ? "" : "s"}`;
  const found = (clause, link) => (data.reproducers[clause] || []).find(([name]) => link.endsWith(`/${name}.py`));
  const script = ([name, text]) => {
    const code = el("pre", { tabindex: "0" }, text);
    return el("details", {}, el("summary", {}, `${name}.py: a script that needs only torch and the library`), copyButton(code), code);
  };
  const alike = (runs, clause) => {
    const groups = new Map();
    for (const run of runs) {
      const key = JSON.stringify([outcome(run, clause), data.cells[run][clause], data.failures[run][clause]]);
      groups.set(key, [...groups.get(key) || [], run]);
    }
    return [...groups.values()];
  };
  const failing = ([run, ...others], clause) => {
    const cases = data.failures[run][clause] || [];
    const cell = data.cells[run][clause];
    const made = el("details", cases.length && cell[2] ? { open: "" } : {}, el("summary", {},
      el("span", { class: `chip ${styled(outcome(run, clause))}` }, WORDS[outcome(run, clause)]),
      ` ${[run, ...others].map((each) => data.runs[each].name).join(", ")}`, el("small", {}, ` ${cell[2]} of ${counted(cell[1])}`)));
    for (const [name, which, expected, seen, reason, link] of cases) {
      made.append(el("div", { class: "case" }, el("h4", {}, name), list([
        ["expected", data.outcomes[which] === "unexpected-pass" ? "a failure, as the list of known ones says" : expected, "pre"],
        ["seen", data.outcomes[which] === "unexpected-pass" ? "it passes" : seen, "pre"],
        ["known", reason], ["more", link && (found(clause, link) ? `the script ${found(clause, link)[0]} below` : linked(link))],
        ["repeat", copied(command(run, name))],
      ])));
    }
    if (cell[2] > cases.length) made.append(el("p", { class: "muted" }, `… and ${cell[2] - cases.length} more in ${data.runs[run].file}`));
    return made;
  };
  const detail = (index) => {
    const clause = data.clauses[index];
    const bad = data.runs.map((_, run) => run).filter((run) => BAD.includes(outcome(run, index)));
    const rest = data.runs.map((_, run) => run).filter((run) => !bad.includes(run));
    const box = el("div", { class: "box" },
      el("p", { class: "lead" }, clause[STATEMENT] || "The text of this clause was not given to the report."),
      list([["area", data.areas[clause[AREA]]], ["level", clause[LEVEL]], ["source", clause[SOURCE]],
        ["rationale", clause[RATIONALE]], ["since", clause[SINCE] && `version ${clause[SINCE]} of the suite`]]));
    if (bad.length) box.append(part("What fails", ...alike(bad, index).map((runs) => failing(runs, index))));
    if (data.reproducers[index]) box.append(part("Reproducers", ...data.reproducers[index].map(script)));
    if (clause[LEVEL] === "recorded") {
      const letter = letters(index);
      for (const one of [...new Set(letter)].filter(Boolean).sort()) {
        const who = data.runs.filter((_, run) => letter[run] === one).map((run) => run.name).join(", ");
        box.append(part(`${one}: ${who}`, el("pre", { tabindex: "0" }, data.records[letter.indexOf(one)][index])));
      }
    } else if (rest.length) {
      box.append(part(bad.length ? "The others" : "Outcomes", el("ul", { class: "others" }, ...rest.map((run) => el("li", {},
        `${data.runs[run].name}: ${SAID[outcome(run, index)]}`,
        data.cells[run][index][1] ? ` (${counted(data.cells[run][index][1])})` : "")))));
    }
    const link = el("a", { href: `#clause=${clause[ID]}` }, "Link to this clause");
    box.append(el("p", { class: "muted" }, link));
    return el("tr", { role: "row", class: "detail" }, el("td", { role: "cell", "aria-colspan": data.runs.length + 2 }, box));
  };
  const open = (index, wanted) => {
    const one = rows[index];
    if (wanted && !one.detail) one.row.after(one.detail = detail(index));
    if (!wanted && one.detail) { one.detail.remove(); one.detail = null; }
    one.button.setAttribute("aria-expanded", String(wanted));
  };
  body.addEventListener("click", (event) => {
    const row = event.target.closest("tr");
    if (!row || row.classList.contains("detail") || String(getSelection())) return;
    const button = row.querySelector("button");
    const index = Number(button.dataset.clause);
    const wanted = !rows[index].detail;
    open(index, wanted);
    history.replaceState(null, "", wanted ? `#clause=${data.clauses[index][ID]}` : "#matrix");
  });
  body.addEventListener("keydown", (event) => {
    const row = event.target.closest("tr");
    const shown = rows.filter((one) => !one.row.hidden);
    const place = shown.findIndex((one) => one.row === row || one.detail === row);
    if (place < 0) return;
    const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (step && event.target === shown[place].button) {
      event.preventDefault();
      (shown[place + step] || shown[place]).button.focus();
    } else if (event.key === "Escape" && shown[place].detail) {
      open(rows.indexOf(shown[place]), false);
      shown[place].button.focus();
      history.replaceState(null, "", "#matrix");
    }
  });
  let waiting = 0;
  controls.forEach((control) => control.addEventListener("input", () => {
    cancelAnimationFrame(waiting);
    waiting = requestAnimationFrame(() => { filter(); remember(); });
  }));
  const remember = () => {
    const set = controls.filter((control) => control.value !== "");
    const parts = set.map((control) => `${control.id.slice(7)}=${encodeURIComponent(named(control))}`);
    history.replaceState(null, "", `#${["matrix", ...parts].join("&")}`);
  };
  const named = (control) => control.id === "filter-run" ? control.selectedOptions[0].dataset.name : control.value;
  const choose = (wanted) => {
    for (const control of controls) {
      const text = wanted.get(control.id.slice(7)) || "";
      const option = options(control).find((one) => one.value === text || one.dataset.name === text);
      control.value = control.options ? (option ? option.value : "") : text;
    }
    filter();
  };
  $("reset").addEventListener("click", () => { choose(new Map()); remember(); $("filter-text").focus(); });

  // --- differences ------------------------------------------------------------------------------
  const [from, to] = [$("from"), $("to")];
  const table = (caption, heads, lines, worse) => {
    const made = el("table", {}, el("caption", {}, caption),
      el("thead", {}, el("tr", {}, ...heads.map((head) => el("th", { scope: "col" }, head)))));
    const inside = el("tbody");
    for (const [name, ...cells] of lines) {
      inside.append(el("tr", {}, el("th", { scope: "row" }, name), ...cells.map((cell, index) => el("td", { "data-head": heads[index + 1] }, cell))));
    }
    made.append(inside);
    return el("div", { class: `scroll ${worse || ""}`, tabindex: "0", role: "region", "aria-label": caption }, made);
  };
  const chip = (run, index) => {
    const [what, cell] = [outcome(run, index), data.cells[run][index]];
    return el("span", { class: `chip ${styled(what)}` }, WORDS[what] + (BAD.includes(what) && cell[2] < cell[1] ? ` ${cell[2]}/${cell[1]}` : ""));
  };
  const clauseLink = (index) => el("a", { href: `#clause=${data.clauses[index][ID]}` }, data.clauses[index][ID]);
  const number = (value) => value === null || value === Infinity ? "not finite" : value === undefined ? "–" : String(Number(value.toPrecision(3)));
  const compare = () => {
    const box = $("changes");
    if (!from || !to) return;
    const [a, b] = [Number(from.value), Number(to.value)];
    const verdicts = [], behaviour = [], errors = [], speeds = [];
    // As `keyedopt diff` decides: one function makes these for both.
    for (const [what, change, before, after] of data.changes[a][b]) {
      const index = place.get(what);
      verdicts.push(index === undefined ? [what, before, after, change, ""]
        : [clauseLink(index), chip(a, index), chip(b, index), change, data.clauses[index][STATEMENT]]);
    }
    data.clauses.forEach((clause, index) => {
      const [old, now] = [data.records[a][index], data.records[b][index]];
      if (clause[LEVEL] === "recorded" && old !== undefined && now !== undefined && old !== now) {
        behaviour.push([clauseLink(index), el("pre", {}, old), el("pre", {}, now), clause[STATEMENT]]);
      }
    });
    verdicts.sort((one, other) => (other[3] === "worse") - (one[3] === "worse"));
    for (const key of Object.keys(data.errors[a])) {
      const [old, now] = [data.errors[a][key], data.errors[b][key]];
      if (now === undefined) continue;
      const [was, is] = [old, now].map((error) => error === null ? Infinity : error);
      const grown = (low, high) => key.endsWith(", ULP") ? high > low + data.grown[0] : high > low * data.grown[1];
      if (grown(was, is) || grown(is, was)) errors.push([key, was, is]);
    }
    const moved = ([, was, is]) => Math.max(was, is) / Math.max(Math.min(was, is), Number.MIN_VALUE);
    errors.sort((one, other) => moved(other) - moved(one) || 0);
    const shownErrors = errors.map((error) => {
      const [key, was, is] = error;
      const factor = Number.isFinite(moved(error)) && moved(error) < 1e6 ? ` ${number(moved(error))} times` : "";
      return [key, number(was), number(is), `${is > was ? "grew" : "fell"}${factor}`];
    });
    const mine = (run) => new Map(data.speeds.filter((row) => row[0] === data.runs[run].implementation && row[1] === data.runs[run].version).map((row) => [row[2], row.slice(3)]));
    const [slow, fast] = [mine(a), mine(b)];
    if (data.runs[a].version !== data.runs[b].version) for (const [key, old] of slow) {
      const now = fast.get(key);
      if (now && ![...old, ...now].includes(null) && (now[2] < old[1] || now[1] > old[2])) speeds.push([key, `${number(old[0])}×`, `${number(now[0])}×`, now[0] < old[0] ? "slower" : "faster"]);
    }
    const [first, second] = [data.runs[a].name, data.runs[b].name];
    const section = (title, empty, made) => el("section", {}, el("h3", {}, title), made || el("p", { class: "muted" }, empty));
    const heads = ["clause", first, second, "change", "statement"];
    const of = (...kinds) => verdicts.filter((line) => kinds.includes(line[3]));
    const [judged, other] = [of("worse", "better"), of("changed")];
    box.replaceChildren(
      el("p", { class: "lead" }, `From ${first} to ${second}: ${of("worse").length} verdicts are worse, ${of("better").length} better, ${other.length} changed; ${behaviour.length} behaviours changed; ${errors.length} errors changed; ${speeds.length} speeds moved.`),
      section("Verdicts", "No verdict is worse or better.", judged.length && table("Verdicts that are worse or better", heads, judged, "verdicts")),
      other.length ? el("details", {}, el("summary", {}, `${other.length} verdicts changed and are neither: one of them does not claim what the other one does`),
        table("Verdicts that changed and are neither worse nor better", heads, other, "verdicts")) : "",
      section("Behaviour", "No record of behaviour changed.", behaviour.length && table("Records of behaviour that changed", ["clause", first, second, "statement"], behaviour, "behaviour")),
      section("Errors", "No measured error changed.", errors.length && table("Worst errors, largest change first", ["what", first, second, "change"], shownErrors)),
      section("Speed", "No ratio moved beyond its interval, or none was measured for both.", speeds.length && table("Ratios that moved beyond their intervals", ["what", first, second, "change"], speeds)));
  };
  if (from) {
    const same = data.runs.flatMap((one, b) => data.runs.map((other, a) => [a, b])
      .filter(([a]) => a !== b && data.runs[a].implementation === one.implementation));
    const older = same.filter(([a, b]) => data.runs[a].version.localeCompare(data.runs[b].version, "en", { numeric: true }) < 0);
    [from.value, to.value] = (older[0] || same[0] || [0, Math.min(1, data.runs.length - 1)]).map(String);
    [from, to].forEach((control) => control.addEventListener("input", compare));
    $("swap").addEventListener("click", () => { [from.value, to.value] = [to.value, from.value]; compare(); });
  }

  // --- the way between the views -----------------------------------------------------------------
  // Without their ids the browser does not scroll to them: a view begins at the top of the page.
  const views = new Map([...document.querySelectorAll("main > section")].map((view) => [view.id, view]));
  for (const view of views.values()) view.removeAttribute("id");
  const go = () => {
    const parts = location.hash.slice(1).split("&").map((text) => text.split("="));
    const read = (text) => { try { return decodeURIComponent(text); } catch { return text; } };
    const wanted = new Map(parts.map(([key, value]) => [key, read(value || "")]));
    const clause = place.get(wanted.get("clause"));
    const name = clause !== undefined ? "matrix" : views.has(parts[0][0]) ? parts[0][0] : "overview";
    for (const [each, view] of views) view.hidden = each !== name;
    for (const link of document.querySelectorAll("nav a")) {
      if (link.hash !== `#${name}`) { link.removeAttribute("aria-current"); continue; }
      link.setAttribute("aria-current", "page");
    }
    document.title = `${views.get(name).querySelector("h2").textContent} · keyedopt report`;
    if (name === "differences") compare();
    if (name !== "matrix") { scrollTo(0, 0); return; }
    if (clause === undefined) { choose(wanted); return; }
    filter();
    if (rows[clause].row.hidden) choose(new Map());
    open(clause, true);
    rows[clause].button.focus({ preventScroll: true });
    rows[clause].row.scrollIntoView({ block: "start" });
  };
  addEventListener("hashchange", go);
  let closed = [];
  addEventListener("beforeprint", () => {
    filter();
    compare();
    closed = [...document.querySelectorAll(".card details:not([open])")];
    for (const one of closed) one.open = true;
  });
  addEventListener("afterprint", () => { for (const one of closed) one.open = false; });
  document.documentElement.classList.add("ready");
  go();
})();
