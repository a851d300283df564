"""How fast the page answers: the time from a key pressed in a filter to the frame that shows its result.

``python -m keyedopt.reports.reaction PAGE`` opens the page in headless Chromium and works each filter of the
matrix by keyboard, a step a key. The times are the browser's own (Event Timing): from the moment at which the
key came in to the next frame on the screen, in units of 8 ms; what takes less than 16 ms is not told apart.
"""

import argparse
import os
import shutil
import statistics
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

#: Chromium without what it would ask of a network.
FLAGS = (
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
)
#: What the browser does not tell apart, in ms.
LEAST = 16.0
#: The keys pressed in each filter, one after the other; each makes the matrix another one.
DOWN, UP = ["ArrowDown"] * 4, ["ArrowUp"] * 4
KEYS = {
    "area": DOWN + UP,
    "level": DOWN[:2] + UP[:2],
    "outcome": DOWN + UP,
    "run": DOWN[:2] + UP[:2],
    "text": [*"step", *["Backspace"] * 4],
}
_WATCH = """() => {
    window.entries = [];
    new PerformanceObserver((list) => window.entries.push(...list.getEntries().map((one) => one.duration)))
        .observe({ type: "event", durationThreshold: 16 });
}"""
#: Two frames later, and as soon as the matrix shows as many clauses as it says, all is on the screen.
_DONE = """() => new Promise((done) => {
    const whole = () => document.getElementById("count").textContent.startsWith(
        `${document.querySelectorAll("#clauses tr:not(.detail):not([hidden])").length} `);
    const wait = (left) => left || !whole() ? requestAnimationFrame(() => wait(Math.max(0, left - 1)))
        : setTimeout(() => done(window.entries.splice(0)), 30);
    wait(2);
})"""


class Missing(Exception):  # noqa: N818 - it is an answer
    """What the measurement needs is not installed; the message says what to do."""


@contextmanager
def chromium() -> Iterator[Any]:
    """Start Chromium, that of the system or of Playwright.

    Raises:
        Missing: there is no Playwright, or no Chromium.
    """
    try:
        from playwright.sync_api import Error, sync_playwright
    except ImportError as error:
        raise Missing("Playwright is missing; install it with: pip install 'keyedopt[browser]'") from error
    path = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
    with sync_playwright() as playwright:
        try:
            started = playwright.chromium.launch(executable_path=path, args=list(FLAGS))
        except Error as error:
            raise Missing(
                "Chromium cannot be started; install it with: playwright install chromium, or with the "
                "packages of the system, and set CHROMIUM to its path"
            ) from error
        yield started
        started.close()


def reactions(page: Path, rounds: int = 3) -> dict[str, list[float]]:
    """Return the times of each filter in ms, one for each key pressed.

    Raises:
        Missing: there is no Playwright, or no Chromium.
        ValueError: the file is no page of `keyedopt report`, or one without clauses.
    """
    found: dict[str, list[float]] = {name: [] for name in KEYS}
    with chromium() as browser:
        tab = browser.new_page(viewport={"width": 1400, "height": 1000})
        if page.is_file():
            tab.goto(f"{page.resolve().as_uri()}#matrix")
        if not tab.locator("#clauses tr").count():
            raise ValueError(f"{page} is no page of `keyedopt report` with clauses in it")
        tab.evaluate(_WATCH)
        for _ in range(rounds):
            for name, keys in KEYS.items():
                tab.locator(f"#filter-{name}").focus()
                for key in keys:
                    tab.keyboard.press(key)
                    found[name].append(max(tab.evaluate(_DONE), default=LEAST))
    return found


def described(found: dict[str, list[float]]) -> str:
    """Return the median and the worst time of each filter as lines.

    >>> print(described({"area": [16.0, 24.0, 40.0]}))
    area: median 24 ms, worst 40 ms, of 3 keys
    all: median 24 ms, worst 40 ms, of 3 keys
    """
    every = {**found, "all": [time for times in found.values() for time in times]}
    return "\n".join(
        f"{name}: median {statistics.median(times):.0f} ms, worst {max(times):.0f} ms, of {len(times)} keys"
        for name, times in every.items()
    )


def main(words: list[str] | None = None) -> int:
    """Measure a page and print the times; 2 where that is not possible."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("page", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    asked = parser.parse_args(words)
    try:
        print(described(reactions(asked.page, asked.rounds)))
    except (Missing, ValueError) as error:
        print(f"keyedopt: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
