"""Shared by all suites: one seed, printed, from `WEFT_TEST_SEED` (default 0). Equal seeds draw equal inputs."""

import atexit
import gc
import os
import sys
from itertools import pairwise
from pathlib import Path

# Triton decides when it is imported whether its kernels are compiled or interpreted. Here they are interpreted, on the
# CPU, unless TRITON_INTERPRET=0 is said, or `-m gpu` where there is one; so before anything that may import Triton
# (torch does at times).
os.environ.setdefault(
    "TRITON_INTERPRET", "0" if ("-m", "gpu") in pairwise(sys.argv) and Path("/dev/nvidiactl").exists() else "1"
)

# What tests compute is small: a second thread of BLAS or OpenMP spins, and waits for the first one. Processes of tests
# have that from here, too.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
os.environ.setdefault("MKL_NUM_THREADS", "1")

import random
from collections.abc import Generator

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.internal.conjecture import providers

from weft.process import long_lived_imports

pytest.register_assert_rewrite("harness")  # its assertions show what they compared

from harness import deadline, leaks, order, progress  # noqa: E402
from harness.small_disk import small_disk  # noqa: E402, F401 (a fixture)

SEED = int(os.environ.get("WEFT_TEST_SEED", "0"))

# The time that examples take depends on the machine, so no wall-clock rule decides whether a property holds. A database
# of earlier failures would change the inputs of the next run. `make explore` sets more examples.
EXAMPLES = int(os.environ.get("WEFT_TEST_EXAMPLES", "50"))
settings.register_profile(
    "weft", deadline=None, max_examples=EXAMPLES, suppress_health_check=[HealthCheck.too_slow], print_blob=True,
    database=None,
)  # fmt: skip
# Hypothesis draws constants from the source of all local modules in sys.modules. The modules differ from worker to
# worker and from run to run, so a seed would not fix the inputs.
providers._get_local_constants = lambda: providers._local_constants
# For whoever only asks whether a property holds (`make mutants`): finding the smallest example takes minutes.
settings.register_profile("verdict", settings.get_profile("weft"), phases=[Phase.explicit, Phase.generate])
settings.load_profile("weft")


def pytest_configure(config: pytest.Config) -> None:
    progress.register(config)
    deadline.register(config)
    leaks.register(config)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Thousands of tests and what they import are no garbage: the collector would visit them in every test."""
    with long_lived_imports():
        return (yield)


# What native modules made is collected as the interpreter ends, after all: Triton's says at length what is not. Not
# before: pytest looks for exceptions in garbage at its end, and would visit all of it for seconds.
atexit.register(gc.unfreeze)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    order.sort_tests(items)


def pytest_report_header() -> str:
    return f"weft seed: {SEED} (set WEFT_TEST_SEED to replay)"


@pytest.fixture
def rng() -> random.Random:
    return random.Random(SEED)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """What a test printed or logged may be no text; between worker processes only text can go."""
    report = yield
    report.sections = [(name, said.encode("utf-8", "backslashreplace").decode()) for name, said in report.sections]
    return report
