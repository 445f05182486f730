"""The cpu executor: a whole step in one native call, bf16 or fp32 (or int8 or int4 weights), on AMX down to plain C++.

**Bitwise batch invariance.** A row's logits are the same bits whatever its batch-mates, its place among them, its page
numbers, the number of threads, and whether its context was decoded, prefilled at once, in chunks, or again after a
move: every kernel works on absolute positions and never lets the number of rows choose an order of summation
(`weft_kernels/cpu/src/dot.h`, `attention.h`). Within a numerics class that holds across machines too.
"""

import ctypes
from collections.abc import Sequence
from operator import gt
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from weft.domain.model.packed import kv_token_bytes
from weft_kernels.cpu.errors import CallRefused
from weft_kernels.cpu.library import LayerCounter, Library
from weft_kernels.cpu.memory import MappedMemory
from weft_kernels.cpu.sampling import Sampler
from weft_kernels.cpu.structs import ATTENTION_BLOCK, FP32, INT4, KINDS, LOST, ModelStruct, RanksStruct, StepStruct
from weft_runner.core.sampling import SampledToken
from weft_runner.errors import ExecutorLost
from weft_runner.model.checkpoint import Checkpoint
from weft_runner.model.cpu.adapters import CpuAdapterStore
from weft_runner.model.cpu.packed_weights import PackedMemory, PackedWeights, RowPacker
from weft_runner.model.draft_search import NativeSearch
from weft_runner.model.executor import Capabilities, LayerDone
from weft_runner.model.kv_memory import NativeKvMemory
from weft_runner.model.partition import Partition
from weft_runner.model.pooling import with_hidden, with_states
from weft_runner.model.sampling import Floats, NativeSampler, SamplingArgs
from weft_runner.model.step import StepInput

VERSION = "2"
# Levels that compute the same bits: fused multiply-adds and tiles follow one order (dot.h).
_TILE32 = ("amx_bf16", "avx512", "avx2")


class RankSlots(Protocol):
    """What tensor ranks exchange in a step (`weft_kernels.cpu.ranks`). `error`: what an exchange raised."""

    struct: RanksStruct
    error: BaseException | None


class CpuExecutor:
    """One model on the CPU, or a part of it. `threads` work at a step, the caller's included.

    Of tensor ranks each writes to slots of its own and reads the others'; sums are taken in the order of the ranks. So
    a number of ranks is a numerics class of its own, and all that is said above of a row's bits holds within it.
    """

    def __init__(
        self,
        library: Library,
        checkpoint: Checkpoint,
        *,
        dtype: str = "bf16",
        kv_dtype: str = "auto",
        top_share: float = 0.0,
        threads: int,
        pages: int,
        page_tokens: int,
        slots: int,
        part: Partition | None = None,
        ranks: RankSlots | None = None,
    ) -> None:
        """Pack the base (`dtype`: bf16, fp32, int8 or int4 for the weights alone), or `part` of it, with its `ranks`.

        `kv_dtype`: int4, or auto, that of activations. `top_share`: of a token's keys, the best, which it attends to
        (FlexGen, section 5); 0: all. Raises WeightsInvalid, StoppedAtStart.
        """
        self._part = part = part or Partition(checkpoint.spec)
        self._library, self.spec, self._dtype, self.torch_threads = library, part.local, dtype, 1
        self._pool, self._ranks = library.pool(threads), ranks
        self._norm = np.array(checkpoint.norm, np.float32)
        self._base = self._load(checkpoint, dtype, page_tokens)
        model, spec = self._base.model, part.local
        if ranks is not None:
            model.ranks = ctypes.pointer(ranks.struct)
        packed = kv_dtype == "int4"
        model.kv_kind = INT4 if packed else model.kind
        self.page_bytes = spec.layers * page_tokens * kv_token_bytes(spec, dtype, int4=packed)
        self._kv = MappedMemory(self._kv_bytes(pages))
        model.kv = self._kv.address
        shape = (spec.layers, 2, spec.kv_heads, page_tokens, spec.head_dim)
        self._kv_numbers = "int4" if packed else "fp32" if model.kind == FP32 else "bf16"
        layout = "/".join(["native", VERSION, self._kv_numbers, *map(str, shape)])
        self._top_share, self._scores = top_share, MappedMemory(0)
        if top_share:
            self._scores = self._score_memory(model, threads, pages * page_tokens)
        self.kv_memory = NativeKvMemory(library, self._pool, self._kv, self.page_bytes, spec.layers, layout)
        self.adapters = CpuAdapterStore(library, self._pool, part, slots, model.kind)
        self._token_sampler = NativeSampler(Sampler(library.native, library.level_number))
        whole = part.size == 1 and part.begins and part.ends
        self._drafts = NativeSearch(library.native) if whole else None
        self._workspace, self._workspace_sizes = MappedMemory(0), (0, 0, 0)  # tokens, sampled ones, rank
        self._hidden, self._logits = _rows(0, spec.hidden_size), _rows(0, spec.vocab_size)
        self._hidden_at, self._logits_at = address_of(self._hidden), address_of(self._logits)
        self.layer_counter = LayerCounter(library.native)  # for threads that read KV while a step runs
        self._native, self._prepared = StepStruct(layers_done=self.layer_counter.address), None

    def _score_memory(self, model: ModelStruct, threads: int, tokens: int) -> MappedMemory:
        """A thread's scores of 16 queries with all keys of the longest sequence."""
        model.top_share = self._top_share
        model.score_positions = -(-min(self.spec.max_positions, tokens) // ATTENTION_BLOCK) * ATTENTION_BLOCK
        memory = MappedMemory(4 * 16 * threads * model.score_positions)
        model.scores = memory.address
        return memory

    def _load(self, checkpoint: Checkpoint, dtype: str, page_tokens: int) -> PackedWeights:
        packer = RowPacker(self._library, self._pool, KINDS[dtype])
        return PackedWeights(PackedMemory(packer, self._part), checkpoint, dtype, page_tokens, self._part)

    def _kv_bytes(self, pages: int) -> int:
        """Bytes of memory for `pages` pages."""
        return pages * self.page_bytes

    @property
    def can(self) -> Capabilities:
        return Capabilities(layer_counter=self.layer_counter, packs=self.adapters, drafts=self._drafts)

    @property
    def numerics_class(self) -> str:
        level = self._library.level
        # The order of VDPBF16PS is for bf16 alone.
        tiles = level in _TILE32 or (level == "avx512_bf16" and self._dtype == "fp32")
        kv = "/kv-int4" if self._kv_numbers == "int4" else ""
        top = f"/top-{self._top_share:g}" if self._top_share else ""
        return f"cpu/{VERSION}/{'tile32' if tiles else level}/{self._dtype}/tp{self._part.size}{kv}{top}"

    def run(
        self, step: StepInput, *, first: int = 0, last: int | None = None, hidden: npt.ArrayLike | None = None,
        layer_done: LayerDone | None = None,
    ) -> Floats:  # fmt: skip
        """Run a step (`Executor.run`). Logits of a whole model are valid until the next call.

        Hidden rows and the logits of a later stage are the caller's: they may be on their way while the next step runs.

        `hidden` may be anything that numpy reads without a copy, as a tensor of torch on the CPU. A later stage of a
        pipeline begins with `hidden`, an earlier one ends in it. Logits are whole on tensor rank 0
        alone. Raises ExecutorLost if another rank is lost.
        """
        last = self.spec.layers if last is None else last
        if step is not self._prepared:
            self._prepare(step)
        native = self._native
        native.first, native.last = first, last
        if hidden is not None:
            self._hidden[: native.n_tokens] = hidden
        self._run(native, layer_done)
        if last < self.spec.layers or not self._part.ends:
            return self._hidden[: native.n_tokens].copy()
        logits = self._logits[: native.n_sampled]
        if step.pooled:
            logits = with_states(logits, self._hidden[step.arrays.sampled], step, self._norm, self.spec.norm_eps)
        return logits if self._part.begins else logits.copy()

    def _run(self, native: StepStruct, layer_done: LayerDone | None) -> None:
        try:
            self._library.run(self._pool, self._base.model, native, layer_done)
        except CallRefused as error:
            if error.code != LOST:
                raise
            cause = self._ranks.error if self._ranks is not None else None
            raise ExecutorLost(f"a step of {self._part.size} ranks failed: {error}") from cause or error

    def sample(self, logits: npt.ArrayLike, draws: Sequence[SamplingArgs]) -> list[SampledToken | None]:
        rows = np.asarray(logits, np.float32)
        found = self._token_sampler.sample(rows[:, : self.spec.vocab_size], draws)
        return with_hidden(found, draws, lambda row: rows[row, : self.spec.hidden_size])

    def clear_pages(self, pages: list[int]) -> None:
        for page in pages:
            self._kv.clear(page * self.page_bytes, self.page_bytes)

    def allocate_adapter_pages(self, pages: list[int]) -> None:
        for page in pages:
            self._kv.discard(page * self.page_bytes, self.page_bytes)

    def _prepare(self, step: StepInput) -> None:
        """Point the native step at this step's arrays; they stay where they are for as long as the step lives."""
        native = self._native
        _, at, (n_tokens, rows, pages, segments, sampled, taken, end) = step.layout
        n_sampled = sampled - segments
        self._grow_workspace(n_tokens, n_sampled)
        native.n_tokens, native.n_rows = n_tokens, len(step.rows)
        native.n_segments, native.n_sampled = (segments - pages) // 3, n_sampled
        native.tokens, native.rows, native.page_table = at, at + 4 * n_tokens, at + 4 * rows
        native.segments, native.sampled = at + 4 * pages, at + 4 * segments
        native.guesses = at + 4 * taken if end > taken else None
        native.slots = ctypes.addressof(self.adapters.table)
        native.hidden, native.logits = self._hidden_at, self._logits_at
        native.workspace, native.workspace_bytes = self._workspace.address, self._workspace.n_bytes
        self._prepared = step

    def _grow_workspace(self, n_tokens: int, n_sampled: int) -> None:
        """Buffers grow to the largest step so far."""
        if n_tokens > len(self._hidden):
            self._hidden = _rows(n_tokens, self.spec.hidden_size)
            self._hidden_at = address_of(self._hidden)
        if n_sampled > len(self._logits):
            self._logits = _rows(n_sampled, self.spec.vocab_size)
            self._logits_at = address_of(self._logits)
        sizes = n_tokens, n_sampled, self.adapters.site_rank
        if any(map(gt, sizes, self._workspace_sizes)):
            self._workspace_sizes = n_tokens, n_sampled, site_rank = tuple(map(max, sizes, self._workspace_sizes))
            needed = self._workspace_of(n_tokens, n_sampled, site_rank)
            if needed > self._workspace.n_bytes:
                self._workspace = MappedMemory(needed)

    def _workspace_of(self, n_tokens: int, n_sampled: int, site_rank: int) -> int:
        return self._library.workspace_bytes(self._base.model, n_tokens, site_rank, n_sampled)


def _rows(count: int, width: int) -> Floats:
    return np.empty((count, width), np.float32)


def address_of(array: "np.ndarray[Any, Any]") -> int:
    return array.ctypes.data
