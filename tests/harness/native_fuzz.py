"""Fuzz the native step and sampler: `python -m harness.native_fuzz [--seconds N] [--sanitizers LIST] [--seed N]`.

The target is `tests/kernels/cpu/fuzz/native_step.cpp`, which says what has to hold; libFuzzer changes the inputs of
`corpus/` beside it. `--seconds 0` (the default) runs these alone. What it finds on the way is kept in a corpus of this
machine (`$XDG_CACHE_HOME/weft/fuzz`), inputs that break something in `build/fuzz`; `native-step FILE` runs one again.

Exit codes: 0; 1 where something was found, which is printed; 3 where there is no clang.
"""

import argparse
import hashlib
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from harness.clang import sanitizing
from weft_devcluster import tools
from weft_kernels.cpu import (
    AT_ONCE,
    LIMIT_S,
    SOURCES,
    Compiler,
    Limit,
    NativeUnavailable,
    Sources,
    cache_key,
    compile_all,
    run_all,
    trimmed,
)

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "tests" / "kernels" / "cpu" / "fuzz"
TARGET, CORPUS = FOLDER / "native_step.cpp", FOLDER / "corpus"
NAME, OBJECTS = "native-step", "objects"
SANITIZERS, THREAD = "address,undefined", "thread"
INPUT_BYTES, INPUT_S = 1024, 120  # of an input, and how long it may run: a busy machine is ten times slower
ENDED_S = 600  # beyond the seconds that were asked for
OPTIONS = {"UBSAN_OPTIONS": "print_stacktrace=1:halt_on_error=1", "TSAN_OPTIONS": "halt_on_error=1"}


@dataclass(frozen=True, slots=True)
class Fuzzed:
    """`finding`: the end of the output of a run that broke something, else empty."""

    executions: int
    finding: str


def build(sanitizers: str = SANITIZERS, what: Sources = SOURCES) -> Path:
    """The target's executable; what this machine's cache lacks is compiled. Raises NativeUnavailable: no clang, or it
    failed.
    """
    # The fuzzer's counters are written by all threads at once, which is a race: with TSan it counts in TARGET alone.
    counted = sanitizers if sanitizers == THREAD else f"fuzzer-no-link,{sanitizers}"
    compiler, limit = sanitizing(counted), Limit(LIMIT_S)
    folder = tools.cache() / "fuzz" / cache_key(what, compiler)
    if not folder.exists():
        _compile(compiler, what, folder, limit)
    target = folder / f"{NAME}-{hashlib.sha256(TARGET.read_bytes()).hexdigest()[:12]}"
    if not target.exists():
        flags = ("-std=c++17", "-O1", "-pthread", f"-fsanitize=fuzzer,{sanitizers}", f"-I{what.folder}")
        objects = (folder / OBJECTS).read_text().split()
        link = (*compiler.command, *flags, str(TARGET), *objects, "-o", NAME)
        (end,) = run_all([link], folder, at_once=AT_ONCE, limit=limit)
        if end.code:
            raise NativeUnavailable(f"the compiler failed ({TARGET.name}): {trimmed(end.output)}")
        (folder / NAME).rename(target)
    return target


def _compile(compiler: Compiler, what: Sources, folder: Path, limit: Limit) -> None:
    """Compile the library's units, and write down their order."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as work:
        made = Path(work) / folder.name
        made.mkdir()
        objects, _ = compile_all(what, compiler, made, limit)
        (made / OBJECTS).write_text("\n".join(file.name for file in objects))
        made.rename(folder)


def fuzz(target: Path, seconds: int, findings: Path, *, seed: int = 0, corpus: Path | None = None) -> Fuzzed:
    """Run the inputs of CORPUS and, for `seconds`, changed ones. `corpus`: a folder that keeps what was found.

    Inputs that break something go to `findings`.
    """
    findings.mkdir(parents=True, exist_ok=True)
    folders = [str(CORPUS)] if corpus is None else [str(corpus), str(CORPUS)]
    if corpus is None and seconds:
        with tempfile.TemporaryDirectory() as folder:
            return fuzz(target, seconds, findings, seed=seed, corpus=Path(folder))
    asked = (f"-max_total_time={seconds}", f"-seed={seed}") if seconds else ("-runs=0",)
    command = (
        str(target), *asked, f"-max_len={INPUT_BYTES}", f"-timeout={INPUT_S}", "-rss_limit_mb=4096",
        "-print_final_stats=1", f"-artifact_prefix={findings}/", *folders,
    )  # fmt: skip
    ended = subprocess.run(
        command, capture_output=True, text=True, errors="replace", timeout=seconds + ENDED_S, check=False,
        env={**os.environ, **OPTIONS},
    )  # fmt: skip
    said = ended.stdout + ended.stderr
    counts = re.findall(r"number_of_executed_units: (\d+)|^#(\d+)\s", said, re.MULTILINE)
    executions = max((int(total or shown) for total, shown in counts), default=0)
    return Fuzzed(executions, "" if ended.returncode == 0 else _finding(said))


def _finding(said: str) -> str:
    """Return what was said from the first line on that says what is wrong."""
    lines = [line for line in said.splitlines() if not re.match(r"#\d+\s+(NEW|REDUCE|pulse|RELOAD|INITED)", line)]
    marks = ("not so", "runtime error", "ERROR:", "WARNING: ThreadSanitizer")
    first = next((i for i, line in enumerate(lines) if any(mark in line for mark in marks)), max(0, len(lines) - 40))
    return "\n".join(lines[first : first + 60])


def main(arguments: Sequence[str]) -> int:
    """Run as the command says, and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m harness.native_fuzz", description="fuzz the native step")
    parser.add_argument("--seconds", type=int, default=0, help="0: the corpus of the repository alone")
    parser.add_argument(
        "--sanitizers",
        default=SANITIZERS,
        help=f"{SANITIZERS} (default), or {THREAD}, which counts no coverage of the library",
    )
    parser.add_argument("--seed", type=int, default=0, help="of the fuzzer's choices; 0: the time")
    given = parser.parse_args(arguments)
    try:
        target = build(given.sanitizers)
    except NativeUnavailable as error:
        sys.stderr.write(f"{NAME}: {error.reason}\n")
        return 3
    findings, corpus = ROOT / "build" / "fuzz" / NAME, tools.cache() / "fuzz" / "corpus" / NAME
    corpus.mkdir(parents=True, exist_ok=True)
    done = fuzz(target, given.seconds, findings, seed=given.seed, corpus=corpus)
    found = "1 finding" if done.finding else "nothing found"
    sys.stdout.write(f"{NAME} ({given.sanitizers}): {done.executions} executions, {found}\n")
    if done.finding:
        again = shlex.join([str(target), f"{findings}/FILE"])
        sys.stdout.write(f"{done.finding}\ninputs: {findings}; again: {again}\n")
    return 1 if done.finding else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
