"""Requests past the page cache, many at a time: the same bytes as one by one, and errors by name."""

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from weft_kernels.cpu import memory
from weft_runner.errors import DiskUnusable
from weft_runner.model.tiers import direct_io
from weft_runner.model.tiers.direct_io import DEPTH, PAGE, DirectFile, IoQueue, Requests

PAGES = 3 * DEPTH


@pytest.fixture(params=["many at a time", "one by one"])
def queue(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[IoQueue]:
    """Also where the kernel has no queue."""
    if request.param == "one by one":
        monkeypatch.setattr(direct_io, "SYSCALLS", {})
    made = IoQueue()
    yield made
    made.close()


@pytest.fixture
def file(tmp_path: Path) -> Iterator[DirectFile]:
    opened = DirectFile(tmp_path / "pages", os.O_RDWR | os.O_CREAT)
    yield opened
    opened.close()


def requests(taken: memory.MappedMemory, order: "np.ndarray[tuple[int], np.dtype[np.int64]]") -> Requests:
    """The file's pages in this order, to the memory's in theirs."""
    at = taken.address + PAGE * np.arange(len(order))
    return np.stack([at, np.full(len(order), PAGE), PAGE * order], axis=1)


def test_pages_are_written_and_read_in_any_order(queue: IoQueue, file: DirectFile) -> None:
    rng = np.random.default_rng(0)
    written, read = memory.MappedMemory(PAGES * PAGE), memory.MappedMemory(PAGES * PAGE)
    written.array()[:] = rng.integers(0, 256, PAGES * PAGE, np.uint8)
    there, back = rng.permutation(PAGES), rng.permutation(PAGES)
    queue.write(file, requests(written, there))
    queue.read(file, requests(read, back))
    pages = written.array().reshape(PAGES, PAGE)
    assert (read.array().reshape(PAGES, PAGE) == pages[np.argsort(there)[back]]).all()


def test_a_request_that_fails_among_many_is_named(queue: IoQueue, file: DirectFile) -> None:
    """The file ends before the last one; the others are there."""
    taken = memory.MappedMemory(PAGES * PAGE)
    taken.array()[:] = 1
    queue.write(file, requests(taken, np.arange(PAGES)))
    taken.array()[:] = 0
    os.truncate(file.path, (PAGES - 1) * PAGE)
    with pytest.raises(DiskUnusable, match=f"pages ends at byte {(PAGES - 1) * PAGE}: it was cut short"):
        queue.read(file, requests(taken, np.arange(PAGES)))
    assert taken.array()[:-PAGE].all()


def test_what_is_not_allowed_is_named(queue: IoQueue, file: DirectFile) -> None:
    taken, unreadable = memory.MappedMemory(2 * PAGE), DirectFile(file.path, os.O_WRONLY)
    with pytest.raises(DiskUnusable, match="pages cannot be read at byte"):
        queue.read(unreadable, requests(taken, np.arange(2)))
    unreadable.close()
