"""Pages that are made of data, and copies of those kept elsewhere: panel, trust, contributing, versions."""

import re
from pathlib import Path

from keyedopt.conformance import spec
from keyedopt.conformance.findings import findings
from keyedopt.conformance.run.case_sources import cases_by_clause
from keyedopt.conformance.spec import sentences

ROOT = Path(__file__).parents[1]
#: Folders that are made anew by each build.
MADE = ("clauses", "findings")
#: The public names, in the order of the API pages.
GROUPS = {
    "Embedding tables": (
        *("EmbeddingBagConfig", "EmbeddingBagCollection", "EmbeddingConfig", "EmbeddingCollection"),
        *("PoolingType", "Jagged", "CachedEmbeddings", "as_torchrec", "explain"),
        *("use_fbgemm_kernels", "use_keyedopt_kernels"),
    ),
    "Optimizers of tables": ("RowWiseAdagrad", "PartialRowWiseAdam", "PartialRowWiseLAMB", "SparseAdam"),
    "Optimizers of any parameters": ("SGD", "Adagrad", "Adam", "AdamW", "Ftrl", "LAMB", "LarsSGD"),
    "Steps in the backward pass": (
        *("apply_optimizer_in_backward", "in_backward_optimizer_filter"),
        *("FusedOptimizer", "FusedOptimizerModule", "EmptyFusedOptimizer"),
    ),
    "Keyed optimizers": (
        *("KeyedOptimizer", "KeyedOptimizerWrapper", "OptimizerWrapper", "CombinedOptimizer"),
    ),
    "Clipping": ("GradientClippingOptimizer", "GradientClipping"),
    "Schedules": ("WarmupOptimizer", "WarmupStage", "WarmupPolicy"),
    "Accumulation of gradients": (
        *("AccumulateSGD", "AccumulateAdagrad", "AccumulateRowWiseAdagrad", "AccumulateAdam"),
        "AccumulateAdamW",
    ),
    "Many ranks": ("SemisyncOptimizer", "FaultTolerantOptimizer"),
}
#: What classes of keyedopt share among themselves, and users do not call.
INTERNAL = (
    *("algorithm", "backward", "bulk", "can_trace", "check", "check_gradient", "check_gradients"),
    *("check_indices", "check_layout", "check_options", "check_replication", "check_shapes", "children_name"),
    *("count_device", "count_state", "current_layout", "full_state", "function", "has_fast_path"),
    *("initial_state", "look_up_operator", "look_up_traced", "lookup_features", "make_step"),
    *("noted_arguments", "options"),
    *("partial_rowwise", "pools", "prepare_tracing", "profile_hook_step", "row_state", "row_states", "rule"),
    *("scratch_buffers", "set_first_optimizer", "shared", "strict", "table_class", "table_configs"),
    *("tables_only", "torch_options", "traced_leaves", "trains", "update", "update_group", "window_type"),
)


def write(folder: Path) -> None:
    """Write the pages into the folder of the sources; files that would not change stay."""
    documents = {
        "contributing.md": "CONTRIBUTING.md",
        "panel.md": "conformance/PANEL.md",
        "trust.md": "conformance/TRUST.md",
    }
    copied = [(page, _linked((ROOT / file).read_text(encoding="utf-8"))) for page, file in documents.items()]
    made = dict([*_clauses(), *_findings(), *_api(), *copied, _versions()])
    for name in MADE:
        for path in (folder / name).glob("*.md"):
            if f"{name}/{path.name}" not in made:
                path.unlink()
    for name, text in made.items():
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")


def _plain(text: str) -> str:
    return re.sub(r"([<>\[\]*_{}|$])", r"\\\1", text.replace("\\", "\\\\"))


def _clauses():
    areas = spec.areas().values()
    rows = [f"| [{one.name}]({one.name}.md) | {len(one.clauses)} | {_plain(one.title)} |" for one in areas]
    toc = "\n".join(one.name for one in areas)
    rules = [f"{n}. **{rule.title}.** {_plain(rule.text)}" for n, rule in sentences.rules().items()]
    yield (
        "clauses/index.md",
        "# Clauses\n\nEach clause has an address that never changes: `clauses/AREA.html#ID`, with the id in "
        "lower case.\n\n| area | clauses | about |\n|---|---|---|\n" + "\n".join(rows) + "\n\n## Rules\n\n"
        "Where the documents are silent, these rules of keyedopt decide.\n\n" + "\n".join(rules) + "\n\n"
        f"```{{toctree}}\n:hidden:\n\n{toc}\n```\n",
    )
    for area in areas:
        lines = [f"# {area.name}: {_plain(area.title)}", ""]
        for clause in area.clauses:
            lines += [f"({clause.id.lower()})=", f"## {clause.id}", ""]
            lines += [f"**{clause.level}**, since suite {clause.since}. {_plain(clause.statement)}", ""]
            lines += [f"Why: {_plain(clause.rationale)}", ""] if clause.rationale else []
            lines += [f"Varies: {', '.join(clause.varies)}.", ""] if clause.varies else []
            for document, sentence in sentences.by_clause().get(clause.id, ()):
                lines += [f"> {_plain(sentence.content)}", ">", f"> [{sentence.id}]({document.address})", ""]
            for case in cases_by_clause().get(clause.id, ()):
                lines += [f"- `{case.name}`: {_plain(' '.join(case.expectation.split()))}"]
            lines += [""]
        yield f"clauses/{area.name}.md", "\n".join(lines)


def _findings():
    """Yield a page for each library; the address of a finding is the name of its script."""
    known = {clause.id: area.name for area in spec.areas().values() for clause in area.clauses}
    libraries = {}
    for one in findings():
        libraries.setdefault(one.library, []).append(one)
    rows = [f"| [{name}]({name}.md) | {len(found)} |" for name, found in libraries.items()]
    toc = "\n".join(libraries)
    yield (
        "findings/index.md",
        "# Findings\n\nDefects of published libraries. Each has a script that needs only torch and the "
        "library, and exits with 1 if the installed version has the defect; `keyedopt findings` runs all of "
        "them. The address of a finding is `findings/LIBRARY.html#SCRIPT`.\n\n"
        "| library | findings |\n|---|---|\n"
        + "\n".join(rows)
        + f"\n\n```{{toctree}}\n:hidden:\n\n{toc}\n```\n",
    )
    for library, found in libraries.items():
        lines = [f"# {library}", ""]
        for one in found:
            about = one.path.read_text(encoding="utf-8").split('"""', 2)[1]
            text = re.split(r"\n(?:Clauses|Affected|Versions):", about)[0].partition("\n")[2].strip()
            links = [f"[{name}](../clauses/{known[name]}.md#{name.lower()})" for name in one.clauses]
            lines += [f"({one.path.stem.replace('_', '-')})=", f"## {_title(one)}", "", _plain(text), ""]
            lines += [f"Versions: {one.versions or 'all that were checked'}. Clauses: {', '.join(links)}."]
            lines += [
                f"Script: {{download}}`{one.path.name} <../../conformance/findings/{one.path.name}>`.",
                "",
            ]
        yield f"findings/{library}.md", "\n".join(lines)


def _title(finding) -> str:
    return _plain(finding.summary.rstrip(".").replace("``", ""))


def _api():
    """Yield a page for each package, with a section for each public name, by subject."""
    from keyedopt import fused, reference

    about = {"reference": "the specification in readable torch", "fused": "the same surface, fast"}
    for short, package in (("reference", reference), ("fused", fused)):
        lines = [f"# keyedopt.{short}", "", f"`keyedopt.{short}` is {about[short]}.", ""]
        for group, names in GROUPS.items():
            lines += [f"## {group}", ""]
            for name in names:
                if name in package.__all__:
                    lines += _entry(short, getattr(package, name), name)
        yield f"api/{short}.md", "\n".join(lines)


def _entry(package, found, name):
    """Return the section of a public name."""
    kind = "class" if isinstance(found, type) else "function"
    lines = [f"### {name}", "", "```{eval-rst}", f".. auto{kind}:: keyedopt.{package}.{name}"]
    if kind == "class":
        lines += ["   :members:", "   :inherited-members: Module, Optimizer, Enum, tuple, ABC"]
        lines += [f"   :exclude-members: {', '.join(INTERNAL)}"]
    if package == "fused" and found.__module__.startswith("keyedopt.reference"):
        lines += ["   :no-index:"]  # the page of the reference has the entry of the index
    return [*lines, "```", ""]


def _versions() -> tuple[str, str]:
    """Return the page of the versions on which keyedopt was checked, which is a section of a README."""
    text = (ROOT / "conformance" / "README.md").read_text(encoding="utf-8")
    section = text.partition("\n## Versions\n")[2].partition("\n## ")[0]
    return "versions.md", f"# Versions\n{_linked(section)}\n"


def _linked(document: str) -> str:
    """Return a document whose links lead to pages of the site; links to other files become code."""
    library = {one.path.name: one.library for one in findings()}

    def linked(found: re.Match[str]) -> str:
        text, target = found.groups()
        script = target.rpartition("/")[2]
        if target.startswith("#"):
            return found[0]
        if target.startswith("docs/"):
            return f"[{text}]({target.removeprefix('docs/')})"
        if script in library:
            place = script.removesuffix(".py").replace("_", "-")
            return f"[{text}](findings/{library[script]}.md#{place})"
        return f"`{text}`"

    return re.sub(r"\[([^\]]+)\]\((?!https?:)([^)]+)\)", linked, document)
