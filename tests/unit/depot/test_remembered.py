"""What is known of sources: the names of a model are found among the models."""

import os
from pathlib import Path
from typing import Any

import pytest

from weft_depot.remembered import Entry, Remembered

BASE, OTHER = ("sha256:" + letter * 64 for letter in "bd")


def entry(kind: Any, uri: str, digest: Any) -> Entry:
    return Entry(kind, uri, uri, "signature", digest)


def test_a_model_goes_by_the_uris_it_came_from_also_in_a_new_process(tmp_path: Path) -> None:
    remembered = Remembered(tmp_path)
    for uri, digest in (("file:m/tiny", BASE), ("file:m/small", BASE), ("file:m/big", OTHER)):
        remembered.add(entry("model", uri, digest))
    assert remembered.names(BASE) == Remembered(tmp_path).names(BASE) == ("small", "tiny")
    remembered.add(entry("model", "file:m/tiny", OTHER))
    assert remembered.names(BASE) == ("small",)
    remembered.retain({OTHER})
    assert (remembered.names(BASE), remembered.names(OTHER)) == ((), ("big", "tiny"))


def test_a_crowd_of_adapters_is_not_looked_through_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    remembered = Remembered(tmp_path)
    remembered.add(entry("model", "file:m/tiny", BASE))
    remembered.add(entry("adapter", "file:a/upper", OTHER))
    monkeypatch.setattr(remembered, "_entries", None)
    assert remembered.names(BASE) == ("tiny",)
    assert remembered.names(OTHER) == ()


def test_what_only_saves_work_waits_for_no_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    remembered = Remembered(tmp_path)
    monkeypatch.setattr(os, "fsync", None)
    remembered.add(entry("model", "file:m/tiny", BASE))
    assert Remembered(tmp_path).names(BASE) == ("tiny",)
