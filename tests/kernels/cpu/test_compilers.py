"""What g++, clang++ and zig build computes the same bits, on every level of this CPU.

Each builds every level once; later runs find the library in the cache.
"""

import hashlib
import os
import random
import shutil
import subprocess
from collections.abc import Callable
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from harness.native_library import native_library
from harness.native_models import Scales, adapter_tensors, cpu_executor, make_step, write_model
from weft.domain.request import Sampling
from weft_devcluster import tools
from weft_kernels.cpu import (
    LEVELS,
    SOURCES,
    ZIG_LOCK,
    Cache,
    Compiler,
    Library,
    Sources,
    find_compiler,
    for_this_cpu,
    load,
    sampling,
    zig_compiler,
)
from weft_runner.model import NativeSampler, SamplingArgs, read_spec

native_library()  # skips where nothing can be built
ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
PROMPTS, DECODED, PAGES = (5, 37, 64), 6, 8
ZIG_PIN = ZIG_LOCK.read_text().split()[0]


def on_path(name: str, package: str) -> Compiler:
    if shutil.which(name) is None:
        pytest.skip(f"there is no {name}: apt install {package}")
    return find_compiler({**os.environ, "CXX": name})


def zig() -> Compiler:
    found = find_spec("ziglang")
    if found is None or found.origin is None or f"ziglang=={version('ziglang')}" != ZIG_PIN:
        pytest.skip(f"there is no zig as it is fetched: .venv/bin/uv pip install {ZIG_PIN}")
    return zig_compiler(Path(found.origin).with_name("zig"), tools.cache() / "zig")


COMPILERS: dict[str, Callable[[], Compiler]] = {
    "g++": lambda: on_path("g++", "g++"), "clang++": lambda: on_path("clang++", "clang"), "zig": zig,
}  # fmt: skip


def built_by(name: str, level: str, what: Sources = SOURCES) -> Library:
    path = Cache(tools.cache() / "kernels", os.geteuid()).get(what, COMPILERS[name]())
    library = load("portable", packaged=path)
    assert library.path == path
    if level not in library.levels:
        pytest.skip(f"this CPU has no {level}: run on one that has")
    return load(level, packaged=path)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return write_model(tmp_path_factory.mktemp("model") / "llama", 11)


def bits_of_steps(library: Library, model: dict[str, Path], dtype: str) -> bytes:
    """Prompts side by side, with adapters and without, then tokens one at a time: the logits, as bytes."""
    spec = read_spec(model["config.json"])
    weights, _, kv = dtype.partition("+")
    sizes = {"pages": PAGES * len(PROMPTS), "page_tokens": 16, "slots": 2}
    executor = cpu_executor(model, library, dtype=weights, kv_dtype=kv or "auto", threads=2, **sizes)
    for slot, rank in enumerate((8, 33)):
        tensors = adapter_tensors(spec, slot, dict.fromkeys(ALL, rank))
        executor.adapters.put(slot, executor.adapters.build(tensors, Scales()))
    drawn = random.Random(3)
    tokens = [[drawn.randrange(spec.vocab_size) for _ in range(length + DECODED)] for length in PROMPTS]
    pages, slots = [range(PAGES * i, PAGES * (i + 1)) for i in range(len(PROMPTS))], (None, 0, 1)
    steps = [[(tokens[i][:length], 0, pages[i], slots[i]) for i, length in enumerate(PROMPTS)]]
    steps += [
        [(tokens[i][length + n :][:1], length + n, pages[i], slots[i]) for i, length in enumerate(PROMPTS)]
        for n in range(DECODED)
    ]
    return b"".join(np.ascontiguousarray(executor.run(make_step(rows))).tobytes() for rows in steps)


def bits_of_draws(library: Library) -> bytes:
    """Tokens and log probabilities of many rows, as bytes."""
    rows = (np.random.default_rng(5).normal(size=(64, 1000)) * 3).astype(np.float32)
    drawn = [
        Sampling(
            seed=i, temperature=(0.0, 0.3, 1.0, 20.0)[i % 4], top_p=(1.0, 0.9)[i // 4 % 2], top_k=(0, 7)[i // 8 % 2],
            min_p=(0.0, 0.05)[i // 16 % 2], top_logprobs=5,
        )
        for i in range(len(rows))
    ]  # fmt: skip
    chooser = NativeSampler(sampling.Sampler(library.native, library.level_number))
    return repr(chooser.sample(rows, [SamplingArgs(one, i) for i, one in enumerate(drawn)])).encode()


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", [name for name in COMPILERS if name != "g++"])
def test_the_bits_are_those_of_gcc(model: dict[str, Path], name: str, level: str) -> None:
    ours, gcc = built_by(name, level), built_by("g++", level)
    kinds = ("fp32", "bf16", "int8", "int4", "bf16+int4")
    seen = [
        {kind: hashlib.sha256(bits_of_steps(library, model, kind)).hexdigest() for kind in kinds}
        | {"draws": bits_of_draws(library)}
        for library in (ours, gcc)
    ]
    assert seen[0] == seen[1]


@pytest.mark.parametrize("name", COMPILERS)
@pytest.mark.parametrize(
    "what",
    [
        pytest.param(SOURCES, id="every level"),
        pytest.param(for_this_cpu(SOURCES), id="this CPU's", marks=pytest.mark.slow),
    ],
)
def test_the_library_needs_no_cpp_runtime(name: str, what: Sources) -> None:
    """Whatever compiles it: a compiler that is fetched has none, and would compile one first."""
    path = built_by(name, "portable", what).path
    listed = subprocess.run(["nm", "-D", "--undefined-only", path], check=True, capture_output=True, text=True).stdout
    undefined = [line.split()[-1] for line in listed.splitlines()]
    of_cpp = ("_Z", "__cxa_", "__gxx", "_Unwind")
    # __cxa_finalize is the C library's, and weak in every shared object
    assert [one for one in undefined if one.startswith(of_cpp) and not one.startswith("__cxa_finalize")] == []
