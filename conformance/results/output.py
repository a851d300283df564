"""A result written to a file, in the format that the name of the file asks for."""

from pathlib import Path

from keyedopt.conformance.results import model
from keyedopt.conformance.results.junit import junit
from keyedopt.conformance.results.markdown import markdown
from keyedopt.conformance.results.model import Result

#: Endings of files: the complete result, JUnit, Markdown.
FORMATS = (".json", ".xml", ".md")


def write(result: Result, path: Path) -> Path:
    """Write a result, and return the path of the file.

    A partial result goes to another name (``x.partial.json``), so that it does not replace a complete one.
    """
    target = path if result.complete else path.with_name(f"{path.stem}.partial{path.suffix}")
    if path.suffix == ".json":
        model.write(result, target)
        model.journal_path(path).unlink(missing_ok=True)
    else:
        model.write_atomically(target, junit(result) if path.suffix == ".xml" else markdown(result))
    return target
