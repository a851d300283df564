"""``keyedopt bench``: the verbs and their options. Importing this module does not import torch."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

if TYPE_CHECKING:
    from keyedopt.cli.bench_builds import Asked

app = typer.Typer(
    help="Measure speed: beside other libraries, against a base commit, or between two commits.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

Workloads = Annotated[
    list[str] | None,
    typer.Option("--workload", metavar="NAME", help="Measure only this workload; repeatable. See `list`."),
]
Tasks = Annotated[
    list[str] | None,
    typer.Option("--task", metavar="NAME", help="Measure only this task; repeatable. See `list`."),
]
Target = Annotated[
    str, typer.Option("--implementation", metavar="TARGET", help="The target to measure, as for `check`.")
]
Device = Annotated[str, typer.Option(help="cpu, cuda, or another device of torch.")]
Imports = Annotated[
    list[str] | None,
    typer.Option("--import", metavar="MODULE", help="Import this module first; repeatable."),
]
Output = Annotated[Path | None, typer.Option(metavar="FILE", help="Write every sample and verdict as JSON.")]
Conformance = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="A result of `keyedopt check` for the same build. Without it, ratios are marked unverified.",
    ),
]
CheckFirst = Annotated[
    bool, typer.Option("--check", help="Run the whole suite first, instead of reading FILE.")
]
OneThread = Annotated[int, typer.Option(help="Threads of torch.", min=1)]


@app.command()
def run(
    workload: Workloads = None,
    task: Tasks = None,
    implementation: Target = "fused",
    against: Annotated[
        str | None,
        typer.Option(
            metavar="PEER,...",
            help="Targets to compare with. Default: torch, fbgemm, torchrec, reference, if installed.",
        ),
    ] = None,
    device: Device = "cpu",
    imports: Imports = None,
    output: Output = None,
    conformance: Conformance = None,
    check: CheckFirst = False,
    seconds: Annotated[float, typer.Option(help="Seconds per comparison.", min=0.01, max=3600)] = 1.0,
    threads: Annotated[
        int | None, typer.Option(help="Threads of torch. Default: torch's.", min=1, show_default=False)
    ] = None,
    cold: Annotated[bool, typer.Option("--cold", help="Flush the caches before each run.")] = False,
    trace: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Replay lookups from a .parquet or .pt file with indices, and offsets or lengths.",
        ),
    ] = None,
    dim: Annotated[
        int | None,
        typer.Option(help="Row width of the tables of --trace. Default: 64.", min=1, show_default=False),
    ] = None,
) -> None:
    """Measure an implementation beside other libraries, and show ratios.

    Example: keyedopt bench run --workload 8x200k-zipf --against torch,fbgemm --output bench.json
    """
    from keyedopt.cli.bench_run import Asked, measure

    peers = None if against is None else tuple(filter(None, map(str.strip, against.split(","))))
    asked = Asked(
        workloads=tuple(workload or ()),
        tasks=tuple(task or ()),
        implementation=implementation,
        against=peers,
        device=device,
        output=output,
        conformance=conformance,
        check=check,
        seconds=seconds,
        threads=threads,
        cold=cold,
        trace=trace,
        dim=dim,
        imports=tuple(imports or ()),
    )
    _exit(lambda: measure(asked))


def _asked(
    workload: list[str] | None, task: list[str] | None, imports: list[str] | None, *others: Any
) -> "Asked":
    """Return the options that `gate` and `commits` share; `others` are in the order of the fields."""
    from keyedopt.cli.bench_builds import Asked

    return Asked(tuple(workload or ()), tuple(task or ()), tuple(imports or ()), *others)


@app.command()
def gate(
    base: Annotated[str, typer.Argument(metavar="BASE", help="A branch, a tag or a commit.")],
    workload: Workloads = None,
    task: Tasks = None,
    implementation: Target = "fused",
    device: Device = "cpu",
    imports: Imports = None,
    threads: OneThread = 1,
    rounds: Annotated[
        int, typer.Option(help="Rounds of the base against itself, which give the noise floor.", min=2)
    ] = 8,
    output: Output = None,
) -> None:
    """Compare the checkout with a base commit; exit code 1 if something takes longer.

    Both are built in worktrees of the git repository in this folder and measured alternately. The checkout
    includes uncommitted changes to files that git tracks.

    Example: keyedopt bench gate origin/main --task train-adam
    """
    from keyedopt.cli.bench_gate import run_gate

    asked = _asked(workload, task, imports, implementation, device, threads, rounds, output)
    _exit(lambda: run_gate(base, asked))


@app.command()
def commits(
    first: Annotated[str, typer.Argument(metavar="A", help="A branch, a tag or a commit.")],
    second: Annotated[str, typer.Argument(metavar="B", help="Another one.")],
    workload: Workloads = None,
    task: Tasks = None,
    implementation: Target = "fused",
    device: Device = "cpu",
    imports: Imports = None,
    threads: OneThread = 1,
    rounds: Annotated[int, typer.Option(help="Rounds of two fresh processes.", min=1)] = 4,
    output: Output = None,
) -> None:
    """Build two commits, measure them alternately, and show ratios with intervals.

    Example: keyedopt bench commits v0.1.0 HEAD --workload small-step
    """
    from keyedopt.cli.bench_commits import compare_commits

    asked = _asked(workload, task, imports, implementation, device, threads, rounds, output)
    _exit(lambda: compare_commits((first, second), asked))


@app.command()
def grid(
    implementation: Target = "fused",
    against: Annotated[
        str, typer.Option(metavar="PEER,...", help="Targets to compare with.")
    ] = "torch,fbgemm,torchrec",
    output: Output = None,
    conformance: Conformance = None,
    check: CheckFirst = False,
    seconds: Annotated[float, typer.Option(help="Seconds per comparison.", min=0.01, max=3600)] = 0.5,
    threads: OneThread = 1,
) -> None:
    """Measure many shapes of tables beside other libraries, and show the worst ratios first.

    The form is that of torchrec's models: a `KeyedJaggedTensor` in, one joined output and its gradient. The
    grid takes less than ten minutes on two cores.

    Example: keyedopt bench grid --check --output grid.json
    """
    from keyedopt.benchmarks.grid import pairs
    from keyedopt.cli.bench_run import Asked, measure
    from keyedopt.cli.bench_table import show_grid

    peers = tuple(filter(None, map(str.strip, against.split(","))))
    asked = Asked(
        implementation=implementation,
        against=peers,
        output=output,
        conformance=conformance,
        check=check,
        seconds=seconds,
        threads=threads,
    )
    _exit(lambda: measure(asked, pairs(), show_grid))


@app.command("list")
def list_(
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME", help="Only workloads and tasks whose name begins so.", show_default=False
        ),
    ] = "",
    everything: Annotated[
        bool, typer.Option("--all", help="List each task, not only one line for each kind of work.")
    ] = False,
) -> None:
    """List the workloads and the tasks, of which those for several optimizers share a line.

    Example: keyedopt bench list train_joined
    """
    from keyedopt.cli.bench_table import show_list
    from keyedopt.cli.messages import fail

    if problem := show_list(name, everything):
        fail(problem)


@app.command()
def harness(
    seconds: Annotated[float, typer.Option(help="Seconds per comparison.", min=0.01, max=3600)] = 1.0,
    output: Output = None,
) -> None:
    """Measure imports and commands of keyedopt itself, as ratios to `import torch`."""
    from keyedopt.cli.bench_harness import time_harness

    _exit(lambda: time_harness(seconds, output))


def _exit(measure: Callable[[], int]) -> NoReturn:
    """Run a verb and exit with its code; the first signal interrupts it, so that it can clean up."""
    from keyedopt.cli.interrupts import interruptible
    from keyedopt.conformance.results.errors import KeyedoptError

    with interruptible():
        try:
            code = measure()
        except KeyboardInterrupt as error:
            raise KeyedoptError("interrupted; nothing was written") from error
    raise typer.Exit(code)
