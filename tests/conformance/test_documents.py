"""Every sentence of the documents is mapped to clauses, or has a reason why nothing is to be tested."""

import os
import re
from pathlib import Path

import pytest

from keyedopt.conformance import spec
from keyedopt.conformance.spec import sentences

STORED = Path(__file__).parents[3] / "shared" / "spec"
SENTENCES = [sentence for document in sentences.documents().values() for sentence in document.sentences]


@pytest.fixture(params=sentences.documents().values(), ids=sentences.documents())
def document(request):
    return request.param


@pytest.fixture
def stored(document):
    if not document.stored:
        assert not any(sentence.lines for sentence in document.sentences)
        pytest.skip("a public source without a stored copy")
    if not STORED.exists() and os.environ.get("KEYEDOPT_REQUIRE_DOCUMENTS") != "1":
        pytest.skip("the documents are not beside this checkout")
    return (STORED / document.stored).read_text(encoding="utf-8")


def numbers(lines):
    """Return the numbers of "3, 5-7"."""
    ends = [part.split("-") for part in lines.split(",") if part.strip()]
    return {number for part in ends for number in range(int(part[0]), int(part[-1]) + 1)}


def test_sentence_ids_count_up_from_one_with_the_prefix_of_the_document(document):
    ids = [sentence.id for sentence in document.sentences]
    assert ids == [f"{document.prefix}-{number:03}" for number in range(1, len(ids) + 1)]
    assert document.address.startswith("https://")


@pytest.mark.parametrize("sentence", SENTENCES, ids=lambda sentence: sentence.id)
def test_every_sentence_is_mapped_in_one_way(sentence):
    assert sentence.content.endswith(".")
    assert sum(map(bool, (sentence.clauses, sentence.untested, sentence.same_as))) == 1
    assert set(sentence.clauses) <= set(spec.clauses())
    assert set(sentence.same_as) <= {other.id for other in SENTENCES if not other.same_as}


def test_every_line_of_a_document_belongs_to_a_sentence_or_has_no_normative_content(document, stored):
    full = {number for number, line in enumerate(stored.splitlines(), 1) if line.strip(" `py")}
    mapped = set().union(*(numbers(sentence.lines) for sentence in document.sentences))
    assert full - mapped - numbers(document.other_lines) == set()
    assert mapped & numbers(document.other_lines) == set()
    assert max(mapped | numbers(document.other_lines)) <= len(stored.splitlines())


def test_every_heading_is_in_the_document(document, stored):
    for sentence in document.sentences:
        for name in re.findall(r"[A-Za-z_]\w+", sentence.heading):
            assert name in stored, f"{sentence.id} cites {sentence.heading}, and {name} is not there"


def test_no_sentence_is_copied_from_its_document(document, stored):
    """Names and signatures must repeat; eight words in a row are a copy."""
    words = " ".join(re.findall(r"\w+", stored))
    for sentence in document.sentences:
        said = re.findall(r"\w+", sentence.content)
        for start in range(len(said) - 7):
            assert " ".join(said[start : start + 8]) not in words, sentence.id
