"""What clauses rest on: the sentences of the documents, in our words, and the numbered rules of keyedopt."""

import functools
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parent


@dataclass(frozen=True)
class Sentence:
    """A normative sentence: the clauses that test it, or why there are none.

    ``same_as`` lists sentences of an earlier document that this one repeats. ``lines`` are those of the
    stored copy of the document.
    """

    id: str
    heading: str
    content: str
    lines: str = ""
    clauses: Sequence[str] = ()
    untested: str = ""
    same_as: Sequence[str] = ()


@dataclass(frozen=True)
class Document:
    """A public document. ``other_lines`` of the stored copy have no normative content."""

    title: str
    address: str
    prefix: str
    sentences: tuple[Sentence, ...]
    stored: str = ""
    other_lines: str = ""


@dataclass(frozen=True)
class Rule:
    """A rule of keyedopt, which no document states."""

    title: str
    text: str


@functools.cache
def documents() -> Mapping[str, Document]:
    """Return the documents by the name of their file."""
    found = {}
    for path in sorted((FOLDER / "documents").glob("*.toml")):
        body = tomllib.loads(path.read_text(encoding="utf-8"))
        sentences = tuple(Sentence(**entry) for entry in body.pop("sentence"))
        found[path.stem] = Document(sentences=sentences, **body)
    return found


@functools.cache
def rules() -> Mapping[int, Rule]:
    """Return the rules by their number."""
    body = tomllib.loads((FOLDER / "rules.toml").read_text(encoding="utf-8"))
    return {number: Rule(**entry) for number, entry in enumerate(body["rule"], 1)}


@functools.cache
def by_clause() -> Mapping[str, Sequence[tuple[Document, Sentence]]]:
    """Return the sentences that each clause tests."""
    found: dict[str, list[tuple[Document, Sentence]]] = {}
    for document in documents().values():
        for sentence in document.sentences:
            for clause in sentence.clauses:
                found.setdefault(clause, []).append((document, sentence))
    return found


def grounds(clause: str, numbers: Sequence[int]) -> list[str]:
    """Return a text for each sentence that the clause tests, with its address, and for each of its rules."""
    return [
        f"{sentence.id}: {sentence.content} ({document.title}: {sentence.heading}, {document.address})"
        for document, sentence in by_clause().get(clause, ())
    ] + [f"Rule {number} of keyedopt: {rules()[number].title}." for number in numbers]
