"""``keyedopt``: the verbs and their options. This module imports neither torch nor the suite."""

import os
import sys
import traceback
from pathlib import Path
from typing import Annotated

import typer

from keyedopt.cli import bench, doctor
from keyedopt.cli.choices import AsJson, DiffForm, Form, Imports, Level, TimeLimit, What, names
from keyedopt.cli.messages import fail, say, uncut, usage, with_reports
from keyedopt.conformance.results import DEFINITIONS
from keyedopt.conformance.results.errors import KeyedoptError
from keyedopt.conformance.results.untrusted import error_text

app = typer.Typer(
    name="keyedopt",
    help="Is this optimizer what it claims to be, and how fast is it?",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Exit codes: 0 all held, 1 something did not, 2 the harness or its input was wrong.",
)
app.add_typer(bench.app, name="bench", short_help=bench.app.info.help)
app.command()(doctor.doctor)

#: What typer returns for an interrupt.
INTERRUPTED = 130


def _version(asked: bool) -> None:
    """Print the versions of keyedopt and of the suite, and exit."""
    if asked:
        from importlib.metadata import version

        from keyedopt.conformance import spec

        print(f"keyedopt {version('keyedopt')}, suite {spec.SUITE_VERSION}")
        raise typer.Exit


@app.callback()
def options(
    _: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version, and exit.")
    ] = False,
) -> None:
    """Take the options that every verb has."""


@app.command(epilog="\n\n".join(DEFINITIONS.values()))
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
    area: Annotated[
        list[str] | None, typer.Option(metavar="AREA,...", help="Check only these areas; repeatable.")
    ] = None,
    clause: Annotated[
        list[str] | None, typer.Option(metavar="CLAUSE,...", help="Check only these clauses; repeatable.")
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(
            "--device",
            metavar="DEVICE",
            help="Where cases run, such as cuda:1; default: the target's first. See `list devices`.",
        ),
    ] = None,
    imports: Imports = None,
    dtype: Annotated[
        list[str] | None,
        typer.Option(metavar="DTYPE,...", help="Only these dtypes; repeatable. Default: all it has."),
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
    time_limit: TimeLimit = 30.0,
    workers: Annotated[
        int | None, typer.Option(metavar="N", help="Worker processes; default: processors + 1.", min=1)
    ] = None,
    nproc: Annotated[int, typer.Option(help="Ranks of the cases in the area sharded.", min=1, max=8)] = 2,
    sign: Annotated[
        Path | None,
        typer.Option(metavar="KEY", help="Sign the .json result with this key of ssh, in FILE.sig."),
    ] = None,
    as_json: AsJson = False,
    exitfirst: Annotated[
        bool,
        typer.Option("-x", "--exitfirst", help="Stop at the first failing case that is not a known failure."),
    ] = False,
    verbose: Annotated[bool, typer.Option("-v", "--verbose", help="Show each known failure.")] = False,
) -> None:
    """Give a verdict on implementations.

    Example: keyedopt check torchrec --expectations torchrec --output results/torchrec.json
    """
    from keyedopt.cli.check import check_targets

    options = {
        "level": level.value,
        "suite": suite,
        "areas": names(area),
        "clauses": tuple(name.upper() for name in names(clause)),
        "require_areas": names([require_areas or ""]),
        "imports": tuple(imports or ()),
        "device": device,
        "dtypes": names(dtype),
        "limit": time_limit,
        "workers": workers,
        "nproc": nproc,
        "exitfirst": exitfirst,
    }
    if like is not None:
        with with_reports():
            import keyedopt.cli.like  # noqa: F401 - what it needs is missed now, not after the runs
    code = check_targets(
        targets, output or [], expectations, update_expectations, options, like, verbose, sign, as_json
    )
    raise typer.Exit(code)


@app.command()
def explain(
    name: Annotated[str | None, typer.Argument(metavar="CLAUSE | PREFIX | AREA", show_default=False)] = None,
    failed: Annotated[
        bool, typer.Option("--failed", help="Show the clauses that failed in your last check.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Show a clause: text, level, source, why, and the cases that test it. List those of an area or a prefix.

    Example: keyedopt explain CLIP-001
    """
    from keyedopt.cli.explain import explain as show
    from keyedopt.cli.explain import explain_failed

    if failed == (name is not None):
        fail("name one CLAUSE, PREFIX or AREA, or give --failed")
    if name is None:
        explain_failed(as_json)
    else:
        show(name, fail, as_json)


@app.command("list")
def list_(
    what: Annotated[What, typer.Argument(help="What to list.")] = What.targets,
    imports: Imports = None,
    as_json: AsJson = False,
) -> None:
    """List the known targets, the clauses, the areas of the surface, or the devices that torch finds here."""
    from keyedopt.cli.listing import listing

    listing(what.value, tuple(imports or ()), as_json)


@app.command()
def replay(
    result: Annotated[
        str | None,
        typer.Argument(
            metavar="RESULT", help="A result file; default: that of your last check.", show_default=False
        ),
    ] = None,
    case: Annotated[
        str | None,
        typer.Argument(metavar="CASE", help="CLAUSE, CLAUSE[n], or the name of a case.", show_default=False),
    ] = None,
    output: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the script here; default: print it.")
    ] = None,
    run: Annotated[
        bool, typer.Option("--run", help="Run the script; the exit code is 1 while the case fails.")
    ] = False,
    everything: Annotated[
        bool,
        typer.Option(
            "--all",
            help="Run the script of every failing and known case; the exit code is 1 if one does not fail.",
        ),
    ] = False,
    target: Annotated[
        str | None,
        typer.Option(
            "--target",
            metavar="TARGET",
            help="The implementation, if the one of the result is not registered.",
        ),
    ] = None,
    imports: Imports = None,
    time_limit: TimeLimit = 30.0,
) -> None:
    """Write a case as a stand-alone script that needs only torch and the implementation, or run it.

    Of a clause, the first failing case is taken, else the first known failure. A result file may come from
    anywhere: only cases of the suite run, on an implementation that is registered or that you name.

    Example: keyedopt replay results/torchrec.json CLIP-007[1] --output clip.py
    """
    from keyedopt.cli.replay import Asked, replay_case, result_and_case

    path, case = result_and_case(result, case)
    if everything == (case is not None) or (everything and (run or output)):
        fail("name one CASE, or give --all without a case, --run and --output")
    asked = Asked(path, case, output, run, target, tuple(imports or ()), time_limit)
    raise typer.Exit(replay_case(asked, fail))


@app.command()
def verify(
    result: Annotated[Path, typer.Argument(metavar="RESULT", help="A result file (.json).")],
    allowed_signers: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="The keys that may sign, as ssh-keygen's ALLOWED SIGNERS."),
    ] = None,
    identity: Annotated[
        str | None, typer.Option(metavar="NAME", help="Who must have signed it, as the file of keys says.")
    ] = None,
) -> None:
    """Check a result: its format, its hashes against what is installed, and its signature RESULT.sig.

    Exit code 1: a part differs, or the signature is not valid.

    Example: keyedopt verify results/torchrec.json
    """
    from keyedopt.cli.verify import verify as compare

    raise typer.Exit(compare(result, allowed_signers, identity))


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
    with with_reports():
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
    with with_reports():
        from keyedopt.cli.diff import diff as compare

    raise typer.Exit(compare(before, after, format_.value, fail))


@app.command("init-adapter")
def init_adapter(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Default: the package of --from.")] = "",
    output: Annotated[Path, typer.Option(metavar="DIR", help="Where the new folder goes.")] = Path(),
    libraries: Annotated[
        list[str] | None,
        typer.Option(
            "--from",
            metavar="MODULE",
            help="Propose what its classes show. Also MODULE:CLASS, AdamW=MODULE:CLASS; repeatable.",
        ),
    ] = None,
) -> None:
    """Write a small package that makes a library known to keyedopt, with a CI workflow.

    Example: keyedopt init-adapter --from acme.optim
    """
    from keyedopt.cli.adapter import init_adapter as write

    raise typer.Exit(write(name, output, fail, libraries or ()))


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
    base: Annotated[
        str, typer.Option(help="Only mutants of this base: reference, fused, torch, torchft or torchrec.")
    ] = "",
    everything: Annotated[
        bool, typer.Option("--all", help="Run the whole suite on each mutant, not only the clauses it names.")
    ] = False,
) -> None:
    """Plant faults in implementations, and show which of them the suite does not reject.

    Exit code 1: a mutant survives.

    Example: keyedopt mutants clipping
    """
    from keyedopt.conformance.mutants.rejection import main as plant

    raise typer.Exit(plant(names or (), base, everything))


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


def main() -> None:
    """Run the command line."""
    try:
        os.getcwd()
    except FileNotFoundError:
        sys.exit(say("the working folder was removed: change to another one"))
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # a terminal that cannot show a character gets ?
    try:
        code = app(prog_name="keyedopt", standalone_mode=False)
    except (OSError, KeyedoptError) as error:
        code = say(str(error))
    except KeyboardInterrupt:
        sys.exit(say("interrupted; nothing was written"))
    except Exception as error:
        if type(error).__name__ == "Abort":  # typer's error for an interrupt
            sys.exit(say("interrupted; nothing was written"))
        if not hasattr(error, "format_message"):  # a defect of keyedopt; 1 would say that something failed
            traceback.print_exc()
            sys.exit(say(f"a defect of keyedopt: {error_text(error)}"))
        if type(error).__name__ == "NoArgsIsHelpError":
            error.show()  # type: ignore[attr-defined]
            code = 2
        else:  # typer's message for a wrong option, on one line
            code = say(usage(error))
    if code == INTERRUPTED:
        code = say("interrupted; nothing was written")
    sys.exit(code or 0)


uncut(app)


if __name__ == "__main__":
    main()
