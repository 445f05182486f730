# pyright: basic, reportAttributeAccessIssue=false
"""Launches of compiled kernels without what Triton does at each: binding, keys made of text, a look at each global.

Triton itself finds what is compiled for a launch, the first time that its arguments are of that kind: it compiles
pointers that are multiples of 16 apart from others, and integers that are 1, multiples of 16 or neither. Later ones
call the compiled kernel. Kinds tell at least as much apart as Triton does, whatever a kernel wants specialised, so that
none gets a kernel that Triton would not give it.

A kernel's constants, launch options and globals hold from its first launch on. Under the interpreter, in `compiling`
and with hooks on launches every launch is Triton's own.
"""

from collections.abc import Callable, Iterable
from functools import cache, partial
from typing import Any

from torch import Tensor
from triton import knobs
from triton.runtime import driver
from triton.runtime.jit import JITFunction

_ALIGNED = 16
_INT32 = range(-(2**31), 2**31)  # beyond, Triton passes another type

Argument = Tensor | float | None
Grid = tuple[int, int, int]
Launch = Callable[..., None]  # of arguments of the same shapes, whatever the layer


class Arguments:
    """Neighbouring arguments that stay from launch to launch: their kinds are found once. Tensors do not move."""

    __slots__ = ("kinds", "own", "values")

    def __init__(self, *own: Argument) -> None:
        self.own = own
        self.kinds, self.values = _kinds_and_values(own)


class PreparedKernel:
    """A kernel with its constants, which are its last parameters, and its options."""

    def __init__(self, kernel: Any, **constants: object) -> None:
        self._kernel, self._constants = kernel, constants
        names = [name for name in kernel.arg_names if name in constants]
        assert names == kernel.arg_names[len(kernel.arg_names) - len(names) :], (names, kernel.arg_names)
        self._last = tuple(constants[name] for name in names)
        self._is_compiled = isinstance(kernel, JITFunction)  # else interpreted
        self._compiled: dict[tuple[object, ...], Any] = {}  # by device and kinds

    def bound(self, grid: Grid, *own: Argument) -> Launch:
        """Bind the first arguments, which stay: what launches it with the others."""
        return partial(self, grid, Arguments(*own))

    def __call__(self, grid: Grid, *args: Argument | Arguments) -> None:
        """Launch it. Tensors are the device's: after the first launch of a kind only their addresses are looked at."""
        if not self._is_compiled or knobs.runtime.launch_enter_hook.calls or knobs.runtime.launch_exit_hook.calls:
            self._by_triton(grid, args)
            return
        gpu = driver.active
        kinds, values = _kinds_and_values(args)
        found = self._compiled.get(key := (device := gpu.get_current_device(), *kinds))
        if found is None:
            self._compiled[key] = self._by_triton(grid, args)
            return
        stream, metadata = gpu.get_current_stream(device), found.packed_metadata
        found.run(*grid, stream, found.function, metadata, None, None, None, *values, *self._last)

    def _by_triton(self, grid: Grid, args: Iterable[Argument | Arguments]) -> Any:
        """Launch it as Triton does; returns what was compiled, None where something else than a launch was done."""
        every = [one for arg in args for one in (arg.own if isinstance(arg, Arguments) else (arg,))]
        return self._kernel[grid](*every, **self._constants)


@cache
def prepared(kernel: Any, **constants: object) -> PreparedKernel:
    """Prepare a kernel with these constants, once."""
    return PreparedKernel(kernel, **constants)


def next_power_of_2(n: int) -> int:
    """The least power of 2 that is not below n >= 1. Triton's own, which kernels call too, takes the host 2 us."""
    return 1 << (n - 1).bit_length()


def cdiv(a: int, b: int) -> int:
    """The quotient a / b, rounded up, as quickly."""
    return -(-a // b)


def _kinds_and_values(args: Iterable[Any]) -> tuple[list[object], list[object]]:
    """Split arguments into their kinds, as a key, and what is passed on: the addresses of tensors."""
    kinds: list[object] = []
    values: list[object] = []
    for arg in args:
        if (kind := arg.__class__) is Tensor:
            values.append(address := arg.data_ptr())
            kinds.append((arg.dtype,) if address % _ALIGNED else arg.dtype)
        elif kind is Arguments:
            values += arg.values
            kinds += arg.kinds
        elif kind is int:
            values.append(arg)
            kinds.append((arg,) if arg == 1 or arg not in _INT32 else arg % _ALIGNED == 0)
        else:
            assert arg is None or kind is float, arg
            values.append(arg)
            kinds.append(kind)
    return kinds, values
