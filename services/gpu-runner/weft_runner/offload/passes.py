"""What one pass should take by the cost model, from what it had: rows come and go, so that few are full blocks. Pure.

    T_pass = max(disk, host to device, compute)      FlexGen, section 4.2, of what this pass moved and computed

Streams that do not overlap fully add that part of their sum, as in `costs`. KV of the pages that are on the disk, and
the activations there, are read and written, KV on a GPU's host is copied; the rest is on the device.
"""

from dataclasses import dataclass

from weft_runner.offload.machine import MachineRates, product_s
from weft_runner.offload.plan import PassTime
from weft_runner.offload.policy import WeightsFormat
from weft_runner.offload.sizes import ModelSizes


@dataclass(frozen=True, slots=True)
class WeightPlacement:
    """How an executor has its weights: bytes that come from the disk and from the host in each pass, the rest stays.

    `head_bytes`: of those from the disk, what only a pass that samples reads. `batch_tokens`: of a device batch.
    `buffers`: of the largest streamed layer; with one nothing is read meanwhile. `gathers`: rows of the embedding come
    from the disk. `sparse`: attention is to the best keys.
    """

    weights: WeightsFormat
    disk_bytes: int
    host_bytes: int = 0
    head_bytes: int = 0
    batch_tokens: int = 256
    buffers: int = 2
    gathers: bool = False
    sparse: bool = False


@dataclass(frozen=True, slots=True)
class PassWork:
    """Work of one pass: `tokens` rows, of which `sampled` go through the head.

    `keys`: tokens in KV that rows of one token attend to, summed. `pairs`: of queries and keys of all other rows.
    `adapter_bytes`: of the distinct adapters of its rows. `read_bytes`, `written_bytes`: beside weights, from and to
    the disk, for KV in `reads` and `writes` requests; `loaded_bytes`, `stored_bytes`: of KV, from and to the host.
    """

    tokens: int
    sampled: int
    keys: float = 0.0
    pairs: float = 0.0
    adapter_bytes: int = 0
    read_bytes: int = 0
    written_bytes: int = 0
    reads: int = 0
    writes: int = 0
    loaded_bytes: int = 0
    stored_bytes: int = 0


def predict_pass(work: PassWork, placement: WeightPlacement, sizes: ModelSizes, machine: MachineRates) -> PassTime:
    """Seconds of each stream and of the pass. `sizes`: of the layers that are here, in the placement's format."""
    table = machine.products[placement.weights]
    whole, rest = divmod(work.tokens, placement.batch_tokens)
    each = whole * product_s(table, placement.batch_tokens) + (product_s(table, rest) if rest else 0.0)
    batches = whole + bool(rest)
    compute = (
        sizes.layers * sum(sizes.numbers) * each
        + (sizes.head_numbers * product_s(table, work.sampled) if work.sampled else 0.0)
        + work.keys * sizes.kv_token / ((placement.sparse and machine.sparse_attention) or machine.attention)
        + work.pairs * 4 * sizes.q_size * sizes.layers / machine.attention_flops_per_s
        + batches * work.adapter_bytes / machine.memory_read
        + (gathered := work.tokens * machine.request_s * placement.gathers)
    )
    disk_bytes = placement.disk_bytes - (0 if work.sampled else placement.head_bytes)
    read = (disk_bytes + work.read_bytes) / machine.disk_read + work.reads * machine.request_s + gathered
    write = work.written_bytes / machine.disk_write + work.writes * machine.request_s
    copy, back = 0.0, work.stored_bytes / machine.to_host
    if not machine.one_memory:
        copy = (disk_bytes + placement.host_bytes + work.loaded_bytes) / machine.to_device
    overlap = machine.overlap if placement.buffers > 1 else 0.0
    disk = max(read, write) + (1.0 - machine.duplex) * min(read, write)
    pass_s = overlap * max(disk, copy, back, compute) + (1.0 - overlap) * (read + copy + back + write + compute)
    return PassTime(read, copy, back, write, compute, pass_s)
