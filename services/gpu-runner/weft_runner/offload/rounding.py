"""From shares to what an executor can do: whole matrices, whole sequences of KV, activations on one tier. Pure.

Which matrices are resident is chosen among `residents`: matrices of some kinds in all layers, and of one more kind in
some of them, spread evenly, with or without the head. So layers that stream are alike, and the ring, which holds the
largest of them once or twice, stays small. What fits is searched in a list that does not depend on the budgets: a
larger budget only adds to what can be chosen, so that it never makes a prediction worse.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import combinations

from weft_runner.offload.costs import Case, Linear, OffDeviceShares, memory, phase, prompt_streams, token_streams
from weft_runner.offload.plan import MATRICES, BlockTime, OffloadPlan, Usage, WeightTiers
from weft_runner.offload.policy import Budgets, MemoryTier, Policy, Shares
from weft_runner.offload.sizes import WeightShape

QUARTERS = 4  # KV of a block is split between tiers in such parts
MAX_RESIDENTS = 16  # that are tried for each split where there is a host tier
Counts = tuple[int, int, int, int]


@dataclass(frozen=True, slots=True)
class Supports:
    """What an executor can put where, beside weights, which can lie on every tier: by default the cpu executor."""

    kv: tuple[MemoryTier, ...] = tuple(MemoryTier)
    activations: tuple[MemoryTier, ...] = tuple(MemoryTier)


ON_GPU = Supports((MemoryTier.DEVICE, MemoryTier.HOST), (MemoryTier.DEVICE, MemoryTier.HOST))  # cuda executor
EVERYTHING = Supports()


@dataclass(frozen=True, slots=True)
class Resident:
    """`counts`: layers whose matrix of a kind is on the device. `ring`: bytes for the others on their way."""

    counts: Counts
    head: bool
    bytes: int
    ring: int

    @property
    def device_bytes(self) -> int:
        """Bytes on the device."""
        return self.bytes + self.ring


@dataclass(frozen=True, slots=True)
class Rounded:
    """A policy that an executor can do, what it takes of each tier, and how fast it should be."""

    outside: OffDeviceShares
    resident: Resident
    host_counts: Counts
    head: MemoryTier
    activations: MemoryTier
    kv_device: int
    kv_host: int
    usage: dict[MemoryTier, Usage]
    prediction: BlockTime


@lru_cache(maxsize=64)
def residents(sizes: WeightShape, buffers: int) -> tuple[Resident, ...]:
    """In order of `device_bytes`, each with more on the device than the one before: the others are never the best."""
    best: list[Resident] = []
    for one in sorted(every_resident(sizes, buffers), key=lambda one: (one.device_bytes, -one.bytes)):
        if not best or one.bytes > best[-1].bytes:
            best.append(one)
    return tuple(best)


def every_resident(sizes: WeightShape, buffers: int) -> Iterator[Resident]:
    """Yield every choice of what may stay."""
    for counts in dict.fromkeys(_counts(sizes.layers)):
        for head in (False, True) if sizes.head else (True,):
            yield _resident(sizes, buffers, counts, head=head)


def _counts(layers: int) -> Iterator[Counts]:
    kinds = range(len(MATRICES))
    for n in range(len(MATRICES)):
        for whole in combinations(kinds, n):
            for part in set(kinds) - set(whole):
                for some in range(layers + 1):
                    q, o, g, d = (layers if k in whole else some if k == part else 0 for k in kinds)
                    yield q, o, g, d


def _resident(sizes: WeightShape, buffers: int, counts: Counts, *, head: bool) -> Resident:
    on_device = sum(n * size for n, size in zip(counts, sizes.matrices, strict=True)) + (sizes.head if head else 0)
    return Resident(counts, head, on_device, buffers * _largest(sizes, counts, head=head))


def _largest(sizes: WeightShape, counts: Counts, *, head: bool) -> int:
    """Bytes of the largest layer that is not on the device, or panel of the head. At most one kind is in part of the
    layers, so that some layer lacks every kind that is not in all.
    """
    streamed = sum(size for n, size in zip(counts, sizes.matrices, strict=True) if n < sizes.layers)
    return max(streamed, 0 if head else sizes.panel)


def spread(n: int, places: Sequence[int]) -> set[int]:
    """`n` of these places, evenly: between two of them as many others as between any two, but for one."""
    return {places[i * len(places) // n] for i in range(n)}


def resident_layers(layers: int, counts: Counts) -> list[tuple[bool, ...]]:
    """Return for each layer which of its matrices stay."""
    columns = [spread(n, range(layers)) if n else set[int]() for n in counts]
    return [tuple(layer in column for column in columns) for layer in range(layers)]


def weight_tiers(sizes: WeightShape, counts: Counts, host_counts: Counts, head: MemoryTier) -> WeightTiers:
    """Return the tier of each layer's matrices. `counts`: on the device."""
    columns: list[list[MemoryTier]] = []
    for n, on_host in zip(counts, host_counts, strict=True):
        column = [MemoryTier.DISK] * sizes.layers
        for i in spread(n, range(sizes.layers)) if n else ():
            column[i] = MemoryTier.DEVICE
        for i in spread(on_host, [i for i, tier in enumerate(column) if tier is MemoryTier.DISK]) if on_host else ():
            column[i] = MemoryTier.HOST
        columns.append(column)
    layers = tuple((q, o, g, d) for q, o, g, d in zip(*columns, strict=True))
    return WeightTiers(layers, head if sizes.head else None)


def round_case(case: Case, budgets: Budgets, supports: Supports, best_s: float = float("inf")) -> Rounded | None:
    """The fastest policy of this case that an executor can do; None if none fits, or none is below `best_s`."""
    alone = replace(case, block=1, batch=1, passes=1)
    streams, parts = (prompt_streams(case), token_streams(case), token_streams(alone)), memory(case)
    found: Rounded | None = None
    for kv_device, kv_host, activations in _splits(case, supports):
        for resident in _fitting(case, budgets, parts, kv_device, kv_host, activations):
            rounded = _rounded(case, budgets, parts, streams, resident, kv_device, kv_host, activations)
            if rounded is not None and rounded.prediction.block_s < best_s:
                found, best_s = rounded, rounded.prediction.block_s
    return found


def _splits(case: Case, supports: Supports) -> Iterator[tuple[int, int, MemoryTier]]:
    """Yield splits to try: sequences with KV on the device, those with KV on the host, and the tier of activations."""
    tiers = [tier for tier in MemoryTier if not (case.machine.one_memory and tier is MemoryTier.HOST)]
    steps = sorted({case.block * i // QUARTERS for i in range(QUARTERS + 1)})
    seen = {
        (kv_device, kv_host)
        for kv_device in (steps if MemoryTier.DEVICE in supports.kv else (0,))
        for kv_host in (steps if MemoryTier.HOST in supports.kv and MemoryTier.HOST in tiers else (0,))
        if kv_device + kv_host == case.block or (kv_device + kv_host < case.block and MemoryTier.DISK in supports.kv)
    }
    for kv_device, kv_host in sorted(seen, reverse=True):
        for activations in tiers:
            if activations in supports.activations:
                yield kv_device, kv_host, activations


def _fitting(
    case: Case,
    budgets: Budgets,
    parts: dict[MemoryTier, dict[str, Linear]],
    kv_device: int,
    kv_host: int,
    activations: MemoryTier,
) -> Sequence[Resident]:
    """Return the residents that fit the device.

    In one memory the largest is the best; else what goes to the host decides too.
    """
    beside = _beside(parts, _outside(case, kv_device, kv_host, activations), MemoryTier.DEVICE)
    every = residents(case.sizes, case.buffers)
    fitting = [one for one in every if one.device_bytes + beside.total <= budgets.device_bytes]
    if case.machine.one_memory:
        return fitting[-1:]
    step = max(1, len(every) // MAX_RESIDENTS)
    return [one for i, one in enumerate(fitting) if i % step == 0 or one is every[-1]]


def _outside(case: Case, kv_device: int, kv_host: int, activations: MemoryTier) -> OffDeviceShares:
    block = case.block
    return OffDeviceShares(
        activations_host=float(activations is MemoryTier.HOST),
        activations_disk=float(activations is MemoryTier.DISK),
        kv_host=kv_host / block,
        kv_disk=(block - kv_device - kv_host) / block,
    )


def _beside(parts: dict[MemoryTier, dict[str, Linear]], outside: OffDeviceShares, tier: MemoryTier) -> Usage:
    """What a tier has beside weights and their buffers. Buffers of KV are whole where any of it is outside."""
    elsewhere = outside.kv_host + outside.kv_disk
    whole = OffDeviceShares(
        activations_host=outside.activations_host,
        activations_disk=outside.activations_disk,
        kv_host=outside.kv_host / elsewhere if elsewhere else 0.0,
        kv_disk=outside.kv_disk / elsewhere if elsewhere else 0.0,
    )
    found = {name: _up(part.at(whole if name == "workspace" else outside)) for name, part in parts[tier].items()}
    return Usage(**{name: size for name, size in found.items() if name not in ("weights", "ring")})


def _rounded(
    case: Case, budgets: Budgets, parts: dict[MemoryTier, dict[str, Linear]], streams: tuple[tuple[Linear, ...], ...],
    resident: Resident, kv_device: int, kv_host: int, activations: MemoryTier,
) -> Rounded | None:  # fmt: skip
    """None if the host or the disk is too small."""
    sizes, outside = case.sizes, _outside(case, kv_device, kv_host, activations)
    on_host, on_disk = (_beside(parts, outside, tier) for tier in (MemoryTier.HOST, MemoryTier.DISK))
    left = sizes.weights - resident.bytes
    if case.machine.one_memory:
        part = HostPart((0, 0, 0, 0), head=False, bytes=0, staging=0)
    elif (part := host_part(sizes, resident, left, budgets.host_bytes - on_host.total)) is None:
        return None
    host_counts, host_bytes, staging = part.counts, part.bytes, part.staging
    disk_bytes = left - host_bytes
    usage = {
        MemoryTier.DEVICE: _with(_beside(parts, outside, MemoryTier.DEVICE), resident.bytes, ring=resident.ring),
        MemoryTier.HOST: _with(on_host, host_bytes, ring=staging),
        MemoryTier.DISK: _with(on_disk, sizes.file),
    }
    if any(usage[tier].total > budgets.of(tier) for tier in MemoryTier):
        return None
    whole = OffDeviceShares(
        host_bytes / sizes.weights, disk_bytes / sizes.weights, outside.activations_host, outside.activations_disk,
        outside.kv_host, outside.kv_disk,
    )  # fmt: skip
    head = MemoryTier.DEVICE if resident.head else MemoryTier.HOST if part.head else MemoryTier.DISK
    predicted = predict(case, streams, whole)
    return Rounded(whole, resident, host_counts, head, activations, kv_device, kv_host, usage, predicted)


@dataclass(frozen=True, slots=True)
class HostPart:
    """What lies on the host of the matrices that are not on the device. `staging`: bytes for others on their way."""

    counts: Counts
    head: bool
    bytes: int
    staging: int


def host_part(sizes: WeightShape, resident: Resident, left: int, free_bytes: int) -> HostPart | None:
    """Return how much of the `left` off-device bytes lies in `free_bytes` of the host.

    None if nothing remains to stage what is read from the disk.
    """
    if free_bytes < 0:
        return None
    counts, head, n_bytes = _on_host(sizes, resident, free_bytes)
    if n_bytes == left:
        return HostPart(counts, head, n_bytes, 0)
    if resident.ring > free_bytes:
        return None
    return HostPart(*_on_host(sizes, resident, free_bytes - resident.ring), staging=resident.ring)


def _on_host(sizes: WeightShape, resident: Resident, free_bytes: int) -> tuple[Counts, bool, int]:
    """Return how many matrices of each kind fit, the large ones first: more memory never holds fewer bytes."""
    counts, left = [0, 0, 0, 0], free_bytes
    for kind in sorted(range(len(MATRICES)), key=lambda kind: -sizes.matrices[kind]):
        size = sizes.matrices[kind]
        counts[kind] = min(sizes.layers - resident.counts[kind], left // size)
        left -= counts[kind] * size
    head = not resident.head and sizes.head <= left
    q, o, g, d = counts
    return (q, o, g, d), head, free_bytes - left + (sizes.head if head else 0)


def _with(usage: Usage, weights: int, ring: int = 0) -> Usage:
    return Usage(weights, usage.kv, usage.activations, usage.adapters, ring, usage.workspace)


def predict(case: Case, streams: tuple[tuple[Linear, ...], ...], outside: OffDeviceShares) -> BlockTime:
    """FlexGen's T of a block, and tokens a second. `streams`: of prompts, of tokens, and of one request's tokens.

    `token_1_s`: of a request alone, whose stream of weights decides.
    """
    tokens = case.work.output
    prompt = phase(case, streams[0], outside, case.passes)
    token = phase(case, streams[1], outside)
    block_s = prompt.pass_s + (tokens - 1) * token.pass_s
    bound_s = max(prompt.disk_read_s + (tokens - 1) * token.disk_read_s,
                  prompt.compute_s + (tokens - 1) * token.compute_s)  # fmt: skip
    token_1 = phase(case, streams[2], OffDeviceShares(outside.weights_host, outside.weights_disk))
    return BlockTime(prompt, token, block_s, bound_s, case.block * tokens / block_s, token_1.pass_s)


def plan_from(case: Case, budgets: Budgets, rounded: Rounded, relaxed_s: float) -> OffloadPlan:
    """Return the plan that the executor obeys."""
    outside, block = rounded.outside, case.block
    device = max(0.0, 1 - outside.weights_host - outside.weights_disk)
    policy = Policy(
        block,
        case.batch,
        weights=Shares(device, outside.weights_host, outside.weights_disk),
        activations=Shares.of({rounded.activations: 1.0}),
        kv=Shares(rounded.kv_device / block, outside.kv_host, outside.kv_disk),
    )
    tiers = weight_tiers(case.sizes, rounded.resident.counts, rounded.host_counts, rounded.head)
    return OffloadPlan(
        policy, case.formats, budgets, tiers, rounded.activations, rounded.kv_device, rounded.kv_host,
        case.passes, case.tokens, case.buffers, rounded.usage, rounded.prediction, relaxed_s,
    )  # fmt: skip


def _up(number: float) -> int:
    return -int(-number // 1)
