# pyright: basic, reportArgumentType=false, reportAttributeAccessIssue=false
"""Kernels compiled where no GPU is: Triton's compiler asks a driver that only names its target.

What was compiled lies in `CARRIED`, beside the kernels, in the form of Triton's cache, whose key is Triton itself, the
kernels' source, the target and the options. There Triton looks for what its own cache does not have.
"""

import contextlib
import functools
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

from triton import knobs
from triton.runtime.cache import FileCacheManager

CARRIED = Path(__file__).parent / "carried"
# of a kernel, what compiles it, and its launch's options
Compiled = Callable[[Any, Callable[[], Any], dict[str, Any]], object]


class AbsentGpu:
    """Triton's driver as far as compiling asks for it. A device's number is its capability: kernels are kept by it."""

    def __init__(self, capability: int) -> None:
        self.capability = capability

    def get_current_device(self) -> int:
        return self.capability

    def get_current_stream(self, device: int) -> int:
        del device
        return 0

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self.capability, 32)


@contextlib.contextmanager
def compiling(capability: int, launched: Compiled = lambda _, binary, __: binary()) -> Generator[None]:
    """Compile in place of each launch, or hand over what would. Nothing is launched."""
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    run, active = JITFunction.run, driver._active

    def compile_only(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        del warmup
        launched(kernel, functools.partial(run, kernel, *args, grid=grid, warmup=True, **options), options)

    JITFunction.run = compile_only
    driver.set_active(AbsentGpu(capability))
    try:
        yield
    finally:
        JITFunction.run = run
        driver.set_active(active)


class CarriedCache(FileCacheManager):
    """Triton's cache, and behind it the carried one, wherever that lies now."""

    def get_file(self, filename: str) -> str | None:
        carried = CARRIED / self.key / filename
        return super().get_file(filename) or (str(carried) if carried.exists() else None)

    def get_group(self, filename: str) -> dict[str, str] | None:
        if (found := super().get_group(filename)) is not None:
            return found
        folder = CARRIED / self.key
        if not (folder / f"__grp__{filename}").exists():
            return None
        return {path.name: str(path) for path in folder.iterdir() if not path.name.startswith("__grp__")}


def use_carried() -> None:
    """Have Triton look for compiled kernels there from now on, if anything is there."""
    if CARRIED.is_dir():
        knobs.cache.manager_class = CarriedCache


def carry(folder: Path = CARRIED) -> None:
    """Keep what this process compiles there, machine code alone."""
    knobs.cache.dir, knobs.compilation.store_binary_only = str(folder), True
