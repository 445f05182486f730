"""Every example and every finding of the fuzz targets, without a fuzzer: an answer, or an error that the edge names."""

import random
from pathlib import Path

import pytest

from fuzz.__main__ import CORPUS
from fuzz.building import Choices, Words, encoded
from fuzz.targets import TARGETS

FINDINGS = sorted(path for path in CORPUS.rglob("*") if path.is_file())


@pytest.mark.parametrize("name", TARGETS)
def test_examples_pass_and_so_do_edits_of_them(name: str) -> None:
    target, rng = TARGETS[name], random.Random(name)
    for data in (*target.examples, *(rng.randbytes(rng.randrange(200)) for _ in range(50))):
        target.run(data)


@pytest.mark.parametrize("path", FINDINGS, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_what_was_found_once_has_a_name_now(path: Path) -> None:
    TARGETS[path.parent.name].run(path.read_bytes())


def test_a_value_of_zeros_or_of_nothing_is_whole() -> None:
    words = Words([{"a": [1, {"b": "c"}]}])
    assert set(words.names) >= {"a", "b"}
    assert {1, "c"} <= {value for value in words.values if isinstance(value, int | str)}
    for data in (b"", bytes(300), bytes([255]) * 300):
        choices = Choices(data)
        assert encoded(words.edited(choices, {"a": [1]}))
        assert encoded(words.value(choices))
