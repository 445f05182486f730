"""What a machine can do, as a runner measures it at start: the constants of FlexGen's cost model (section 4.2).

Products are tables instead of one rate: seconds for each number of the matrices by rows, because one row is bound by
bytes and many by arithmetic; what a layer does beside products and attention is in them. Between two entries time is
on the line from one to the other; beyond the last one each further row costs what it does between the last two.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from weft_runner.errors import MachineInvalid

Table = tuple[tuple[int, float], ...]  # (rows, seconds for each number of a matrix), rows ascending
MIN_RATE, MAX_RATE = 1e3, 1e16  # bytes or operations a second
MAX_TABLE_ENTRIES = 64
MIN_SPARSE_GAIN = 1.1  # of sparse attention, which is paid with accuracy


@dataclass(frozen=True, slots=True)
class MachineRates:
    """Rates in bytes a second, but `attention_flops_per_s`. `products`: by the format of the weights.

    `one_memory`: device and host are the same memory: nothing is copied between them, and all of it is the device.
    `overlap`: the share of the shorter streams that runs beside the longest one; 1 is FlexGen's assumption. `duplex`:
    the same of reading and writing a disk. `request_s`: that a request takes of the disk beside its bytes, where many
    are under way. `sparse_attention`: of KV, by decode rows that attend to their best keys; 0: not measured.
    """

    disk_read: float
    disk_write: float
    to_device: float
    to_host: float
    memory_read: float
    attention: float  # of KV, by decode rows
    host_attention: float  # the same on the host, delegated
    attention_flops_per_s: float  # of prompts
    products: Mapping[str, Table]
    one_memory: bool = True
    overlap: float = 1.0
    duplex: float = 1.0
    request_s: float = 0.0
    sparse_attention: float = 0.0

    @property
    def sparse_pays(self) -> bool:
        """Attention to the best keys is faster than to all, by more than measurements differ."""
        return self.sparse_attention > MIN_SPARSE_GAIN * self.attention


RATES = (
    "disk_read", "disk_write", "to_device", "to_host", "memory_read", "attention", "host_attention",
    "attention_flops_per_s",
)  # fmt: skip


def product_s(table: Table, rows: float) -> float:
    """Seconds for each number of a matrix that `rows` rows are multiplied with."""
    if len(table) == 1 or rows <= table[0][0]:
        return table[0][1] * max(1.0, rows / table[0][0])
    low, high = next(((a, b) for a, b in pairwise(table) if rows <= b[0]), table[-2:])
    return low[1] + (high[1] - low[1]) * (rows - low[0]) / (high[0] - low[0])


def check_machine(machine: MachineRates) -> None:
    """Check every rate and table. Raises MachineInvalid: a rate that is none, a table that falls or has no entry."""
    for name in RATES:
        rate = getattr(machine, name)
        if not isinstance(rate, int | float) or not math.isfinite(rate) or not MIN_RATE <= rate <= MAX_RATE:
            raise MachineInvalid(f"{name} is {rate!r}, not from {MIN_RATE:g} to {MAX_RATE:g} a second")
    for name in ("overlap", "duplex", "request_s"):
        if not isinstance(share := getattr(machine, name), int | float) or not 0.0 <= share <= 1.0:
            raise MachineInvalid(f"{name} is {share!r}, not from 0 to 1")
    if machine.sparse_attention and not MIN_RATE <= machine.sparse_attention <= MAX_RATE:
        raise MachineInvalid(f"sparse_attention is {machine.sparse_attention!r}, not from {MIN_RATE:g} a second")
    if not machine.products:
        raise MachineInvalid("products has no format of weights")
    for name, table in machine.products.items():
        if not 1 <= len(table) <= MAX_TABLE_ENTRIES or not all(rows >= 1 and 0 < s < 1 for rows, s in table):
            raise MachineInvalid(f"products[{name}] is no table of 1 to {MAX_TABLE_ENTRIES} (rows, seconds)")
        if any(a[0] >= b[0] or a[1] > b[1] for a, b in pairwise(table)):
            raise MachineInvalid(f"products[{name}]: rows do not ascend, or more rows take less time")


def rising(measured: Mapping[int, float]) -> Table:
    """A table of measured times: what a smaller number of rows took longer than a larger one was noise, and falls."""
    rows, least, found = sorted(measured, reverse=True), math.inf, list[tuple[int, float]]()
    for n in rows:
        least = min(least, measured[n])
        found.append((n, least))
    return tuple(reversed(found))


def machine_of(fields: Mapping[str, Any]) -> MachineRates:
    """Read `asdict`'s form. Raises MachineInvalid, with the names of what is missing or unknown."""
    known = {*MachineRates.__dataclass_fields__}
    if unknown := sorted(set(fields) - known):
        raise MachineInvalid(f"unknown: {', '.join(map(str, unknown))[:200]}")
    if missing := sorted({*RATES, "products"} - set(fields)):
        raise MachineInvalid(f"missing: {', '.join(missing)}")
    try:
        products = {
            str(name): tuple((int(n), float(s)) for n, s in table) for name, table in fields["products"].items()
        }
    except (AttributeError, TypeError, ValueError) as error:
        raise MachineInvalid(f"products: {error}") from error
    values: dict[str, Any] = {**fields, "products": products}
    machine = MachineRates(**values)
    check_machine(machine)
    return machine
