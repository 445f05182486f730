"""Triton kernels compiled for a GPU that is not here: registers, spills, shared memory and instructions of each launch.

    PYTHONPATH=tests python -m harness.triton_compile --capability 80,90 harness.triton_cases:shrink_decode [...]

A FUNCTION calls launchers as always, with CPU tensors or with tensors of `device="meta"` where weights would not fit.
In place of a launch Triton compiles: it binds the arguments itself (constexprs, types, divisibility by 16, equal to 1),
as `warmup` has it do, and asks a driver that only names its target. Nothing runs, so what a launcher allocates is never
written, and a launcher that reads a result back reads noise.

Registers and spills are read from the machine code, by NVIDIA's tools that come with Triton. Instructions are counted
in the PTX as it is written, loops once: whether, not how often. All of it stays in Triton's cache: TRITON_CACHE_DIR set
to an empty folder shows a kernel's PTX, its IRs and its cubin (for `nvdisasm -c`).

Triton with TRITON_INTERPRET=1 has no compiler: run this in a process without it.
"""

import argparse
import contextlib
import functools
import importlib
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Self

from harness import processes
from harness.sass import Local, local_memory


class Chip(NamedTuple):
    """What one SM has (CUDA C++ programming guide, table of compute capabilities); all have 64 Ki registers."""

    block_shared_kib: int  # the most that one block may use
    shared_kib: int
    warps: int
    blocks: int


CHIPS = {
    80: Chip(163, 164, 64, 32),
    86: Chip(99, 100, 48, 16),
    89: Chip(99, 100, 48, 24),
    90: Chip(227, 228, 64, 32),
    100: Chip(227, 228, 64, 32),
    120: Chip(99, 100, 48, 24),
}

# Counted in PTX. A 16-byte load is either of the first two: a pipelined loop loads by cp.async.
INSTRUCTIONS = {
    "ld.global.v4": r"\bld\.global[.:\w]*\.(?:v4\.[bfu]32|v2\.[bfu]64)\b",
    "cp.async.16": r"\bcp\.async\.c[ag]\.shared[.:\w]* [^;]*, (?:0x10|16)[,;]",
    "cp.async": r"\bcp\.async\.c[ag]\.shared", "st.global.v4": r"\bst\.global[.:\w]*\.(?:v4\.[bfu]32|v2\.[bfu]64)\b",
    "mma.sync": r"\bmma\.sync\b", "wgmma": r"\bwgmma\.mma_async\b", "fma.f32": r"\bfma\.rn[.\w]*\.f32(?:x2)?\b",
    "fma.f64": r"\bfma\.rn\.f64\b", "atom": r"\b(?:atom|red)\.(?:global|[.\w]*add)", "ld.local": r"\bld\.local\b",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Launch:
    """One compiled variant of a kernel, or why there is none (`error`)."""

    kernel: str
    capability: int
    grid: tuple[int, ...] | None
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

    @property
    def blocks_per_sm(self) -> int:
        """How many blocks one SM holds: by registers (given out 256 a warp), shared memory (1 KiB is kept), warps."""
        chip = CHIPS[self.capability]
        by_registers = 65536 // (-(-self.registers * 32 // 256) * 256 * self.num_warps)
        by_shared = chip.shared_kib * 1024 // (self.shared_bytes + 1024)
        return min(by_registers, by_shared, chip.warps // self.num_warps, chip.blocks)


class AbsentGpu:
    """Triton's driver as far as compiling asks for it. A device's number is its capability: kernels are kept by it."""

    def __init__(self, capability: int) -> None:
        self.capability = capability

    def get_current_device(self) -> int:
        return self.capability

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self.capability, 32)


class Recorder:
    """Between `__enter__` and `__exit__` launches are compiled for `capability`; `launches` has each variant once."""

    def __init__(self, capability: int) -> None:
        self.capability = capability
        self.launches: list[Launch] = []
        self._seen: set[str] = set()
        self._undo = contextlib.ExitStack()

    def __enter__(self) -> "Recorder":
        from triton.runtime import driver
        from triton.runtime.jit import JITFunction

        run = JITFunction.run

        def compile_only(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
            self._record(
                kernel, functools.partial(run, kernel, *args, grid=grid, warmup=True, **options), grid, options
            )

        self._undo.callback(setattr, JITFunction, "run", run)
        self._undo.callback(driver.set_active, driver._active)
        JITFunction.run = compile_only
        driver.set_active(AbsentGpu(self.capability))
        return self

    def __exit__(self, *_: object) -> None:
        self._undo.close()

    def _record(self, kernel: Any, compiled: Callable[[], Any], grid: Any, options: dict[str, Any]) -> None:
        shape = grid if isinstance(grid, tuple) else None
        try:
            binary = compiled()
        except Exception as error:  # noqa: BLE001 - a kernel that does not compile is a finding; the next may compile
            given = {k: v for k, v in options.items() if isinstance(v, int | float | str)}
            self.launches.append(Launch(kernel.__name__, self.capability, shape, given, error=_told(error)))
            return
        if binary.hash not in self._seen:
            self._seen.add(binary.hash)
            self.launches.append(_measured(kernel, binary, self.capability, shape))


def _measured(kernel: Any, binary: Any, capability: int, grid: tuple[int, ...] | None) -> Launch:
    constants = {kernel.arg_names[path[0]]: value for path, value in binary.src.constants.items() if len(path) == 1}
    registers, local = _resources(binary.asm["cubin"], binary.metadata.name)
    return Launch(
        kernel=kernel.__name__,
        capability=capability,
        grid=grid,
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


def unavailable() -> str | None:
    """Why nothing can be compiled here, if so. Not every platform's Triton brings NVIDIA's assembler."""
    if not importlib.util.find_spec("triton"):
        return "triton is not installed"
    missing = [name for name in ("ptxas", "cuobjdump", "nvdisasm") if not os.access(_tool(name), os.X_OK)]
    return f"this platform's triton has no {', '.join(missing)}" if missing else None


@dataclass(frozen=True, slots=True)
class Compiled:
    """What a function launched for one capability, as far as it came: `error` is the launcher's own."""

    target: str
    capability: int
    launches: tuple[Launch, ...]
    error: str | None
    took_s: float


def compiled(target: str, capability: int) -> Compiled:
    """The launches of "MODULE:FUNCTION"."""
    module, _, function = target.partition(":")
    error, begin = None, time.perf_counter()
    with Recorder(capability) as recorder, contextlib.redirect_stdout(sys.stderr):  # a failed ptxas prints its input
        try:
            getattr(importlib.import_module(module), function)()
        except Exception:  # noqa: BLE001 - reported; the next function may do
            error = traceback.format_exc(limit=-4)
    return Compiled(target, capability, tuple(recorder.launches), error, time.perf_counter() - begin)


class Apart:
    """A process of its own, without the interpreter, that compiles what it is asked for; a new one where it has died.

    A context manager: with it the process ends.
    """

    def __enter__(self) -> Self:
        self._process: subprocess.Popen[str] | None = None
        self._said = tempfile.TemporaryFile("w+")
        return self

    def __exit__(self, *_: object) -> None:
        self._end()
        self._said.close()

    def compiled(self, target: str, capability: int) -> Compiled:
        """The launches of "MODULE:FUNCTION". Raises RuntimeError, with what was said, where the process ends of it."""
        process = self._process = self._process or self._started()
        assert process.stdin is not None
        assert process.stdout is not None
        print(capability, target, file=process.stdin, flush=True)
        if line := process.stdout.readline():
            return _parsed(line)
        self._end()
        self._said.seek(0)
        raise RuntimeError(f"the compiler's process ended:\n{self._said.read()[-4000:]}")

    def _started(self) -> "subprocess.Popen[str]":
        environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
        environment["PYTHONPATH"] = str(Path(__file__).parents[1])
        command = [sys.executable, "-m", "harness.triton_compile", "--asked"]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": self._said}
        return processes.start(*command, env=environment, text=True, **pipes)

    def _end(self) -> None:
        if self._process is not None:
            processes.end(self._process)
        self._process = None


def _parsed(line: str) -> Compiled:
    fields = json.loads(line)
    launches = tuple(Launch(**{**x, "grid": x["grid"] and tuple(x["grid"])}) for x in fields.pop("launches"))
    return Compiled(launches=launches, **fields)


COLUMNS = (
    "sm", "function", "kernel", "warps", "stages", "regs", "spill st/ld/loop", "smem B", "blocks/SM", "instructions",
)  # fmt: skip


def _row(function: str, x: Launch) -> tuple[str, ...]:
    constexprs = " ".join(f"{name}={value}" for name, value in x.constexprs.items())
    if x.error is not None:
        return (str(x.capability), function, x.kernel, *["-"] * 6, "DOES NOT COMPILE", constexprs)
    spills = f"{x.spill_store_bytes}/{x.spill_load_bytes}/{x.spill_loop_bytes}"
    numbers = (x.num_warps, x.num_stages, x.registers, spills, x.shared_bytes, x.blocks_per_sm)
    found = " ".join(f"{name}:{count}" for name, count in x.instructions.items() if count)
    return (str(x.capability), function, x.kernel, *map(str, numbers), found, constexprs)


def _print(everything: list[Compiled]) -> None:
    rows = [(*COLUMNS, "constexprs")]
    rows += [_row(x.target.partition(":")[2], launch) for x in everything for launch in x.launches]
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    for x in everything:
        if x.error is not None:
            print(f"\n{x.target} (sm_{x.capability}) failed:\n{x.error}")
        for launch in x.launches:
            if launch.error is not None:
                print(f"\n{launch.kernel} (sm_{x.capability}) of {x.target} does not compile:\n{launch.error}")


def main() -> int:
    parser = argparse.ArgumentParser(description="Compile what FUNCTIONs launch, for a GPU that is not here.")
    parser.add_argument("targets", nargs="*", metavar="MODULE:FUNCTION", help="modules are looked for here as well")
    parser.add_argument("--capability", default="80,90", help="compute capabilities, with commas (default 80,90)")
    parser.add_argument(
        "--asked", action="store_true", help="take lines `CAPABILITY MODULE:FUNCTION`, answer each with one of JSON"
    )
    options = parser.parse_args()
    if os.environ.get("TRITON_INTERPRET", "0") not in ("", "0"):
        parser.error("TRITON_INTERPRET is set: the interpreter does not compile")
    if reason := unavailable():
        parser.error(reason)
    sys.path.insert(0, os.getcwd())  # noqa: PTH109
    if options.asked:
        return _answer()
    capabilities = [int(number) for number in options.capability.split(",")]
    everything = [compiled(target, capability) for capability in capabilities for target in options.targets]
    _print(everything)
    return 1 if any(x.error or any(launch.error for launch in x.launches) for x in everything) else 0


def _answer() -> int:
    """Until there are no more questions. Whatever else is printed meanwhile goes to stderr."""
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)
        for line in sys.stdin:
            capability, target = line.split()
            print(json.dumps(asdict(compiled(target, int(capability)))), file=answers, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
