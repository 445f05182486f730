# pyright: reportUnusedImport=false
"""What computes a runner's model: the table of kinds, a module for each, and what serving takes of memory."""

from weft_runner.executors.source import ModelSource
from weft_runner.executors.table import (
    ExecutorKind,
    make_executor,
    make_rank,
    require_torch,
    settle_executor,
    settle_kv_pages,
    settle_limits,
)
