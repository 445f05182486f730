"""`python -m weft_sim check`: many scenarios, each of one seed. A failing one prints how to see it again."""

import argparse
import multiprocessing
import sys
import time
import traceback
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from weft_sim.scenario import Run


@dataclass(frozen=True, slots=True)
class Verdict:
    """How a seed ended; `fault` is empty where every law held."""

    seed: int
    trace_hash: str
    fault: str
    story: tuple[str, ...] = ()


def check_seed(seed: int, trace: Path | None = None) -> Verdict:
    """Run the scenario of a seed."""
    run = Run(seed, trace=trace is not None)
    try:
        verdict = Verdict(seed, run.run(), "")
    except Exception as error:  # noqa: BLE001 (whatever a machine raises is the finding)
        frame = traceback.extract_tb(error.__traceback__)[-1]
        fault = f"{type(error).__name__}: {error} ({Path(frame.filename).name}:{frame.lineno})"
        verdict = Verdict(seed, run.world.trace_hash, fault, run.story)
    if trace is not None:
        run.write(trace)
    return verdict


def check_seeds(seeds: Iterable[int], jobs: int = 1) -> Iterator[Verdict]:
    """Run the scenario of each seed in `jobs` processes. Yields verdicts in any order."""
    if jobs == 1:
        yield from map(check_seed, seeds)
        return
    with multiprocessing.get_context("spawn").Pool(jobs) as pool:
        yield from pool.imap_unordered(check_seed, seeds, chunksize=4)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seeds", type=int, default=500, help="how many seeds (500)")
    parser.add_argument("--first", type=int, default=0, help="the first one (0)")
    parser.add_argument("--jobs", type=int, default=2, help="processes that share the seeds (2)")
    parser.add_argument("--trace", type=Path, help="with --seeds 1: write a Chrome trace of the run")


def main(arguments: argparse.Namespace) -> int:
    """Run the scenarios and return 0 if all laws held in every run, else 1."""
    began = time.perf_counter()
    seeds = range(arguments.first, arguments.first + arguments.seeds)
    if arguments.trace is not None and len(seeds) != 1:
        print("--trace takes one run: give --seeds 1 --first SEED", file=sys.stderr)
        return 2
    if len(seeds) == 1:
        verdicts: Iterable[Verdict] = [check_seed(arguments.first, arguments.trace)]
    else:
        verdicts = check_seeds(seeds, arguments.jobs)
    failed: list[Verdict] = []
    for verdict in verdicts:
        if verdict.fault:
            failed.append(verdict)
            _show(verdict)
    seconds = time.perf_counter() - began
    if len(seeds) == 1 and not failed:
        print(f"seed {arguments.first}: trace {next(iter(verdicts)).trace_hash}")
    print(f"sim-check: {len(seeds) - len(failed)} of {len(seeds)} seeds held all laws, {seconds:.0f} s")
    if failed:
        print(f"failed seeds: {' '.join(str(v.seed) for v in sorted(failed, key=lambda v: v.seed))}")
    return 1 if failed else 0


def _show(verdict: Verdict) -> None:
    print(f"\nseed {verdict.seed}: {verdict.fault}")
    print("  " + "\n  ".join(verdict.story))
    print(
        f"  again: python -m weft_sim check --seeds 1 --first {verdict.seed} --trace seed-{verdict.seed}.json",
        flush=True,
    )
