"""Run a script whose Triton kernels get tensors on the CPU, and report what hardware may do wrong.

The script launches kernels as on a GPU, with tensors on the CPU. It runs once for each seed, and each launch
under another schedule.
"""

import argparse
import runpy
import sys
from collections import Counter
from itertools import count

from keyedopt.ptx import Schedule, executing


def main() -> int:
    """Return 0 if nothing was found, else 1."""
    parser = argparse.ArgumentParser(prog="python -m keyedopt.ptx", description=__doc__)
    parser.add_argument("script")
    parser.add_argument("--seeds", type=int, default=20, help="how often the script runs (default: 20)")
    parser.add_argument("--architecture", type=int, default=90, help="such as 80 or 90 (default: 90)")
    given, rest = parser.parse_known_args()
    sys.argv = [given.script, *rest]
    found: Counter[str] = Counter()
    schedules: Counter[str] = Counter()
    numbers = count()
    for _ in range(given.seeds):
        with executing(given.architecture, lambda _: Schedule.of(next(numbers)), strict=False) as session:
            runpy.run_path(given.script, run_name="__main__")
        schedules.update(one.kernel for one in session.reports)
        for report in session.reports:
            found.update(f"{report.kernel}: {one.label}" for one in report.findings)
    for what, times in found.most_common():
        print(f"{what} (in {times} launches)")
    print(
        ", ".join(f"{kernel}: {times} launches" for kernel, times in schedules.items())
        or "no kernel was launched"
    )
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
