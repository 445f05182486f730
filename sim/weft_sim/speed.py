"""`python -m weft_sim speed`: simulated requests a second of one core, and optionally where the time goes."""

import argparse
import cProfile
import pstats
import time

from weft_sim.simulate import PoolDescription, simulate
from weft_sim.traces import TraceArrival

POOL = PoolDescription(runners=40, max_sequences=32, best_batch=32, cpu=False)
PROMPT_TOKENS, OUTPUT_TOKENS = 32, 128
GAP_S = 0.0005  # between arrivals: runners are full as soon as they can be


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--requests", type=int, default=2560, help="of each run (2560: two for each place in a batch)")
    parser.add_argument("--runs", type=int, default=3, help="the best counts: other work slows a run (3)")
    parser.add_argument("--profile", action="store_true", help="one run more, by function")


def main(arguments: argparse.Namespace) -> int:
    arrivals = [
        TraceArrival(number * GAP_S, PROMPT_TOKENS, OUTPUT_TOKENS) for number in range(arguments.requests)
    ]  # fmt: skip
    rates: list[float] = []
    for _ in range(arguments.runs):
        began = time.process_time()
        result = simulate(POOL, arrivals)
        rates.append(len(arrivals) / (time.process_time() - began))
        print(
            f"{rates[-1]:.0f} requests/s, mean batch {result.figures.rows:.1f}, {result.messages} messages", flush=True
        )
    tokens = max(rates) * OUTPUT_TOKENS
    print(f"best: {max(rates):.0f} requests/s, {1e6 / tokens:.1f} us a token, {POOL.runners} runners")
    if arguments.profile:
        with cProfile.Profile() as profile:
            simulate(POOL, arrivals)
        pstats.Stats(profile).sort_stats("tottime").print_stats(30)
    return 0
