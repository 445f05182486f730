"""Names of `drive.engine` under their former module."""

from weft_bench.drive.engine import Batch, paired

__all__ = ["Batch", "paired"]
