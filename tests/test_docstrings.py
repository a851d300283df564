"""Every public name says what its arguments, result and exceptions are, and has an example that runs."""

import dataclasses
import doctest
import enum
import inspect
import re
import runpy
import textwrap
from pathlib import Path

import pytest
import torch

from keyedopt import fused, reference

#: What torch documents: methods of these names have torch's signature and meaning.
OF_TORCH = {name for name in vars(torch.optim.Optimizer) if not name.startswith("_")}
DOCS = Path(__file__).parents[1] / "docs"
#: What the API pages make of docstrings, and what they leave out.
PAGES = runpy.run_path(str(DOCS / "docstrings.py"))
INTERNAL = {*runpy.run_path(str(DOCS / "pages.py"))["INTERNAL"]}
#: The words that say a range.
RANGE = re.compile(r"\b(at least|at most|above|below|in [\[(]|any (finite )?(number|integer))")
PUBLIC = [(package, name) for package in (reference, fused) for name in package.__all__]


def section(doc, name):
    """Return a section of a docstring in Google's style."""
    return "".join(re.findall(rf"^{name}:\n(.*?)(?=^\S|\Z)", doc, re.M | re.S))


def documented(doc):
    """Return the arguments that a docstring names."""
    listed = r"^(\*{0,2}\w+(?:, \*{0,2}\w+)*)(?: \([^)]*\))?:"
    names = re.findall(listed, textwrap.dedent(section(doc, "Args")), re.M)
    return {name.strip(" *") for group in names for name in group.split(",")}


def arguments(found):
    """Return the arguments that a docstring has to document."""
    if (inspect.isclass(found) and issubclass(found, enum.Enum)) or found.__name__ in OF_TORCH:
        return []
    # before Python 3.11.4 the signature of a class was that of any `__new__`
    called = found.__init__ if inspect.isfunction(found.__init__) else found
    return [name for name in inspect.signature(called).parameters if name not in ("self", "cls", "_")]


def names_in(doc):
    return documented(doc) | set(re.findall(r"`(\w+)`", doc))


def inherited(name, found):
    """Return the docstrings of a class down to the one with the constructor, or of a method in all bases."""
    package, kind, *method = name.removeprefix("keyedopt.").split(".")
    bases = getattr(getattr({"reference": reference, "fused": fused}[package], kind), "__mro__", [found])
    if method:
        docs = [getattr(base, method[0], None) for base in bases]
    elif dataclasses.is_dataclass(found):
        docs = list(bases)
    else:
        own = [place for place, base in enumerate(bases) if "__init__" in vars(base)]
        docs = list(bases[: own[0] + 1 if own else None])
    return "\n".join(inspect.cleandoc(one.__doc__ or "") + "\n" for one in docs if one is not None)


def surface():
    """Yield the public names, and the methods of classes: their own, and the inherited ones of the pages."""
    seen = set()
    for package, name in PUBLIC:
        found = getattr(package, name)
        yield f"{package.__name__}.{name}", found
        for attribute in dir(found) if inspect.isclass(found) else ():
            if attribute in INTERNAL and not inspect.isfunction(vars(found).get(attribute)):
                continue
            method = getattr(found, attribute)
            ours = inspect.isfunction(method) and method.__module__.startswith("keyedopt.")
            if ours and not attribute.startswith("_") and method not in seen:
                seen.add(method)
                yield f"{package.__name__}.{name}.{attribute}", method


def missing(name, found):
    """Return the arguments, the result and the exceptions that a docstring does not mention."""
    doc = inspect.cleandoc(found.__doc__ or "")
    if not doc:
        return ["docstring"]
    known = names_in(inherited(name, found))
    lacking = [one for one in arguments(found) if one not in known]
    if inspect.isclass(found):
        return lacking
    first = doc.split("\n")[0]
    returns = inspect.signature(found).return_annotation not in (None, "None", inspect.Signature.empty)
    if found.__name__ not in OF_TORCH and returns and not section(doc, "Returns") and "eturn" not in first:
        lacking.append("Returns")
    raises = re.findall(r"^ +raise (\w+)\(", inspect.getsource(found), re.M)
    lacking += [one for one in set(raises) if one not in doc and one != "NotImplementedError"]
    return lacking


@pytest.mark.parametrize(("name", "found"), [*surface()], ids=lambda one: one if isinstance(one, str) else "")
def test_arguments_results_and_exceptions_are_documented(name, found):
    assert missing(name, found) == []


@pytest.mark.parametrize(("package", "name"), PUBLIC, ids=lambda one: getattr(one, "__name__", one))
def test_the_example_of_a_public_name_runs_as_its_page_shows_it(package, name, request):
    text = PAGES["shown"](getattr(package, name), package.__name__)
    example = doctest.DocTestParser().get_doctest(text, {}, name, None, 0)  # nothing is imported before it
    source = "".join(one.source for one in example.examples)
    assert name in source, f"{name} has no example"
    if "torchrec" in source:
        request.getfixturevalue("torchrec")
    said = []
    assert doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(example, out=said.append).failed == 0, said


def without_range(name, found):
    """Return the arguments of numbers whose range the page, or the docstring of a method, does not say."""
    package, _, *method = name.removeprefix("keyedopt.").split(".")
    docs = inherited(name, found) if method else PAGES["shown"](found, f"keyedopt.{package}")
    texts = PAGES["arguments"](docs)
    called = found.__init__ if inspect.isfunction(getattr(found, "__init__", None)) else found
    return [
        one.name
        for one in inspect.signature(called).parameters.values()
        if one.name in arguments(found) and re.search(r"\b(int|float)\b", str(one.annotation))
        if not RANGE.search(texts.get(one.name, ""))
    ]


@pytest.mark.parametrize(("name", "found"), [*surface()], ids=lambda one: one if isinstance(one, str) else "")
def test_the_range_of_each_number_is_documented(name, found):
    assert without_range(name, found) == []


def test_a_missing_range_is_found():
    class Example:
        """Example.

        Args:
            size: the size.
            share: the share, in [0, 1].
            name: the name.
        """

        def __init__(self, size: int, share: float | None = None, name: str = "") -> None:
            pass

    assert without_range("keyedopt.reference.Example", Example) == ["size"]


def test_a_page_completes_a_docstring():
    shown = PAGES["shown"](fused.AccumulateRowWiseAdagrad, "keyedopt.fused")
    assert "see `keyedopt.reference.AccumulateRowWiseAdagrad`" in shown
    assert ">>> from keyedopt.fused import AccumulateRowWiseAdagrad" in shown
    assert PAGES["arguments"](shown)["max_norm"].startswith("the largest norm of a row after its step")
    assert "as in `RowWiseAdagrad`" not in shown
    empty = PAGES["shown"](fused.EmptyFusedOptimizer, "keyedopt.fused")
    assert "Args:" not in empty, "the arguments of a base class with another constructor"
