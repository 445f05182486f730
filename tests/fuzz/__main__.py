"""`make fuzz`: run targets under libFuzzer, each in a process of its own, and print what was tried and found.

    python -m fuzz [--target NAME] [--seconds N]

Inputs that reached something new are kept in `build/fuzz/NAME/`, where the next run begins; a finding is kept beside
them, and is to be mended and then copied into `tests/fuzz/corpus/NAME/`. Exit code 1: something was found.
"""

import argparse
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from fuzz.targets import TARGETS

ROOT = Path(__file__).parents[2]
KEPT = ROOT / "build" / "fuzz"
CORPUS = Path(__file__).parent / "corpus"
NATIVE, OPENAPI = "native-step", "openapi"
INPUT_S = 60  # until libFuzzer calls an input that does not end a finding, and keeps it
GRACE_S = 600  # of a process to import everything and to end, on a busy machine
RSS_MB = 4096  # of a process with what libFuzzer keeps; an input's own memory is `fuzz.child`'s to watch
NAMES = tuple(TARGETS)


class Tried(NamedTuple):
    """`finding`: its last words; "" for none."""

    target: str
    executions: int
    edges: int
    finding: str


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m fuzz", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument(
        "--target", choices=["", *NAMES, NATIVE, OPENAPI], default="", help="one target; default: all in turn"
    )
    parser.add_argument("--seconds", type=int, default=60, help="of each target; openapi: requests of each operation")
    given = parser.parse_args(argv)
    if given.target == NATIVE:
        return subprocess.call([sys.executable, "-m", "harness.native_fuzz", "--seconds", str(given.seconds)])
    if given.target == OPENAPI:
        return subprocess.call([sys.executable, "-m", "harness.openapi_fuzz", "--examples", str(given.seconds)])
    tried = list[Tried]()
    for name in [given.target] if given.target else NAMES:
        tried.append(fuzz(name, given.seconds))
        print(_row(tried[-1]), flush=True)
    found = sum(bool(one.finding) for one in tried)
    print(f"{len(tried)} targets, {sum(one.executions for one in tried):,} executions, {found} findings")
    return bool(found)


def fuzz(name: str, seconds: int) -> Tried:
    """One target for so long, or until its first finding."""
    kept = KEPT / name
    kept.mkdir(parents=True, exist_ok=True)
    seeds = [str(folder) for folder in (kept, CORPUS / name) if folder.is_dir()]
    options = [f"-max_total_time={seconds}", "-print_final_stats=1", f"-rss_limit_mb={RSS_MB}", "-max_len=4096"]
    options.append(f"-timeout={INPUT_S}")
    command = [sys.executable, "-m", "fuzz.child", name, *seeds, f"-artifact_prefix={kept}/", *options]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=seconds + GRACE_S,
            env={**os.environ, "RUST_BACKTRACE": "0"},  # of a panic that is caught: it takes more than an input may
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        said = (error.stderr or b"").decode(errors="replace")
        return Tried(name, _last(r"#(\d+)", said), _last(r"cov: (\d+)", said), f"it does not end:\n{said[-2000:]}")
    said = done.stderr
    executions = _last(r"stat::number_of_executed_units:\s*(\d+)", said)
    finding = "" if done.returncode == 0 and executions else (done.stdout + said)[-3000:]
    return Tried(name, executions or _last(r"#(\d+)", said), _last(r"cov: (\d+)", said), finding)


def _last(pattern: str, text: str) -> int:
    found = re.findall(pattern, text)
    return int(found[-1]) if found else 0


def _row(one: Tried) -> str:
    text = f"{one.target:<18}{one.executions:>12,} executions{one.edges:>8,} edges"
    return f"{text}   FOUND\n{one.finding}" if one.finding else text


if __name__ == "__main__":
    sys.exit(main())
