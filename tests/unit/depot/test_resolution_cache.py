"""What is known of sources: the names of a model are found among the models."""

import os
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft_depot import resolution_cache
from weft_depot.resolution_cache import CachedResolution, ResolutionCache

BASE, OTHER = ("sha256:" + letter * 64 for letter in "bd")


def entry(kind: Any, uri: str, digest: Any) -> CachedResolution:
    return CachedResolution(kind, uri, uri, "signature", digest)


def test_a_model_goes_by_the_uris_it_came_from_also_in_a_new_process(tmp_path: Path) -> None:
    cache = ResolutionCache(tmp_path)
    for uri, digest in (("file:m/tiny", BASE), ("file:m/small", BASE), ("file:m/big", OTHER)):
        cache.add(entry("model", uri, digest))
    assert cache.names(BASE) == ResolutionCache(tmp_path).names(BASE) == ("small", "tiny")
    cache.add(entry("model", "file:m/tiny", OTHER))
    assert cache.names(BASE) == ("small",)
    cache.retain({OTHER})
    assert (cache.names(BASE), cache.names(OTHER)) == ((), ("big", "tiny"))


def test_a_crowd_of_adapters_is_not_looked_through_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = ResolutionCache(tmp_path)
    cache.add(entry("model", "file:m/tiny", BASE))
    cache.add(entry("adapter", "file:a/upper", OTHER))
    monkeypatch.setattr(cache, "_entries", None)
    assert cache.names(BASE) == ("tiny",)
    assert cache.names(OTHER) == ()


def test_what_only_saves_work_waits_for_no_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = ResolutionCache(tmp_path)
    monkeypatch.setattr(os, "fsync", None)
    cache.add(entry("model", "file:m/tiny", BASE))
    assert ResolutionCache(tmp_path).names(BASE) == ("tiny",)


@given(st.lists(st.tuples(st.sampled_from("abcdef"), st.integers(0, 20)), max_size=40))
def test_a_request_is_recent_for_its_time_and_the_oldest_are_forgotten(resolved: list[tuple[str, int]]) -> None:
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(resolution_cache, "MAX_RECENT", 3)
        cache, now, last = ResolutionCache(Path(folder), 10.0), 0.0, dict[str, float]()
        for key, wait in resolved:
            now += wait
            cache.mark_resolved(key, now)
            last.pop(key, None)
            last[key] = now
            kept = list(last)[-3:]
            for other in "abcdef":
                assert cache.is_recent(other, now) == (other in kept and now - last[other] < 10)
