"""Texts and names stay readable: counts of `weft_english` by package only fall, limits are called MAX and MIN."""

import re
import tomllib
from dataclasses import replace

import pytest

from weft_english.__main__ import CEILINGS, ROOT, counts_by_package, faults_above, read, tracked
from weft_english.counts import Counts, count
from weft_english.texts import read_page, read_python

OLD_LIMIT = re.compile(r"""^[^\n#=("']*\b(_*(?:MOST|LEAST)_\w+)[^\n=]*=(?!=)""", re.MULTILINE)
SENTENCE_AFTER_RAISES = re.compile(r"(?:^|[.):]\s+)Raises\s.*[.)]\s+(?!Raises\b)[A-Z`\[(]", re.DOTALL)
SOURCE = '''
"""Read pages."""

MAX_PAGES = 1
"""Pages of a request."""


def take(found: int, item: int) -> int:
    """Take the pages that are behind those of the request which waits."""
    own = found + item  # what was asked
    # of others, so
    # it waits
    raise ValueError(f"expected one page for each of the {own} requests, got none")


class Queue:
    """Waiting requests."""
'''


@pytest.fixture(scope="module")
def packages() -> dict[str, Counts]:
    return counts_by_package()


def test_no_package_becomes_harder_to_read(packages: dict[str, Counts]) -> None:
    ceilings = tomllib.loads(CEILINGS.read_text())
    assert set(packages) == set(ceilings), "run `make english`"
    faults = [f"{name}: {fault}" for name in packages for fault in faults_above(packages[name], ceilings[name])]
    assert not faults, "`python -m weft_english FILE` lists the texts of a file:\n" + "\n".join(faults)


def test_limits_are_max_and_min_and_raises_stands_last() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}: {match[1]}: a limit is MAX_ or MIN_, its unit last"
        for path in tracked("*.py")
        for match in OLD_LIMIT.finditer(path.read_text())
    ]
    wrong += [
        f"{path.relative_to(ROOT)}: a sentence after `Raises`: {text[:60]}"
        for path in tracked("*.py")
        if "tests" not in path.parts
        for text in read(path).docstrings
        if SENTENCE_AFTER_RAISES.search(text)
    ]
    assert not wrong, "\n".join(wrong)


def test_the_texts_and_names_of_a_module_are_counted() -> None:
    texts = read_python(SOURCE)
    assert texts.docstrings == ["Take the pages that are behind those of the request which waits.", "Waiting requests."]
    assert texts.details == ["Read pages.", "Pages of a request.", "what was asked", "of others, so it waits"]
    assert texts.messages == ["expected one page for each of the X requests, got none"]
    assert sorted(texts.names) == ["MAX_PAGES", "found", "item", "own"]
    counts = count(texts)
    assert (counts.docstrings, counts.docstring_mean, counts.heavy) == (1, 4 / 12, 1)
    assert (counts.texts, counts.function_words, counts.generic_names) == (1, 2, 1)
    assert (counts.public_docstrings, counts.short_docstrings) == (2, 1)


def test_a_page_is_read_without_its_code() -> None:
    page = "# Title\n\nRun `make up` and\nsee [the page](a.md).\n\n```\nignored\n```\n\n"
    page += "| a | b c |\n|---|---|\n| `x` | d |\n- e\n- f"
    assert read_page(page).pages == ["Title", "Run CODE and see the page.", "a", "b c", "CODE", "d", "e", "f"]


def test_ceilings_bound_counts_from_above_and_public_docstrings_from_below() -> None:
    counts = Counts(docstrings=10, docstring_share=0.5, names=10, generic_names=1, public_docstrings=3)
    ceilings = {"docstring_mean": 0.05, "heavy": 0, "text_mean": 0.0, "long_sentences": 0, "no_noun": 0, "clauses": 0}
    ceilings |= {"function_words": 0, "generic_share": 0.1, "short_share": 0.0, "public_docstrings": 3}
    assert faults_above(counts, ceilings) == []
    worse = replace(counts, clauses=1, public_docstrings=2)
    assert faults_above(worse, ceilings) == [
        "clauses: expected at most 0, got 1",
        "public_docstrings: expected at least 3, got 2",
    ]
