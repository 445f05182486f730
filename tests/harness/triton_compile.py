"""Triton kernels compiled for a GPU that is not here: registers, spills, shared memory and instructions of each launch.

A case calls launchers as always, with CPU tensors or with tensors of `device="meta"` where weights would not fit.
In place of a launch Triton compiles: it binds the arguments itself (constexprs, types, divisibility by 16, equal to 1),
as `warmup` has it do, and asks a driver that only names its target. Nothing runs, so what a launcher allocates is never
written, and a launcher that reads a result back reads noise.

Registers and spills are read from the machine code, by NVIDIA's tools that come with Triton. Instructions are counted
in the PTX as it is written, loops once: whether, not how often. All of it stays in Triton's cache: TRITON_CACHE_DIR set
to an empty folder shows a kernel's PTX, its IRs and its cubin (for `nvdisasm -c`).

Triton with TRITON_INTERPRET=1 has no compiler: `Apart` compiles in a process without it.
"""

import contextlib
import importlib.util
import os
import pickle
import re
import shutil
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from harness import processes
from harness.sass import Local, local_memory

BLOCK_SHARED_KIB = {80: 163, 90: 227}  # the most that one block may use, by compute capability (CUDA C++ guide)

# Counted in PTX. A 16-byte load is either of the first two: a pipelined loop loads by cp.async.
INSTRUCTIONS = {
    "ld.global.v4": r"\bld\.global[.:\w]*\.(?:v4\.[bfu]32|v2\.[bfu]64)\b",
    "cp.async.16": r"\bcp\.async\.c[ag]\.shared[.:\w]* [^;]*, (?:0x10|16)[,;]",
    "mma.sync": r"\bmma\.sync\b", "wgmma": r"\bwgmma\.mma_async\b", "fma.f64": r"\bfma\.rn\.f64\b",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Launch:
    """One compiled variant of a kernel, or why there is none (`error`)."""

    kernel: str
    capability: int
    constexprs: dict[str, Any]
    error: str | None = None
    num_warps: int = 0
    num_stages: int = 0
    fp_fusion: bool = True
    registers: int = 0
    spill_store_bytes: int = 0
    spill_load_bytes: int = 0
    spill_loop_bytes: int = 0  # of both, in code that runs more than once
    shared_bytes: int = 0
    instructions: dict[str, int] = field(default_factory=dict)


class Recorder:
    """Between `__enter__` and `__exit__` launches are compiled for `capability`; `launches` has each variant once."""

    def __init__(self, capability: int) -> None:
        self.capability = capability
        self.launches: list[Launch] = []
        self._seen: set[str] = set()
        self._undo = contextlib.ExitStack()

    def __enter__(self) -> "Recorder":
        from weft_kernels.triton import ahead

        self._undo.enter_context(ahead.compiling(self.capability, self._record))
        return self

    def __exit__(self, *_: object) -> None:
        self._undo.close()

    def _record(self, kernel: Any, compiled: Callable[[], Any], options: dict[str, Any]) -> None:
        try:
            binary = compiled()
        except Exception as error:  # noqa: BLE001 - a kernel that does not compile is a finding; the next may compile
            given = {k: v for k, v in options.items() if isinstance(v, int | float | str)}
            self.launches.append(Launch(kernel.__name__, self.capability, given, error=_told(error)))
            return
        if binary.hash not in self._seen:
            self._seen.add(binary.hash)
            self.launches.append(_measured(kernel, binary, self.capability))


def _measured(kernel: Any, binary: Any, capability: int) -> Launch:
    constants = {kernel.arg_names[path[0]]: value for path, value in binary.src.constants.items() if len(path) == 1}
    registers, local = _resources(binary.asm["cubin"], binary.metadata.name)
    return Launch(
        kernel=kernel.__name__,
        capability=capability,
        constexprs={name: value if isinstance(value, int | float) else str(value) for name, value in constants.items()},
        num_warps=binary.metadata.num_warps,
        num_stages=binary.metadata.num_stages,
        fp_fusion=binary.metadata.enable_fp_fusion,
        registers=registers,
        spill_store_bytes=local.stored,
        spill_load_bytes=local.loaded,
        spill_loop_bytes=local.in_loops,
        shared_bytes=binary.metadata.shared,
        instructions={name: len(re.findall(pattern, binary.asm["ptx"])) for name, pattern in INSTRUCTIONS.items()},
    )


def _resources(cubin: bytes, name: str) -> tuple[int, Local]:
    """(registers a thread, local memory) of a compiled kernel. Code without a stack is not read for it."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        told = _output("cuobjdump", "-res-usage", file.name)
        found = re.search(rf"Function {re.escape(name)}:\s+REG:(\d+) STACK:(\d+)", told)
        assert found, told
        return int(found[1]), local_memory(_output("nvdisasm", "-c", file.name)) if int(found[2]) else Local()


def _output(tool: str, *arguments: str) -> str:
    return subprocess.run([_tool(tool), *arguments], capture_output=True, text=True, check=True).stdout


def _told(error: BaseException) -> str:
    """The error and its causes, the innermost last, with no more of each than a reader needs."""
    chain = [f"{type(error).__name__}: {str(error)[-2000:]}"]
    if error.__cause__ is not None:
        chain.append(_told(error.__cause__))
    return "\n".join(chain)


def _tool(name: str) -> str:
    import triton

    return str(Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name)


def unavailable(*, linked: bool = False) -> str | None:
    """Say which tool is missing and how to install it; None: none is. `linked`: Triton's launchers need `cc`, too."""
    if not importlib.util.find_spec("triton"):
        return "no triton: make install"
    if linked and shutil.which("cc") is None:
        return "no cc: apt-get install gcc libc6-dev"
    missing = [name for name in ("ptxas", "cuobjdump", "nvdisasm") if not os.access(_tool(name), os.X_OK)]
    return f"triton of this platform has no {', '.join(missing)}: run on x86-64 Linux" if missing else None


@dataclass(frozen=True, slots=True)
class Compiled:
    """What a case launched for one capability, as far as it came: `error` is the launcher's own."""

    launches: tuple[Launch, ...]
    error: str | None


class Apart:
    """A process of its own, without the interpreter, that compiles what it is asked for; a new one where it has died.

    A context manager: with it the process ends.
    """

    def __enter__(self) -> Self:
        self._process: subprocess.Popen[bytes] | None = None
        self._said = tempfile.TemporaryFile("w+")
        return self

    def __exit__(self, *_: object) -> None:
        self._end()
        self._said.close()

    def compiled(self, case: str, capability: int) -> Compiled:
        """The launches of a case of `triton_cases`. Raises RuntimeError, with what was said, where the process dies."""
        process = self._process = self._process or self._started()
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(f"{capability} {case}\n".encode())
        process.stdin.flush()
        try:
            return pickle.load(process.stdout)
        except EOFError:
            self._end()
            self._said.seek(0)
            raise RuntimeError(f"the compiler's process ended:\n{self._said.read()[-4000:]}") from None

    def _started(self) -> "subprocess.Popen[bytes]":
        environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
        environment["PYTHONPATH"] = os.pathsep.join(sys.path)
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": self._said}
        command = (sys.executable, "-c", "from harness.triton_compile import answer; answer()")
        return processes.start(*command, env=environment, **pipes)

    def _end(self) -> None:
        if self._process is not None:
            processes.end(self._process)
        self._process = None


def _compiled(run: Callable[[], object], capability: int) -> Compiled:
    error = None
    with Recorder(capability) as recorder:
        try:
            run()
        except Exception:  # noqa: BLE001 - reported; the next case may do
            error = traceback.format_exc(limit=-4)
    return Compiled(tuple(recorder.launches), error)


def answer() -> None:
    """Take lines `CAPABILITY CASE`, answer each with a pickle, until there are no more. All else goes to stderr."""
    from harness.triton_cases import CASES

    runs = {case.name: case.run for case in CASES}
    with os.fdopen(os.dup(1), "wb") as answers:
        os.dup2(2, 1)
        for line in sys.stdin:
            capability, name = line.split()
            pickle.dump(_compiled(runs[name], int(capability)), answers)
            answers.flush()
