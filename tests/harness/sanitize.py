"""The native library's tests under sanitizers: `python -m harness.sanitize [SANITIZER] [LEVEL]` (`make sanitize`).

The library is built by the product's own code, by clang with `-fsanitize=address,undefined` and by gcc with `thread`
(`CXX` says so, and the cache has an entry for each compiler and its flags). Its tests run against it for each
instruction level of this CPU, in a Python that preloads the sanitizer's runtime. Python, numpy and torch are not built
so: their memory and locks are seen, their accesses are not, and no report is suppressed. torch computes in one thread,
since TSan sees nothing of how OpenMP's threads wait for each other. `tests/harness/sanitized.py` chooses a level's
tests. At last the corpus of the fuzz target of the native step, which computes each step with several numbers of
threads, runs under the same checks (`harness.native_fuzz`).

Prints a table. Exit codes: 0; 1 for a report or a test that failed, which are printed; 3 where a compiler lacks.
"""

import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from harness import native_fuzz
from harness.clang import FLAGS, runtime, sanitizing
from weft_devcluster import tools
from weft_kernels.cpu import LEVEL_VARIABLE, Compiler, NativeUnavailable, find_compiler, load

ROOT = Path(__file__).parents[2]
LEVEL_TESTS = ("tests/kernels/cpu/test_library_smoke.py", "tests/unit/runner/test_cpu_executor.py")
BEST_TESTS = (  # on the best level alone: threads, ranks and copies beside a step, a sampler of all levels, drafts
    "tests/kernels/cpu/test_library_pool.py",
    "tests/kernels/cpu/test_sampling.py",
    "tests/kernels/cpu/test_draft.py",
    "tests/unit/runner/test_cpu_adapters.py",
    "tests/unit/runner/parallel/test_native_ranks.py",
    "tests/unit/runner/test_offload_executor.py",
    # a child process has the memory that the model may take, which a sanitizer multiplies
    "--deselect=tests/unit/runner/test_offload_executor.py::test_a_model_four_times_its_budget_stays_inside_it",
)
EXAMPLES = "10"  # of each property: a fifth, since sanitized steps take long
IMPORTED = "ignore::pytest.PytestAssertRewriteWarning"  # the plugin is of `harness`, before conftest.py asks for that
LIMIT_S = 3000


class Sanitizer(NamedTuple):
    """`made_with`: the compiler, with its flags, and the runtime; `options`: the runtime's variable, and its value.

    `checks`: what clang calls it.
    """

    made_with: Callable[[], tuple[Compiler, Path]]
    options: tuple[str, str]
    checks: str


def asan_of_clang() -> tuple[Compiler, Path]:
    """Find clang: gcc 12 takes more than five minutes for a unit with UBSan. Raises NativeUnavailable."""
    compiler = sanitizing("address,undefined", "-shared-libsan")
    file = runtime(compiler.command[0], "asan")
    assert file is not None, "`sanitizing` has looked"
    return compiler, file


def tsan_of_gcc() -> tuple[Compiler, Path]:
    """Find gcc and its runtime: clang 14's ends every process at its start. Raises NativeUnavailable."""
    compiler = find_compiler({**os.environ, "CXX": shlex.join(("g++", *FLAGS, "-fsanitize=thread"))})
    asked = (compiler.command[0], "-print-file-name=libtsan.so")
    file = Path(subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip())
    if not file.is_absolute():
        raise NativeUnavailable(f"{compiler} has no libtsan")
    return compiler, file


SANITIZERS = {
    # what Python keeps until the process ends is no leak; the fuzz target looks for those of the library
    "asan+ubsan": Sanitizer(asan_of_clang, ("ASAN_OPTIONS", "detect_leaks=0:halt_on_error=0"), native_fuzz.SANITIZERS),
    "tsan": Sanitizer(tsan_of_gcc, ("TSAN_OPTIONS", "report_signal_unsafe=0"), native_fuzz.THREAD),
}
REPORT = re.compile(r"runtime error: |ERROR: AddressSanitizer|WARNING: ThreadSanitizer|ERROR: ThreadSanitizer")


@dataclass(frozen=True, slots=True)
class Outcome:
    """A run of Python. `reports`: of the sanitizer, as it wrote them; `code`: the exit code."""

    code: int
    output: str
    reports: str

    @property
    def n_reports(self) -> int:
        return len(REPORT.findall(self.reports))

    @property
    def summary(self) -> str:
        """Pytest's last line."""
        return self.output.strip().rpartition("\n")[2].strip("= ")

    @property
    def good(self) -> bool:
        return self.code == 0 and not self.n_reports


def environment(name: str, level: str, reports: Path) -> dict[str, str]:
    """Return the environment of a Python that loads the library built with a sanitizer.

    Its reports go to files whose names begin with `reports`. Raises NativeUnavailable: there is no compiler for it.
    """
    variable, options = SANITIZERS[name].options
    compiler, preloaded = SANITIZERS[name].made_with()
    return {
        **os.environ, "CXX": shlex.join(compiler.command), "XDG_CACHE_HOME": str(tools.cache() / "sanitized"),
        LEVEL_VARIABLE: level, "LD_PRELOAD": str(preloaded), "WEFT_TEST_EXAMPLES": EXAMPLES,
        "OMP_NUM_THREADS": "1",
        variable: f"{options}:log_path={reports}", "UBSAN_OPTIONS": f"print_stacktrace=1:log_path={reports}",
    }  # fmt: skip


def run_tests(name: str, level: str, tests: Sequence[str]) -> Outcome:
    """Run tests at one level with one sanitizer. Raises NativeUnavailable: no compiler, or it failed."""
    options = ("-p", "harness.sanitized", "-p", "no:cacheprovider", "-W", IMPORTED, "-q")
    return run_python(name, level, ("-m", "pytest", *options, *tests))


def run_python(name: str, level: str, arguments: Sequence[str]) -> Outcome:
    """Run Python with the library at one level and one sanitizer. Raises NativeUnavailable: it cannot be compiled."""
    with tempfile.TemporaryDirectory() as folder:
        variables = environment(name, level, Path(folder) / "report")
        build_library(variables)
        ended = subprocess.run(
            (sys.executable, *arguments), cwd=ROOT, env={**variables, "PYTHONPATH": "tests"}, text=True,
            errors="replace", check=False, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=LIMIT_S,
        )  # fmt: skip
        reports = "\n".join(file.read_text(errors="replace") for file in sorted(Path(folder).iterdir()))
        return Outcome(ended.returncode, ended.stdout, reports)


def build_library(variables: Mapping[str, str]) -> None:
    """Build the library before a runtime is preloaded, which the compiler has no use for."""
    plain = {name: value for name, value in variables.items() if name not in ("LD_PRELOAD", LEVEL_VARIABLE)}
    build = "from weft_kernels.cpu import build_cache, compiler, sources\n"
    build += "build_cache.cache_folders()[0].get(sources.SOURCES, compiler.find_compiler())"
    ended = subprocess.run([sys.executable, "-c", build], env=plain, capture_output=True, text=True, check=False)
    if ended.returncode:
        raise NativeUnavailable(ended.stderr.strip().rpartition("\n")[2])


def main(arguments: Sequence[str]) -> int:
    """Run as the command says, and return the exit code."""
    usable = load().levels
    names = [name for name in SANITIZERS if not set(arguments) & set(SANITIZERS) or name in arguments]
    levels = [level for level in usable if not set(arguments) - set(SANITIZERS) or level in arguments]
    good = True
    try:
        for name in names:
            for level in levels:
                tests = LEVEL_TESTS + (BEST_TESTS if level == usable[0] else ())
                outcome = run_tests(name, level, tests)
                if not outcome.good:
                    say(f"{outcome.output[-6000:]}\n{outcome.reports[:20000]}")
                say(f"{name:<11} {level:<12} {outcome.n_reports:>3} reports, {outcome.summary}")
                good = good and outcome.good
            with tempfile.TemporaryDirectory() as folder:
                fuzzed = native_fuzz.fuzz(native_fuzz.build(SANITIZERS[name].checks), 0, Path(folder))
            if fuzzed.finding:
                say(fuzzed.finding)
            say(f"{name:<11} {native_fuzz.NAME:<12} {bool(fuzzed.finding):>3} reports, {fuzzed.executions} inputs")
            good = good and not fuzzed.finding
    except NativeUnavailable as error:
        sys.stderr.write(f"sanitizers: {error.reason}\n")
        return 3
    return 0 if good else 1


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
