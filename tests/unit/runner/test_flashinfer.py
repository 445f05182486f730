"""FlashInfer as a runner uses it: what it is told of a step, and what is said where it cannot be used."""

import importlib.util
import inspect
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from harness import played_flashinfer
from weft_kernels.plan import SegmentPlan
from weft_runner.errors import ExecutorUnavailable
from weft_runner.model import StepInput, StepRow
from weft_runner.model.cuda import flashinfer
from weft_runner.model.cuda.flashinfer import FlashInfer, page_table, unsupported_reason

INSTALLED = importlib.util.find_spec("flashinfer") is not None


@given(
    rows=st.lists(st.tuples(st.integers(0, 40), st.integers(1, 20), st.integers(0, 3)), min_size=1, max_size=6),
    page_tokens=st.sampled_from((1, 3, 16)),
)
def test_a_page_table_names_every_token_of_each_context_in_order_and_nothing_else(rows, page_tokens):
    """Each token of a context is named by its place in the cache, and found again through the table."""
    step_rows, start, free = list[StepRow](), 0, iter(range(7, 10_000))
    for position, count, beyond in rows:
        n_pages = -(-(position + count) // page_tokens) + beyond
        pages = tuple(next(free) for _ in range(n_pages))
        step_rows.append(StepRow(start, start + count, position, pages, samples=True))
        start += count
    step = StepInput([0] * start, tuple(step_rows), SegmentPlan(start, ()))
    queries, bounds, pages, last = page_table(step.arrays, page_tokens)
    assert [part.dtype for part in (queries, bounds, pages, last)] == [np.int32] * 4
    assert queries.tolist() == [0, *(row.end for row in step_rows)]
    for i, row in enumerate(step_rows):
        own = pages[bounds[i] : bounds[i + 1]].tolist()
        places = [page * page_tokens + offset for page in own for offset in range(page_tokens)]
        told = places[: (len(own) - 1) * page_tokens + last[i]]
        assert told == [row.pages[t // page_tokens] * page_tokens + t % page_tokens for t in range(row.context)]


@pytest.mark.parametrize(
    ("installed", "head_dim", "dtype", "real", "why"),
    [
        (True, 128, "bf16", True, ""),
        (True, 128, "bf16", False, "needs a GPU"),
        (False, 128, "bf16", True, "pip install flashinfer-python"),
        (True, 128, "fp32", True, "not with --dtype fp32"),
        (True, 32, "bf16", True, "head_dim 32, and it computes 64, 128, 256"),
    ],
)
def test_why_it_cannot_be_used_is_told(monkeypatch, installed, head_dim, dtype, real, why):
    spec = ModuleSpec("flashinfer", None) if installed else None
    monkeypatch.setattr(flashinfer, "find_spec", lambda _: spec)
    said = unsupported_reason(head_dim, dtype, real=real)
    assert why in said
    assert bool(said) == bool(why)


def test_a_library_that_fails_is_told_by_name(monkeypatch):
    """Another version's wrapper, or a kernel that cannot be built."""
    broken = ModuleType("flashinfer")
    monkeypatch.setitem(sys.modules, "flashinfer", broken)
    with pytest.raises(ExecutorUnavailable, match=r"--attention flashinfer: the library fails: .*Wrapper"):
        FlashInfer(torch.zeros(1, 1, 2, 1, 16, 64), 1, [0], 0.125)


@pytest.mark.skipif(not INSTALLED, reason="no FlashInfer: .venv/bin/uv pip install -p .venv flashinfer-python")
@pytest.mark.parametrize("name", ["__init__", "plan", "run"])
def test_what_is_played_takes_what_the_library_takes(name):
    import flashinfer as library

    real = inspect.signature(getattr(library.BatchPrefillWithPagedKVCacheWrapper, name)).parameters
    played = inspect.signature(getattr(played_flashinfer.BatchPrefillWithPagedKVCacheWrapper, name)).parameters
    positional = [p.name for p in played.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert list(real)[: len(positional)] == positional
    assert {key: p.default for key, p in played.items()} == {key: real[key].default for key in played}
