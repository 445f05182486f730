"""Names of `drive.engine` under their former module."""

from collections.abc import Callable
from contextlib import AbstractContextManager

from weft_bench.drive.engine import WEIGHT_BYTES, adapter_pages

__all__ = ["WEIGHT_BYTES", "Bar", "adapter_pages"]
Bar = Callable[[str, int], AbstractContextManager[Callable[[int], None]]]  # label, length -> advance
