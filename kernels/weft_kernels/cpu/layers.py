"""`LayerCounter`: which layers of a running step are complete, for threads beside it."""

import ctypes


class LayerCounter:
    """Counts the layers that the steps given its `address` as `layers_done` have completed, one after the other.

    Let it be n before a step. Once it is n + k, every thread of this process may read the keys and values of the first
    k layers that this step ran: they were written before the count was raised (release), and `count` and `wait_for`
    read it before they return (acquire). It says nothing of `hidden`, nor of pages that another step writes. The step
    takes no GIL to raise it.
    """

    def __init__(self, native: ctypes.CDLL) -> None:
        self._native, self._value = native, ctypes.c_int64(0)
        self.address = ctypes.addressof(self._value)

    @property
    def count(self) -> int:
        """The number of layers that are complete. Any thread."""
        return self._native.weft_layers_done(self.address)

    def wait_for(self, count: int, timeout_s: float) -> bool:
        """Wait until `count` layers are complete, at most `timeout_s`; returns whether they are. Any thread; the GIL is
        free meanwhile."""
        return self._native.weft_await_layers(self.address, count, int(timeout_s * 1e6)) >= count
