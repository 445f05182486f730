"""How many KV pages a runner has that was given no number."""

from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.ranks import settings_of
from weft.domain.model.config import parse_spec
from weft_runner.errors import ExecutorUnavailable, KvCacheTooSmall
from weft_runner.executors import cuda, memory, settle_kv_pages
from weft_runner.memory_estimate import MemoryEstimate, MemoryLimit, estimate_memory, page_bytes
from weft_runner.settings import KV_PAGES

GIB, PAGE = 1 << 30, 1 << 20
SMALL = parse_spec(
    {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 512,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "max_position_embeddings": 4096,
        "dtype": "bfloat16",
    }
)


def needs(weights: int):
    return lambda pages: MemoryEstimate(weights, 0, pages * PAGE, 0)


@given(
    weights=st.integers(0, 100), left=st.integers(0, 100), others=st.integers(0, 100), fraction=st.floats(0.01, 1.0),
    host=st.integers(0, 64), context=st.integers(1, 64),
)  # fmt: skip
def test_pages_fill_the_share_and_hold_a_sequence_or_the_start_is_refused(
    weights, left, others, fraction, host, context
):
    available = MemoryLimit(left * GIB, "GPU 0", (left + others) * GIB)
    budget = available.n_bytes - max(int((1 - fraction) * available.of_bytes), min(host * GIB, available.of_bytes // 4))
    try:
        pages = memory.fitting_pages(
            needs(weights * GIB), available, fraction, context=context << 10, page_tokens=16, host_bytes=host * GIB
        )
    except KvCacheTooSmall:
        assert weights * GIB + (context << 6) * PAGE > budget
        return
    assert pages >= context << 6
    assert weights * GIB + pages * PAGE <= budget
    most = (budget - weights * GIB) // PAGE
    assert pages == context << 6 or pages > most - (most >> 5) - 1, "no more than a thirty-second is given away"


def test_the_refusal_has_the_numbers_and_the_ways_out():
    with pytest.raises(KvCacheTooSmall) as caught:
        memory.fitting_pages(
            needs(3 * GIB), MemoryLimit(4 * GIB, "GPU 0 (Test)", 5 * GIB), 0.8, context=1000, page_tokens=1
        )
    words = str(caught.value)
    for part in (
        "--kv-memory-fraction 0.8", "1000 tokens takes 1000 KV pages of 1, and 0 fit", "layers 3.00 GiB",
        "KV pages 0.98 GiB", "GPU 0 (Test)", "3.00 GiB may be taken (4.00 GiB are left, 1.00 GiB", "advanced.kvPages",
    ):  # fmt: skip
        assert part in words, words


def test_runners_that_differ_by_little_have_the_same_pages():
    def pages(left: int) -> int:
        return memory.fitting_pages(needs(0), MemoryLimit(left, "x", 80 * GIB), 1.0, context=16, page_tokens=16)

    assert pages(71 * GIB) == pages(71 * GIB - 100 * PAGE)


def in_container(monkeypatch: pytest.MonkeyPatch, left: int, limit: int) -> None:
    found = MemoryLimit(left, "this container", limit, is_group=True)
    monkeypatch.setattr("weft_runner.executors.memory.available_memory", lambda: found)


@pytest.mark.parametrize("executor", ["cpu", "reference"])
def test_a_container_gives_what_its_limit_holds_up_to_what_sequences_use(monkeypatch, executor):
    settings = settings_of(executor=executor, kv_pages=0, kv_memory_fraction=0.5, max_sequences=32, page_tokens=16)
    in_container(monkeypatch, 900 << 20, 1 << 30)
    found = settle_kv_pages(settings, SMALL)
    kind = "reference" if executor == "reference" else "bf16"
    needed = estimate_memory(SMALL, kind, kv_pages=found.kv_pages, page_tokens=16).total
    assert needed <= (900 << 20) - (512 << 20)
    assert needed > 0.9 * ((900 << 20) - (512 << 20))
    in_container(monkeypatch, 90 * GIB, 100 * GIB)
    assert settle_kv_pages(settings, SMALL).kv_pages == 32 * 4096 // 16
    short = replace(SMALL, max_positions=16)
    assert settle_kv_pages(settings, short).kv_pages == KV_PAGES, "adapters need pages too"
    in_container(monkeypatch, 500 << 20, 1 << 30)
    with pytest.raises(KvCacheTooSmall, match="this container"):
        settle_kv_pages(settings, SMALL)


def test_the_ranks_of_a_container_share_it(monkeypatch):
    in_container(monkeypatch, 900 << 20, 1 << 30)
    flags = {"executor": "reference", "kv_pages": 0, "page_tokens": 16}
    four = settings_of(**flags, tensor_parallel=4)
    wide = replace(SMALL, vocab_size=1 << 16)
    one, split = (settle_kv_pages(settings, wide).kv_pages for settings in (settings_of(**flags), four))
    assert 0 < split < one, "each rank has the embedding"


def test_a_number_overrides_the_share_and_a_process_without_a_container_has_the_usual_one(monkeypatch):
    in_container(monkeypatch, 1, 1 << 30)
    assert settle_kv_pages(settings_of(kv_pages=77, kv_memory_fraction=0.01), SMALL).kv_pages == 77
    shared = MemoryLimit(900 << 20, "this machine", 1 << 30)
    monkeypatch.setattr("weft_runner.executors.memory.available_memory", lambda: shared)
    assert settle_kv_pages(settings_of(kv_pages=0), SMALL).kv_pages == KV_PAGES


@dataclass(frozen=True)
class PlayedGpu:
    """A GPU that has what its driver is played to say."""

    available: MemoryLimit
    is_real: bool = True


def test_gpus_give_what_their_share_holds_and_the_least_of_them_counts(monkeypatch):
    left = [3 * GIB, 2 * GIB]
    monkeypatch.setattr(cuda, "find_gpu", lambda rank=0: PlayedGpu(MemoryLimit(left[rank], f"GPU {rank}", 4 * GIB)))
    flags: dict[str, Any] = {"executor": "cuda", "kv_pages": 0, "max_rank": 16}
    found = settle_kv_pages(settings_of(**flags), SMALL).kv_pages
    of_page = page_bytes(SMALL, "cuda bf16", 16)
    assert 0.85 * (3 - 0.4) * GIB < found * of_page < (3 - 0.4) * GIB, "nine tenths of 4 GiB, less what others have"
    assert settle_kv_pages(settings_of(**flags, kv_memory_fraction=0.5), SMALL).kv_pages < 0.5 * found
    half = settle_kv_pages(settings_of(**flags, tensor_parallel=2), SMALL).kv_pages
    assert 0.85 * (2 - 0.4) * GIB < half * of_page / 2 < (2 - 0.4) * GIB, "each has half of the heads"
    with pytest.raises(KvCacheTooSmall, match="GPU 0"):
        settle_kv_pages(settings_of(**flags, kv_memory_fraction=0.25), SMALL)


def test_a_gpu_that_is_asked_for_and_not_there_ends_the_start(monkeypatch):
    def find_gpu(rank: int) -> PlayedGpu:
        raise cuda.GpuUnavailable(f"no driver for GPU {rank}")

    monkeypatch.setattr(cuda, "find_gpu", find_gpu)
    with pytest.raises(ExecutorUnavailable, match="no driver for GPU 0"):
        settle_kv_pages(settings_of(executor="cuda", kv_pages=0, max_rank=16), SMALL)


@pytest.mark.parametrize("fraction", ["0", "-1", "1.1", "nan"])
def test_a_share_that_is_none_ends_the_start(fraction, capsys):
    with pytest.raises(SystemExit):
        settings_of(kv_memory_fraction=fraction)
    assert "--kv-memory-fraction" in capsys.readouterr().err
