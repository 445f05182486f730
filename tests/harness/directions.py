"""Every direction of every contract, by its codec's module and its name in it."""

from collections.abc import Mapping
from typing import Any

from weft.wire.codec import batch, cluster, kv_transfer, prediction, registry, scheduling, session

CODEC = {module.__name__.rpartition(".")[2]: module for module in (
    batch, cluster, kv_transfer, prediction, registry, scheduling, session,
)}  # fmt: skip
DIRECTIONS: Mapping[str, Any] = {
    f"{short}.{name}": value
    for short, module in CODEC.items()
    for name, value in vars(module).items()
    if hasattr(value, "envelope") and not isinstance(value, type)
}
