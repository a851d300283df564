"""``keyedopt``: the verbs and their options. This module imports neither torch nor the suite."""

import contextlib
import sys
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from keyedopt.cli import bench
from keyedopt.conformance.results import RULE
from keyedopt.conformance.results.errors import KeyedoptError

app = typer.Typer(
    name="keyedopt",
    help="Is this optimizer what it claims to be, and how fast is it?",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    add_completion=False,
    epilog="Exit codes: 0 all held, 1 something did not, 2 the harness or its input was wrong.",
)
app.add_typer(bench.app, name="bench")


class Level(StrEnum):
    """Which clauses a gate covers."""

    must = "must"
    should = "should"


class What(StrEnum):
    """What `keyedopt list` can list."""

    targets = "targets"
    clauses = "clauses"
    areas = "areas"
    devices = "devices"


class Form(StrEnum):
    """What a report can be."""

    html = "html"
    csv = "csv"
    parquet = "parquet"
    markdown = "markdown"
    json = "json"
    badge = "badge"


class DiffForm(StrEnum):
    """How a difference can be shown."""

    text = "text"
    markdown = "markdown"
    json = "json"


#: What has to be installed for a report.
NEEDS_REPORTS = "install it with: pip install 'keyedopt[reports]'"


def say(message: str) -> int:
    """Print an error on one line of stderr; return its exit code, 2."""
    sys.stderr.write(f"keyedopt: {' '.join(message.split())}\n")
    return 2


def fail(message: str) -> NoReturn:
    """Print an error on one line of stderr, and exit with 2."""
    raise typer.Exit(say(message))


Imports = Annotated[
    list[str] | None,
    typer.Option(
        "--import",
        metavar="MODULE",
        help="Import this module first, such as torch_npu, which registers a device; repeatable.",
    ),
]


@app.command(epilog=RULE)
def check(
    targets: Annotated[
        list[str],
        typer.Argument(
            metavar="TARGET...",
            help="A registered name, package.module, or package.module:attribute.",
            show_default=False,
        ),
    ],
    level: Annotated[
        Level, typer.Option(help="Gate on must clauses only, or on should clauses too.")
    ] = Level.should,
    suite: Annotated[
        str | None, typer.Option(metavar="VERSION", help="Gate on this version of the suite.")
    ] = None,
    require_areas: Annotated[
        str | None, typer.Option(metavar="AREA,...", help="Fail if one of these is not claimed.")
    ] = None,
    area: Annotated[list[str] | None, typer.Option(help="Check only this area; repeatable.")] = None,
    device: Annotated[
        str | None,
        typer.Option(
            help="Where cases run, such as cuda:1; default: the target's first. See `list devices`."
        ),
    ] = None,
    imports: Imports = None,
    dtype: Annotated[
        list[str] | None,
        typer.Option(help="Only this dtype; repeatable. Default: all of the target's."),
    ] = None,
    output: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FILE",
            help="Write the result: .json (complete), .xml (JUnit) or .md; repeatable. "
            "A folder when there are several targets.",
        ),
    ] = None,
    expectations: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Known failures (TOML), or the name of a shipped list."),
    ] = None,
    update_expectations: Annotated[
        bool, typer.Option("--update-expectations", help="Rewrite FILE to what fails now.")
    ] = False,
    like: Annotated[
        str | None,
        typer.Option(
            metavar="OTHER",
            help="Check this target too, and fail where outcomes or recorded behaviour differ; "
            "the exit code says whether they do.",
        ),
    ] = None,
    time_limit: Annotated[float, typer.Option(help="Seconds that a case may take.", min=0.1)] = 30.0,
    workers: Annotated[
        int | None, typer.Option(help="Worker processes; default: one per processor.", min=1)
    ] = None,
    exitfirst: Annotated[
        bool,
        typer.Option("-x", "--exitfirst", help="Stop at the first failing case that is not a known failure."),
    ] = False,
) -> None:
    """Give a verdict on implementations.

    Example: keyedopt check torchrec --expectations torchrec --output results/torchrec.json
    """
    from keyedopt.cli.check import check_targets

    options = {
        "level": level.value,
        "suite": suite,
        "areas": tuple(area or ()),
        "require_areas": tuple(name.strip() for name in (require_areas or "").split(",") if name.strip()),
        "imports": tuple(imports or ()),
        "device": device,
        "dtypes": tuple(dtype or ()),
        "limit": time_limit,
        "workers": workers,
        "exitfirst": exitfirst,
    }
    if like is not None:
        with _reports():
            import keyedopt.cli.like  # noqa: F401 - what it needs is missed now, not after the runs
    code = check_targets(targets, output or [], expectations, update_expectations, options, like)
    raise typer.Exit(code)


@app.command()
def explain(clause: Annotated[str, typer.Argument(metavar="CLAUSE", show_default=False)]) -> None:
    """Show a clause: text, level, source, why, and the cases that test it.

    Example: keyedopt explain CLIP-001
    """
    from keyedopt.cli.explain import explain_clause

    explain_clause(clause, fail)


@app.command("list")
def list_(
    what: Annotated[What, typer.Argument(help="What to list.")] = What.targets, imports: Imports = None
) -> None:
    """List the known targets, the clauses, the areas of the surface, or the devices that torch finds here."""
    from keyedopt.cli.listing import listing

    listing(what.value, tuple(imports or ()))


@app.command()
def replay(
    result: Annotated[Path, typer.Argument(metavar="RESULT", help="A result file (.json).")],
    case: Annotated[str, typer.Argument(metavar="CASE", help="CLAUSE, CLAUSE[n], or the name of a case.")],
    output: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the script here; default: print it.")
    ] = None,
    run: Annotated[
        bool, typer.Option("--run", help="Run the script; the exit code is 1 while the case fails.")
    ] = False,
) -> None:
    """Write a case as a stand-alone script that needs only torch and the implementation, or run it.

    Example: keyedopt replay results/torchrec.json CLIP-007[1] --output clip.py
    """
    from keyedopt.cli.replay import replay_case

    raise typer.Exit(replay_case(result, case, output, run, fail))


@app.command()
def report(
    results: Annotated[
        list[Path],
        typer.Argument(
            metavar="RESULTS...",
            help="Files that check, bench, asv or pytest-benchmark wrote, and folders of them.",
            show_default=False,
        ),
    ],
    output: Annotated[Path, typer.Option(metavar="DIR", help="Write the report into this folder.")],
    format_: Annotated[
        list[Form] | None, typer.Option("--format", help="What to write; repeatable. Default: html.")
    ] = None,
    plots: Annotated[
        bool, typer.Option("--plots", help="Write each picture of the page as PNG and SVG too.")
    ] = False,
    commit_url: Annotated[
        str,
        typer.Option(metavar="URL", help="Where the page links commits to: https://…, with {commit} in it."),
    ] = "",
) -> None:
    """Make a page, tables, a summary or badges of results.

    Exit code 1: it is made, but some of the files were refused. 2: nothing could be read.

    Example: keyedopt report results/ --output site --format html --format csv
    """
    with _reports():
        from keyedopt.cli.report import report as make

        formats = [form.value for form in format_ or [Form.html]]
        code = make(results, output, formats, plots, commit_url, fail)
    raise typer.Exit(code)


@app.command()
def diff(
    before: Annotated[Path, typer.Argument(metavar="BEFORE", help="A result of check or of bench.")],
    after: Annotated[Path, typer.Argument(metavar="AFTER", help="Another one of the same kind.")],
    format_: Annotated[DiffForm, typer.Option("--format", help="How to show it.")] = DiffForm.text,
) -> None:
    """Show what changed: verdicts, recorded behaviour, measured errors, speeds.

    Exit code 1: something got worse. 0: nothing did; recorded behaviour may have changed.

    Example: keyedopt diff results/torchrec-1.6.1.json results/torchrec-1.8.0.json
    """
    with _reports():
        from keyedopt.cli.diff import diff as compare

    raise typer.Exit(compare(before, after, format_.value, fail))


@app.command("init-adapter")
def init_adapter(
    name: Annotated[str, typer.Argument(metavar="NAME", help="What `keyedopt check NAME` shall know.")],
    output: Annotated[Path, typer.Option(metavar="DIR", help="Where the new folder goes.")] = Path(),
    library: Annotated[
        str | None,
        typer.Option("--from", metavar="MODULE", help="Propose what its classes and signatures show."),
    ] = None,
) -> None:
    """Write a small package that makes a library known to keyedopt, with a CI workflow.

    Example: keyedopt init-adapter acme --from acme.optim
    """
    from keyedopt.cli.adapter import init_adapter as write

    raise typer.Exit(write(name, output, fail, library))


@app.command()
def precision(
    reference: Annotated[Path, typer.Argument(metavar="A", help="A result of the reference.")],
    other: Annotated[Path, typer.Argument(metavar="B", help="A result of another implementation.")],
) -> None:
    """Compare the errors that two results measured: B's may be at most twice A's, or one ULP.

    Exit code 1: an error is beyond the bound.

    Example: keyedopt precision results/reference.json results/fused.json
    """
    from keyedopt.conformance.results.precision import main as compare

    raise typer.Exit(compare([str(reference), str(other)]))


@app.command()
def mutants(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[AREA | NAME]...", help="Only these mutants. Default: all.", show_default=False
        ),
    ] = None,
    everything: Annotated[
        bool, typer.Option("--all", help="Run the whole suite on each mutant, not only the clauses it names.")
    ] = False,
) -> None:
    """Plant faults in the reference, and show which of them the suite does not reject.

    Exit code 1: a mutant survives.

    Example: keyedopt mutants clipping
    """
    from keyedopt.conformance.mutants.rejection import main as plant

    raise typer.Exit(plant(names or (), everything))


@app.command()
def findings(
    text: Annotated[str, typer.Argument(metavar="TEXT", help="Only findings whose name contains it.")] = "",
) -> None:
    """Run the reproducers of the defects found in torch and its libraries: which are still there?

    Exit code 1: a defect is still there. 2: a reproducer broke down.

    Example: keyedopt findings torchrec
    """
    from keyedopt.conformance.findings.reproduce import main as reproduce

    raise typer.Exit(reproduce(text))


@contextlib.contextmanager
def _reports() -> Iterator[None]:
    """Print in one line what to install if a library for reports is missing."""
    try:
        yield
    except ModuleNotFoundError as error:
        fail(f"reports need {error.name}; {NEEDS_REPORTS}")


def main() -> None:
    """Run the command line."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # a terminal that cannot show a character gets ?
    try:
        code = app(prog_name="keyedopt", standalone_mode=False)
    except (OSError, KeyedoptError) as error:
        code = say(str(error))
    except Exception as error:
        if type(error).__name__ == "Abort":  # typer's error for an interrupt
            sys.exit(say("interrupted; nothing was written"))
        if not hasattr(error, "format_message"):
            raise
        if type(error).__name__ == "NoArgsIsHelpError":
            error.show()  # type: ignore[attr-defined]
            code = 2
        else:  # typer's message for a wrong option, on one line
            code = say(f"{error.format_message().rstrip('.')}; see `keyedopt --help`")
    sys.exit(code or 0)


if __name__ == "__main__":
    main()
