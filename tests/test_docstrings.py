"""Every public class and function says what its arguments, its result and its exceptions are."""

import dataclasses
import enum
import inspect
import re
import textwrap

import pytest
import torch

from keyedopt import fused, reference

#: What torch documents: methods of these names have torch's signature and meaning.
OF_TORCH = {name for name in vars(torch.optim.Optimizer) if not name.startswith("_")}


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
