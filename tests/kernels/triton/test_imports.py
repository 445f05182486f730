"""What GPU code and its tests may import: they run from a checkout, with the packages that their tools name."""

import os
import re
import subprocess
import sys
from collections.abc import Iterable
from importlib.metadata import distribution, packages_distributions

import pytest

from harness import gpu_check
from weft_bench.figures import gpu

CHECK = """
import pytest
plugins = ("xdist.plugin", "pytest_timeout", "harness.gpu_session")
options = [word for plugin in plugins for word in ("-p", plugin)]
code = pytest.main(["--collect-only", "-qq", "-m", "gpu", *options, "tests/kernels/triton"])
assert code == 0, code
"""
# `stack` starts `weft up`, which needs more: it says so as it begins.
BENCH = """
import importlib, weft_bench.command, weft_bench.gpu_host
from weft_bench.figures import gpu
for name in gpu.MODULES.values():
    importlib.import_module(f"weft_bench.figures.{name}")
"""
BITS = """
import torch
from weft_runner.model import host_tensors
array = host_tensors.array_of(torch.tensor([0.5, -3.0], dtype=torch.bfloat16))
assert array.itemsize == 2
assert array.view("<u2").tolist() == [0x3F00, 0xC040]
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("code", "needed"),
    [(CHECK, gpu_check.NEEDED), (BENCH + BITS, gpu.NEEDED)],
    ids=["gpu-check", "gpu-bench and numbers of a checkpoint"],
)
def test_it_needs_no_package_but_the_named_ones(code: str, needed: tuple[str, ...]) -> None:
    """Nothing else can be imported in its process, but what these require themselves."""
    distributions = packages_distributions()
    allowed = _with_requirements(name for module in needed for name in distributions[module])
    absent = [module for module, names in distributions.items() if not allowed & {*map(_normal, names)}]
    assert {"llguidance", "re2", "ml_dtypes", "grpc", "google", "transformers", "pydantic"} <= {*absent}
    script = f"import sys; sys.modules.update(dict.fromkeys({absent}))\n{code}"
    environment = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def _with_requirements(names: Iterable[str]) -> set[str]:
    """The distributions, and those that are installed with them."""
    found, left = set[str](), [*names]
    while left:
        if (name := _normal(left.pop())) not in found:
            found.add(name)
            left += [each for each in distribution(name).requires or () if ";" not in each]
    return found


def _normal(requirement: str) -> str:
    """The name of a distribution, as indexes write it."""
    return re.sub(r"[-_.]+", "-", re.split(r"[^\w.-]", requirement)[0]).lower()
