"""Every public class and function says what its arguments, its result and its exceptions are."""

import inspect
import re
import textwrap

import pytest

from keyedopt import fused, reference

#: Methods that torch calls, or that have torch's signature and meaning.
OF_TORCH = {"extra_repr"}


def section(doc, name):
    """Return a section of a docstring in Google's style."""
    found = re.search(rf"^{name}:\n(.*?)(?=^\S|\Z)", doc, re.M | re.S)
    return found[1] if found else ""


def documented(doc):
    """Return the arguments that a docstring names."""
    names = re.findall(
        r"^((?:\*{0,2}\w+(?:, )?)+)(?: \([^)]*\))?:", textwrap.dedent(section(doc, "Args")), re.M
    )
    return {name.strip(" *") for group in names for name in group.split(",")}


def arguments(function):
    return [name for name in inspect.signature(function).parameters if name not in ("self", "cls", "_")]


def surface():
    for package in (reference, fused):
        for name in package.__all__:
            found = getattr(package, name)
            yield f"{package.__name__}.{name}", found
            if inspect.isclass(found):
                for attribute, method in vars(found).items():
                    if inspect.isfunction(method) and not attribute.startswith("_"):
                        yield f"{package.__name__}.{name}.{attribute}", method


def missing(name, found):
    """Return the arguments, the result and the exceptions that a docstring does not mention."""
    doc = inspect.cleandoc(found.__doc__ or "")
    if not doc:
        return ["docstring"]
    if re.search(r"see `(keyedopt\.|\w+\.)?\w+", doc, re.I):  # documented there
        return []
    lacking = [one for one in arguments(found) if one not in documented(doc) and f"`{one}`" not in doc]
    if inspect.isclass(found):
        return lacking
    first = doc.split("\n")[0]
    returns = inspect.signature(found).return_annotation not in (None, "None", inspect.Signature.empty)
    if returns and not section(doc, "Returns") and "eturn" not in first:
        lacking.append("Returns")
    raises = re.findall(r"^ +raise (\w+)\(", inspect.getsource(found), re.M)
    lacking += [one for one in set(raises) if one not in doc and one != "NotImplementedError"]
    return lacking


@pytest.mark.parametrize(("name", "found"), [*surface()], ids=lambda one: one if isinstance(one, str) else "")
def test_arguments_results_and_exceptions_are_documented(name, found):
    assert missing(name, found) == []
