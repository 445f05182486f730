"""Prepared launches call the very kernels that Triton's own launches would: through a libcuda that does nothing."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from harness.triton_compile import unavailable

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(unavailable(linked=True)), reason=unavailable(linked=True) or ""),
]

# Prints how many kernels there were, and the share of launches that did not ask Triton.
DRAWS = """
import random, sys
from pathlib import Path
from weft_bench.gpu_host import no_gpu
launches = no_gpu(Path(sys.argv[1]))
import torch
from triton import knobs
from triton.compiler import CompiledKernel
from triton.runtime.jit import JITFunction
from weft_kernels.triton import fused, prepared, sampling

rng, asked, called = random.Random(7), [], []
own_run, own_launch = JITFunction.run, CompiledKernel.run.fget
JITFunction.run = lambda *args, **options: asked.append(1) or own_run(*args, **options)
CompiledKernel.run = property(lambda kernel: called.append(kernel) or own_launch(kernel))

def tensor(*dtypes):
    return torch.zeros(64, dtype=rng.choice(dtypes))[rng.choice((0, 0, 1, 4, 8)):]

def number():
    return rng.choice((1, 16, 0, 48, 17, -16, 2**31 - 1, 2**31, 2**33))

def small():
    return rng.choice((1, 16, 5))

ints, floats = (torch.int32, torch.int64), (torch.float32, torch.bfloat16)
kernels = [
    (sampling._mask, {"V": 64, "SHARE": 64, "num_warps": 1},
     lambda: (tensor(*floats), number(), tensor(torch.int32), tensor(*ints), number())),
    (fused._take_tokens, {"BLOCK": 16}, lambda: (tensor(*ints), tensor(*ints), tensor(torch.int32), number())),
    (fused._add_norm, {"H": 32, "BLOCK": 32, "LAYER_NORM": False, "num_warps": 1},
     lambda: (tensor(torch.float32), rng.choice((1.0, 1e-5)), rng.choice((1.0, 0.22)), tensor(*floats),
              rng.choice((None, tensor(*floats))), tensor(torch.float32))),
]
draws = [(i, kernels[i][2]()) for i in range(3) for _ in range(20)] * 3
rng.shuffle(draws)
made = [prepared.PreparedKernel(kernel, **constants) for kernel, constants, _ in kernels]
found, direct = set(), 0
for i, args in draws:
    kernel, constants, _ = kernels[i]
    own = own_run(kernel, *args, grid=(1, 1, 1), warmup=True, **constants)
    bound = rng.randrange(len(args))
    for launch in (lambda: made[i]((1, 1, 1), *args),
                   lambda: made[i].bound((1, 1, 1), *args[:bound])(*args[bound:])):
        before, launched = len(asked), launches.value
        launch()
        direct += len(asked) == before
        assert launches.value == launched + 1
        assert called[-1] is own, (kernel, args)
    found.add(own)
told = []
knobs.runtime.launch_enter_hook.add(told.append)
made[i]((1, 1, 1), *args)
assert len(told) == 1, "a hook sees every launch"
print(len(found), direct / (2 * len(draws)))
"""


def test_a_launch_calls_the_kernel_that_triton_would(tmp_path: Path) -> None:
    """Whatever is aligned, 1, a multiple of 16, of 64 bits or not there, and whatever a kernel wants specialised."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    command = [sys.executable, "-c", DRAWS, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    kernels, direct = done.stdout.split()
    assert int(kernels) > 30
    assert float(direct) > 0.7
