"""`make test-numerics`: the tests marked `numeric` on the arithmetic of other CPUs, and the margins of their bounds.

    python -m harness.numerics [pytest's options]

A verdict on rounded numbers should be the same on every CPU. Libraries choose their arithmetic by the CPU; a setting
has one of them choose as on an older CPU, or compute in two threads. Each setting is a run of pytest, in which
`within` records every measured value and its bound. A setting whose values are those of the first run, to the bit, has
no effect on this CPU (or its library does not know the CPU). A margin is a bound divided by the largest value of all
runs.

Prints a table, the smallest margin first. Exit codes: 0, or 1 where a test failed or a margin is below MIN_MARGIN.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from weft_kernels.cpu import LEVEL_VARIABLE, load

ROOT = Path(__file__).parents[2]
VARIABLE = "WEFT_NUMERICS_RECORDS"
MIN_MARGIN = 1.5
MARKS = "numeric and not long and not (slow and gpu)"  # whole models under Triton's interpreter take minutes
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
# torch itself, and what it multiplies matrices with: oneDNN in bf16, MKL in fp32.
CHOICES = {
    "ATEN_CPU_CAPABILITY": ("default", "avx2", "avx512"),
    "ONEDNN_MAX_CPU_ISA": ("SSE41", "AVX2", "AVX512_CORE", "AVX512_CORE_BF16"),
    "MKL_ENABLE_INSTRUCTIONS": ("SSE4_2", "AVX2", "AVX512"),
}


@dataclass(frozen=True, slots=True)
class Measured:
    """A measured value of a test and its upper bound. The table has a row for each pair of name and bound."""

    test: str
    name: str
    value: float
    bound: float


def within(name: str, value: float, bound: float) -> None:
    """Assert that a measured value is at most its bound; NaN is not."""
    record(name, value, bound)
    assert value <= bound, f"{name}: expected at most {bound:.4g}, got {value:.4g}"


def near(name: str, actual: npt.ArrayLike, expected: npt.ArrayLike, bound: float) -> None:
    """Assert that two arrays of a shape differ by at most `bound` in each number; NaN differs from all."""
    one, other = (np.asarray(values, np.float64) for values in (actual, expected))
    assert one.shape == other.shape
    within(name, float(np.abs(one - other).max(initial=0.0)), bound)


def record(name: str, value: float, bound: float) -> None:
    """Record a measured value for `make test-numerics`."""
    if path := os.environ.get(VARIABLE):
        test = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" ")[0]
        with Path(path).open("a") as records:
            records.write(json.dumps([test, name, value, bound]) + "\n")


def settings() -> dict[str, dict[str, str]]:
    """Return the environment of each setting by its name; the first changes nothing but the number of threads."""
    one_thread = dict.fromkeys(THREADS, "1")
    choices = CHOICES | {LEVEL_VARIABLE: load().levels[1:]}
    changed = {f"{name}={value}": one_thread | {name: value} for name, values in choices.items() for value in values}
    return {"as it is": one_thread, **changed, "two threads": dict.fromkeys(THREADS, "2")}


def run(environment: dict[str, str], arguments: Sequence[str]) -> tuple[int, list[Measured]]:
    """Run the tests in an environment. Returns pytest's exit code, and what they measured."""
    with tempfile.TemporaryDirectory() as folder:
        records = Path(folder) / "records"
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", MARKS]
        variables = {name: value for name, value in os.environ.items() if name not in (*CHOICES, LEVEL_VARIABLE)}
        variables |= environment | {VARIABLE: str(records)}
        ended = subprocess.run([*command, *(arguments or marked())], cwd=ROOT, env=variables, check=False)
        lines = records.read_text().splitlines() if records.exists() else []
        return ended.returncode, [Measured(*json.loads(line)) for line in lines]


def marked() -> list[str]:
    """Name the files with tests marked `numeric`: collecting all tests would take longer than running these."""
    return [str(path) for path in sorted((ROOT / "tests").rglob("test_*.py")) if "mark.numeric" in path.read_text()]


def table(measured: dict[str, list[Measured]]) -> tuple[list[str], float]:
    """Return the rows of the table, and the smallest margin. `measured`: by setting."""
    worst: dict[tuple[str, float], tuple[float, str]] = {}
    for setting, values in measured.items():
        for each in values:
            row = (each.name, each.bound)
            value = each.value if each.value == each.value else float("inf")
            if row not in worst or value > worst[row][0]:
                worst[row] = (value, setting)
    margins = {row: row[1] / value if value else float("inf") for row, (value, _) in worst.items()}
    rows = ["| what | bound | worst value | margin | in the setting |", "|---|---|---|---|---|"]
    for row in sorted(margins, key=lambda row: (margins[row], row)):
        value, setting = worst[row]
        rows.append(f"| {row[0]} | {row[1]:.3g} | {value:.3g} | {margins[row]:.2f} | {setting} |")
    return rows, min(margins.values(), default=0.0)


def main(arguments: Sequence[str]) -> int:
    """Run the tests in each setting, and return the exit code."""
    measured, failed = dict[str, list[Measured]](), list[str]()
    for setting, environment in settings().items():
        print(f"--- {setting}", flush=True)
        code, measured[setting] = run(environment, arguments)
        if code:
            failed.append(setting)
    first, *others = measured
    rows, smallest = table(measured)
    print("\n".join(rows))
    idle = [setting for setting in others if measured[setting] == measured[first]]
    print(f"without effect on this CPU: {', '.join(idle) or 'none'}")
    print(f"settings: {len(measured)}, with failures: {', '.join(failed) or 'none'}; smallest margin {smallest:.2f}")
    return 1 if failed or smallest < MIN_MARGIN else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
