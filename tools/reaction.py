"""Measure how fast the page answers: the time from a key pressed in a filter to the frame with its result.

``python -m keyedopt.tools.reaction PAGE`` opens the page in headless Chromium and operates each filter of
the matrix by keyboard. The browser measures the times (Event Timing): from the key press to the next frame,
in steps of 8 ms; times below 16 ms count as 16 ms.
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

from keyedopt.conformance.results.errors import KeyedoptError

#: Flags with which Chromium sends no requests of its own.
FLAGS = (
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
)
#: The shortest time that the browser reports, in ms.
LEAST = 16.0
#: The keys pressed in each filter, one after the other; each changes the matrix.
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
#: The result is on the screen two frames later, as soon as the matrix shows as many clauses as it says.
_DONE = """() => new Promise((done) => {
    const whole = () => document.getElementById("count").textContent.startsWith(
        `${document.querySelectorAll("#clauses tr:not(.detail):not([hidden])").length} `);
    const wait = (left) => left || !whole() ? requestAnimationFrame(() => wait(Math.max(0, left - 1)))
        : setTimeout(() => done(window.entries.splice(0)), 30);
    wait(2);
})"""


class MissingError(KeyedoptError):
    """Playwright or Chromium is not installed; the message says what to do."""


@contextmanager
def chromium() -> Iterator[Any]:
    """Start the Chromium of the system or of Playwright.

    Raises:
        MissingError: Playwright or Chromium is missing.
    """
    try:
        from playwright.sync_api import Error, sync_playwright
    except ImportError as error:
        raise MissingError(
            "Playwright is missing; install it with: pip install 'keyedopt[browser]'"
        ) from error
    path = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
    with sync_playwright() as playwright:
        try:
            started = playwright.chromium.launch(executable_path=path, args=list(FLAGS))
        except Error as error:
            raise MissingError(
                "Chromium cannot be started; install it with: playwright install chromium, or with the "
                "packages of the system, and set CHROMIUM to its path"
            ) from error
        yield started
        started.close()


def reactions(page: Path, rounds: int = 3) -> dict[str, list[float]]:
    """Return the times of each filter in ms, one for each key pressed.

    Raises:
        MissingError: Playwright or Chromium is missing.
        ValueError: the file is not a page of `keyedopt report`, or the page has no clauses.
    """
    found: dict[str, list[float]] = {name: [] for name in KEYS}
    with chromium() as browser:
        tab = browser.new_page(viewport={"width": 1400, "height": 1000})
        if page.is_file():
            tab.goto(f"{page.resolve().as_uri()}#matrix")
        if not tab.locator("#clauses tr").count():
            raise ValueError(f"{page} is not a page of `keyedopt report` with clauses in it")
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
    """Measure a page and print the times; return 2 if the page cannot be measured."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("page", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    asked = parser.parse_args(words)
    try:
        print(described(reactions(asked.page, asked.rounds)))
    except (MissingError, ValueError) as error:
        print(f"keyedopt: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
