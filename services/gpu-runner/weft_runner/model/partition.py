"""A rank's part of a model: slices of each layer (tensor parallelism), some of the layers (pipeline), or both.

**Slices.** Heads, inner features and vocabulary are shared out evenly; where key-value heads do not divide, the first
ranks have one more, with the heads that read it. Everything is a slice of what lies on disk: a rank reads, converts and
keeps its own part alone. Who reads which part of an adapter, and why: `model.tensor_parallel`.

**Stages** (ORCA, section 4.1). The layers are cut into N runs of nearly equal cost (`core.layer_cut`). Cutting layers
changes no arithmetic: a row's result is that of one stage, bit for bit, and so is the numerics class.

**Bytes on the wire** of a step of T tokens and S sampled rows, with fp32 numbers: stage p of N sends

    4 T H    to stage p + 1, for p < N - 1: the residual stream
    4 S V    to stage 0, for p = N - 1 > 0: logits; nothing where no row samples

and stage 0 sends each of the others the step's command, before any tensor is there. Where a stage has several ranks,
each of them sends the residual stream to the rank of its place in the next stage, and one of the last stage the logits.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from weft.domain.model.families import HeadNorms
from weft.domain.model.spec import ModelSpec
from weft_runner.core.layer_cut import stage_layers
from weft_runner.errors import ExecutorUnavailable
from weft_runner.model.arrays import Array
from weft_runner.model.checkpoint import LayerTensors
from weft_runner.model.lora import AdapterPairs, LoraPair

ROW = ("o_proj", "down_proj")  # split by inputs


@dataclass(frozen=True, slots=True)
class Partition:
    """Rank `rank` of `size` of layers [first, last) (None: to the end); alone it is the whole model.

    `check_divisible` has checked what is divided; `stage_of` cuts the layers of a pipeline. The embedding is with the
    first layer, the head with the last one.
    """

    whole: ModelSpec
    rank: int = 0
    size: int = 1
    first: int = 0
    last: int | None = None

    @property
    def layers(self) -> range:
        """The layers by their numbers in the whole model; this part's own are counted from 0 everywhere else."""
        return range(self.first, self.whole.layers if self.last is None else self.last)

    @property
    def begins(self) -> bool:
        return self.layers.start == 0

    @property
    def ends(self) -> bool:
        return self.layers.stop == self.whole.layers

    @property
    def local(self) -> ModelSpec:
        """The sizes that operators compute with; hidden size and vocabulary are whole, the head's rows: `head`."""
        whole, layers = self.whole, self.layers
        return replace(
            whole,
            by_layer=whole.by_layer[layers.start : layers.stop],
            heads=self._heads.stop - self._heads.start,
            kv_heads=self._kv_heads.stop - self._kv_heads.start,
            intermediate_size=whole.intermediate_size // self.size,
        )

    def layer(self, layer: LayerTensors) -> LayerTensors:
        """Return views of this rank's part of a layer; the norms are whole."""
        if self.size == 1:
            return layer
        return replace(
            layer,
            projections={name: self._matrix(name, weight) for name, weight in layer.projections.items()},
            biases={
                name: bias if name in ROW else bias[self.outputs(name)]
                for name, bias in layer.biases.items()
                if name not in ROW or self.rank == 0  # partial sums are added up: one of them has it
            },
        )

    def embedding(self, embedding: Array) -> Array:
        """[V, H] -> the same, or [0, H] where the layers do not begin here; a view."""
        return embedding if self.begins else embedding[:0]

    @property
    def head(self) -> slice:
        """The rows of the head for this rank's part of the vocabulary; none where the layers do not end here."""
        return self._share(self.whole.vocab_size) if self.ends else slice(0, 0)

    @property
    def head_rows(self) -> int:
        """The number of these rows."""
        return self.head.stop - self.head.start

    def pairs(self, pairs: AdapterPairs) -> AdapterPairs:
        """Return this rank's part of an adapter's whole pairs: views, see `model.tensor_parallel`."""
        pairs = pairs[self.layers.start : self.layers.stop]
        if self.size == 1:
            return pairs
        return tuple(tuple(tuple(self._site(site)) for site in layer) for layer in pairs)

    def outputs(self, projection: str) -> slice:
        """The outputs here, of an adapter's B and of the base where it is split by outputs."""
        match projection:
            case "k_proj" | "v_proj":
                return self._of_heads(self._kv_heads)
            case "q_proj":
                return self._of_heads(self._heads)
            case _:
                return self._share(self.whole.projection(projection)[1])

    @property
    def _kv_heads(self) -> slice:
        """Key-value heads: of fewer than ranks several ranks have the same one, and its pages; else the first more."""
        heads, rank, size = self.whole.kv_heads, self.rank, self.size
        if heads < size:
            return slice(rank * heads // size, rank * heads // size + 1)
        each, more = divmod(heads, size)
        return slice(rank * each + min(rank, more), (rank + 1) * each + min(rank + 1, more))

    @property
    def _heads(self) -> slice:
        """Query heads that read this rank's key-value heads."""
        if self.whole.kv_heads < self.size:
            return self._share(self.whole.heads)
        group = self.whole.heads // self.whole.kv_heads
        return slice(self._kv_heads.start * group, self._kv_heads.stop * group)

    def _inputs(self, projection: str) -> slice:
        """The inputs here of a site that is split by inputs, of the base and of an adapter's A."""
        assert projection in ROW, projection
        if projection == "o_proj":
            return self._of_heads(self._heads)
        return self._share(self.whole.projection(projection)[0])

    def _of_heads(self, heads: slice) -> slice:
        return slice(heads.start * self.whole.head_dim, heads.stop * self.whole.head_dim)

    def _share(self, total: int) -> slice:
        each = total // self.size
        return slice(self.rank * each, (self.rank + 1) * each)

    def _matrix(self, name: str, weight: Array) -> Array:
        return weight[:, self._inputs(name)] if name in ROW else weight[self.outputs(name)]

    def _site(self, site: tuple[LoraPair, ...]) -> Iterator[LoraPair]:
        """Row r of the stacked A belongs to rank r mod N, so that what is gathered is in the order of the ranks."""
        before = 0
        for pair in site:
            yield self._pair(pair, (self.rank - before) % self.size)
            before += pair.rank

    def _pair(self, pair: LoraPair, first: int) -> LoraPair:
        row, outputs = pair.projection in ROW, self.outputs(pair.projection)
        a = pair.a[:, self._inputs(pair.projection)] if row else pair.a[first :: self.size]
        b = pair.b[outputs]
        return replace(pair, a=a, b=b, n_in=a.shape[1], n_out=b.shape[0], out_start=outputs.start if row else 0)


def check_divisible(spec: ModelSpec, size: int, *, even_heads: bool) -> None:
    """Check that `size` ranks can share the model's numbers evenly.

    `even_heads`: heads, too, so that pages have one size. Else it is enough that each rank has some key-value heads.
    Raises ExecutorUnavailable with every number that they cannot.
    """
    if size > 1 and spec.family.head_norms is HeadNorms.ALL:
        raise ExecutorUnavailable(
            f"--tensor-parallel {size}: {spec.architecture} norms all heads of a token together, of which a rank has "
            "some; ask for 1, or for a pipeline (--pipeline-parallel)"
        )
    uneven = spec.kv_heads > size and spec.heads % spec.kv_heads == 0 and not even_heads
    shared = {
        "num_attention_heads": 0 if uneven else spec.heads,
        "intermediate_size": spec.intermediate_size,
        "hidden_size": spec.hidden_size,
        "vocab_size": spec.vocab_size,
    }
    odd = [f"{name} {number}" for name, number in shared.items() if number % size]
    if not uneven and spec.kv_heads % size and size % spec.kv_heads:
        odd.append(f"num_key_value_heads {spec.kv_heads}")
    if odd:
        raise ExecutorUnavailable(
            f"--tensor-parallel {size}: its ranks cannot share {', '.join(odd)} of this model evenly; "
            "ask for a number that divides them (1: the whole model on one device)"
        )


def stage_of(whole: ModelSpec, stage: int, stages: int) -> Partition:
    """Return the part of stage `stage` of `stages`. Raises ExecutorUnavailable."""
    layers = stage_layers(whole, stage, stages)
    return Partition(whole, first=layers.start, last=layers.stop)


@dataclass(frozen=True, slots=True)
class RankGrid:
    """Places of `stages` x `tensor` ranks: stages of a pipeline, each of several tensor ranks (ORCA, section 4.1).

    Ranks are numbered stage by stage. Those of a stage have parts of the same layers and meet in every one of them. A
    rank passes its hidden rows to the rank of its place in the next stage: hidden rows are whole, and the same, on all
    ranks of a stage. Logits come from tensor rank 0 of the last stage and go to rank 0.
    """

    stages: int = 1
    tensor: int = 1

    @property
    def size(self) -> int:
        return self.stages * self.tensor

    def rank_of(self, stage: int, tensor_rank: int) -> int:
        return stage * self.tensor + tensor_rank

    def stage_of(self, rank: int) -> int:
        return rank // self.tensor

    def tensor_rank_of(self, rank: int) -> int:
        return rank % self.tensor

    def ranks_of_stage(self, stage: int) -> list[int]:
        return [self.rank_of(stage, tensor_rank) for tensor_rank in range(self.tensor)]

    def part_of(self, spec: ModelSpec, rank: int) -> Partition:
        """Give a rank its part of a model. Raises ExecutorUnavailable."""
        stage = stage_of(spec, self.stage_of(rank), self.stages)
        return replace(stage, rank=self.tensor_rank_of(rank), size=self.tensor)
