"""What a policy takes of time and of each tier: FlexGen's cost model (section 4.2 and appendix A.3), for our shapes.

    T = T_prompt + (n - 1) T_token          for prompts of s tokens and answers of n
    T_pass = max(disk, host to device, device to host, compute)

The disk reads and writes; `MachineRates.duplex` of the shorter of the two is beside the other. The paper writes T_pre
and T_gen of one layer and multiplies them with l; here they are of a whole pass, so that the head counts as well.
Streams that do not overlap fully (`MachineRates.overlap` below 1) add that part of their sum. KV of a token pass has
its average length, s + n/2. The paper leaves out what is added here: adapters of all rows of a block, products by
measured tables instead of one rate, prompts in several passes, what each request takes of the disk.

**Every amount is linear** in the six unknowns (`OffDeviceShares`): shares of weights, activations and KV that lie on
the host and on the disk; what is left is on the device. So the linear program and the prediction of a rounded policy
are the same coefficients.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

from weft.domain.model.packed import round_up
from weft_runner.offload.machine import MachineRates, product_s
from weft_runner.offload.plan import PassTime, kv_buffers
from weft_runner.offload.policy import Formats, MemoryTier
from weft_runner.offload.sizes import ALIGN, BOUNCE, BOUNCE_THREADS, SLACK_ROWS, ModelSizes


@dataclass(frozen=True, slots=True)
class BlockWork:
    """What a block is: `prompt` and `output` tokens of each sequence, `adapters` of `adapter_rank` among them all.

    `batch_tokens`: of a device batch, at most. `in_flight`: blocks at a time, one for each host of a pipeline.
    `pages`: KV pages on the device, for sequences and adapters, if they are set; 0: as many as a block needs.
    `table_bytes`: on the device for each sequence, beside its KV.
    """

    prompt: int
    output: int
    adapters: int = 0
    adapter_rank: int = 0
    batch_tokens: int = 512
    page_tokens: int = 16
    in_flight: int = 1
    pages: int = 0
    table_bytes: int = 0


class OffDeviceShares(NamedTuple):
    """Shares that are not on the device. A tuple, because every amount of a search is computed from all of them."""

    weights_host: float = 0.0
    weights_disk: float = 0.0
    activations_host: float = 0.0
    activations_disk: float = 0.0
    kv_host: float = 0.0
    kv_disk: float = 0.0


UNKNOWNS = OffDeviceShares._fields


@dataclass(frozen=True, slots=True)
class Linear:
    """`constant` and a coefficient for each of UNKNOWNS."""

    constant: float = 0.0
    of: tuple[float, ...] = (0.0,) * len(UNKNOWNS)

    def at(self, outside: OffDeviceShares) -> float:
        """The form's value at these shares."""
        return self.constant + sum(a * x for a, x in zip(self.of, outside, strict=True))

    def plus(self, other: "Linear", times: float) -> "Linear":
        """Return the sum of this form and `times` the other."""
        of = tuple(a + times * b for a, b in zip(self.of, other.of, strict=True))
        return Linear(self.constant + times * other.constant, of)


def linear(constant: float = 0.0, **of: float) -> Linear:
    """Coefficients by name; 0 if none is given."""
    return Linear(constant, tuple(of.get(name, 0.0) for name in UNKNOWNS))


@dataclass(frozen=True, slots=True)
class Case:
    """One linear program: everything but the six unknowns. `passes`: over the layers, for the prompts of a block.

    `buffers`: of the largest streamed layer. With one, nothing is read while a layer computes.
    """

    sizes: ModelSizes
    machine: MachineRates
    formats: Formats
    work: BlockWork
    block: int
    batch: int
    passes: int = 1
    buffers: int = 2

    @property
    def overlap(self) -> float:
        """The share of the shorter streams that runs beside the longest."""
        return self.machine.overlap if self.buffers > 1 else 0.0

    @property
    def tokens(self) -> int:
        """Most tokens of a device batch."""
        prompts = min(self.batch * self.work.prompt, self.pass_rows, max(self.work.batch_tokens, 1))
        return max(self.batch, prompts)

    @property
    def sequence_kv(self) -> float:
        """Bytes of whole pages for a sequence at its end."""
        tokens = round_up(self.work.prompt + self.work.output, self.work.page_tokens)
        return tokens * self.sizes.kv_token

    @property
    def adapters(self) -> int:
        """Distinct ones of a block."""
        return min(self.block, self.work.adapters)

    @property
    def within_pages(self) -> bool:
        """Blocks and their adapters need no more pages than are set. One sequence may be shorter than the work's."""
        work, taken = self.work, self.work.in_flight * self.block * self.sequence_kv
        return not work.pages or self.block == 1 or taken + self.adapter_bytes <= self.set_kv

    @property
    def adapter_bytes(self) -> int:
        """Bytes of the distinct adapters of all blocks in flight, which all are on the device."""
        return min(self.block * self.work.in_flight, self.work.adapters) * self.sizes.adapter

    @property
    def set_kv(self) -> float:
        """Bytes of the pages that are set."""
        return self.work.pages * self.work.page_tokens * self.sizes.kv_token

    def passing_hidden(self, rows: float) -> float:
        """Bytes of the hidden rows of a pass that leave the device and come back where activations are elsewhere.

        None if the buffers hold all of them. The first layer begins with embeddings, the last one's are used there.
        """
        if rows <= self.buffers * self.tokens:
            return 0.0
        return rows * self.sizes.hidden_row * (self.sizes.layers - 1)

    @property
    def early_steps(self) -> float:
        """Tokens of a sequence, on average, that are computed in passes with later sequences' prompts."""
        passes, steps = self.passes, self.work.output - 1
        return (passes - 1) / 2 if passes <= steps + 1 else steps * (1 - (steps + 1) / (2 * passes))

    @property
    def beside(self) -> float:
        """Sequences, on average, that get a token in a pass with prompts."""
        return self.block * self.early_steps / self.passes

    @property
    def left(self) -> float:
        """The share of sequences, on average, that get a token in a pass without prompts."""
        return 1 - self.early_steps / max(1, self.work.output - 1)

    @property
    def token_kv(self) -> float:
        """Bytes of KV, of average length, that a token attends to."""
        return self.sizes.attended(self.work.prompt + self.work.output / 2) * self.sizes.kv_token

    @property
    def pass_rows(self) -> int:
        """Prompt tokens of a pass."""
        return -(-self.block // self.passes) * self.work.prompt

    @property
    def most_rows(self) -> int:
        """Most rows of a pass: the tokens of its prompts, and one of each sequence."""
        return self.pass_rows + self.block * self.work.in_flight


# ---- time


def prompt_streams(case: Case) -> tuple[Linear, ...]:
    """Seconds of each stream of `PassTime`, in its order, in one pass with prompts. A block has `passes` of them.

    Sequences of earlier passes get a token in it, in device batches of their own that multiply all weights again.
    """
    sizes, machine, block = case.sizes, case.machine, case.block / case.passes
    hidden = case.passing_hidden(block * case.work.prompt)
    kv = block * (case.work.prompt + 1) * sizes.kv_token
    rows = block * case.work.prompt
    batches = -(-rows // case.tokens)  # each reads the adapters of its rows
    attention = block * 2 * case.work.prompt * sizes.attended(case.work.prompt) * sizes.q_size * sizes.layers
    compute = (
        _products_s(case, rows, case.tokens)
        + block * sizes.head_numbers * product_s(case.machine.products[case.formats.weights], case.batch) / case.batch
        + attention / machine.attention_flops_per_s
        + min(batches * case.adapters, case.block) * sizes.adapter / machine.memory_read
        + _products_s(case, round_up(math.ceil(case.beside), case.batch), case.batch)
        + case.beside * case.token_kv / _attention(case)
    )
    chunks = -(-case.work.prompt // case.tokens)  # of a prompt: each reads what those before it wrote
    again = block * case.work.prompt * (chunks - 1) / 2 * sizes.kv_token + case.beside * case.token_kv
    kv += case.beside * case.work.page_tokens * sizes.kv_token
    beside = case.beside * sizes.layers
    touched = _Requests(block * sizes.layers * (chunks - 1) + beside, block * sizes.layers * chunks + beside, rows)
    return _streams(case, read_kv=again, write_kv=kv, hidden=hidden, compute=compute, requests=touched)


def token_streams(case: Case) -> tuple[Linear, ...]:
    """The same of a pass without prompts, in which the sequences that are left get a token each."""
    sizes, machine, block = case.sizes, case.machine, case.block
    left = block * case.left
    kv = left * case.token_kv
    delegated = case.formats.cpu_attention
    batches = -(-block // case.batch)
    compute = (
        _products_s(case, block, case.batch)
        + block * sizes.head_numbers * product_s(machine.products[case.formats.weights], case.batch) / case.batch
        + min(batches * min(case.adapters, case.batch), block) * sizes.adapter / machine.memory_read
        + kv / _attention(case)
    )
    more = kv / machine.host_attention - kv / machine.attention if delegated else 0.0
    touched = _Requests(left * sizes.layers, left * sizes.layers, block)
    return _streams(
        case, read_kv=kv, write_kv=left * case.work.page_tokens * sizes.kv_token,
        hidden=case.passing_hidden(block), compute=compute, requests=touched, more=more,
        delegated=delegated,
    )  # fmt: skip


def _attention(case: Case) -> float:
    """Bytes of KV a second."""
    sparse = case.formats.sparse_attention and case.machine.sparse_attention
    return case.machine.sparse_attention if sparse else case.machine.attention


def _products_s(case: Case, rows: float, batch: int) -> float:
    """Seconds of all layers' products for `rows` rows in device batches of `batch`."""
    table = case.machine.products[case.formats.weights]
    return rows / batch * case.sizes.layers * sum(case.sizes.numbers) * product_s(table, batch)


@dataclass(frozen=True, slots=True)
class _Requests:
    """Requests to the disk in a pass: for KV, if all of it lies there, and for rows of the embedding.

    The pages of a sequence in a layer are one request.
    """

    reads: float
    writes: float
    embedding: float


def _streams(
    case: Case, *, read_kv: float, write_kv: float, hidden: float, compute: float, requests: _Requests,
    more: float = 0.0, delegated: bool = False,
) -> tuple[Linear, ...]:  # fmt: skip
    """Appendix A.3: dtoc, ctog, gtoc, ctod, comp. In one memory a byte comes from the disk to where it is used.

    Layers wait for the embedding's rows, which are read first. `more`: seconds of attention to all KV on the host.
    """
    machine, weights = case.machine, float(case.sizes.weights)
    gathered = requests.embedding * machine.request_s if case.sizes.embedding_row else 0.0
    read = linear(
        gathered,
        weights_disk=weights / machine.disk_read,
        kv_disk=read_kv / machine.disk_read + requests.reads * machine.request_s,
        activations_disk=hidden / machine.disk_read,
    )
    write = linear(
        kv_disk=write_kv / machine.disk_write + requests.writes * machine.request_s,
        activations_disk=hidden / machine.disk_write,
    )
    computed = linear(compute + gathered, kv_host=more, kv_disk=more)
    if machine.one_memory:
        return read, Linear(), Linear(), write, computed
    up, down = machine.to_device, machine.to_host
    transferred = 0.0 if delegated else read_kv
    to_device = linear(
        weights_host=weights / up, weights_disk=weights / up, kv_host=transferred / up, kv_disk=transferred / up,
        activations_host=hidden / up, activations_disk=hidden / up,
    )  # fmt: skip
    to_host = linear(
        kv_host=write_kv / down, kv_disk=write_kv / down, activations_host=hidden / down,
        activations_disk=hidden / down,
    )  # fmt: skip
    return read, to_device, to_host, write, computed


def longest(streams: tuple[Linear, ...], duplex: float) -> tuple[Linear, ...]:
    """What one by one a pass is no shorter than: for the disk both of its streams."""
    read, to_device, to_host, write, compute = streams
    return read.plus(write, 1.0 - duplex), write.plus(read, 1.0 - duplex), to_device, to_host, compute


def phase(case: Case, streams: tuple[Linear, ...], outside: OffDeviceShares, times: int = 1) -> PassTime:
    """Return the time of `times` passes that are alike."""
    seconds = [times * stream.at(outside) for stream in streams]
    most = max(times * stream.at(outside) for stream in longest(streams, case.machine.duplex))
    return PassTime(*seconds, pass_s=case.overlap * most + (1.0 - case.overlap) * sum(seconds))


# ---- memory


def memory(case: Case) -> dict[MemoryTier, dict[str, Linear]]:
    """Most bytes of each tier at a time, by part (the names of `plan.Usage`), and no more than any rounding needs.

    The ring has room for the mean of what is streamed, which the largest streamed layer is no smaller than. Where KV
    or activations lie outside, a device batch's part of a layer passes through buffers; half of it counts half. The
    longest sequence that the model allows has to fit one, too.
    """
    sizes, work = case.sizes, case.work
    weights = float(sizes.weights)
    mean = case.buffers * weights / (sizes.layers + sizes.panels)
    kv = work.in_flight * case.block * case.sequence_kv
    spare = max(0.0, case.set_kv - kv - case.adapter_bytes)  # pages that are set are there, whatever a block needs
    hidden = float(case.most_rows * sizes.hidden_row)
    passing = max(case.batch * case.sequence_kv, min(case.block * case.sequence_kv, sizes.context * sizes.kv_token))
    passing_kv = kv_buffers(case.buffers) * passing / sizes.layers
    from_disk = passing_kv
    if sizes.kv_token * work.page_tokens / sizes.layers % ALIGN:  # a disk transfers whole blocks
        from_disk += BOUNCE_THREADS * (BOUNCE + 2 * ALIGN)
    hidden_buffers = float(case.buffers * (case.tokens * sizes.hidden_row + ALIGN))
    hidden_blocks = ALIGN * (case.most_rows / case.tokens + 2 + case.block * work.in_flight)  # a batch begins on one
    rows = (case.tokens + SLACK_ROWS) * sizes.row + (case.batch + SLACK_ROWS) * sizes.hidden_row
    # embeddings are gathered, on a GPU for a batch at a time; hidden rows and logits copied out for those who sample
    gathered = case.tokens + case.block if case.formats.executor == "cuda" else case.most_rows
    rows += 2 * case.block * sizes.logits_row + gathered * sizes.embedding_row
    rows += work.in_flight * (case.block * work.table_bytes + case.most_rows * sizes.message_row)
    workspace = linear(
        float(rows + sizes.fixed + spare),
        kv_host=passing_kv, kv_disk=from_disk, activations_host=hidden_buffers, activations_disk=hidden_buffers,
    )  # fmt: skip
    device = {
        "weights": linear(weights, weights_host=-weights, weights_disk=-weights),
        "kv": linear(kv, kv_host=-kv, kv_disk=-kv),
        "activations": linear(hidden, activations_host=-hidden, activations_disk=-hidden),
        "adapters": linear(float(case.adapter_bytes)),
        "ring": linear(weights_host=mean, weights_disk=mean),
        "workspace": workspace,
    }
    staged = 0.0 if case.machine.one_memory else 1.0  # a byte of the disk passes through the host
    host = {
        "weights": linear(weights_host=weights),
        "kv": linear(kv_host=kv),
        "activations": linear(activations_host=hidden),
        "workspace": linear(
            weights_disk=staged * mean, kv_disk=staged * from_disk, activations_disk=staged * hidden_buffers
        ),
    }
    disk = {
        "weights": linear(float(sizes.file)),  # all of them: what is resident is read from there at start
        "kv": linear(kv_disk=kv),
        "activations": linear(activations_disk=hidden + hidden_blocks),
    }
    return {MemoryTier.DEVICE: device, MemoryTier.HOST: host, MemoryTier.DISK: disk}
