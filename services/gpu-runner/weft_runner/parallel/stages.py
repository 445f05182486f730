"""Pipeline parallelism: which layers each stage has, and what passes between stages (ORCA, section 4.1; GPipe's cut).

The layers are cut into N runs of nearly equal cost. A decode step reads each weight once, so a layer costs its
matrices, and the head, which the last stage has, its own: a vocabulary of 128k beside layers of 8B is worth two layers
and a half. The embedding is a lookup and costs nothing. Cutting layers changes no arithmetic: a row's result is that of
one stage, bit for bit, and so is the numerics class.

**Bytes on the wire** of a step of T tokens and S sampled rows, with fp32 numbers: stage p of N sends

    4 T H    to stage p + 1, for p < N - 1: the residual stream
    4 S V    to stage 0, for p = N - 1 > 0: logits; nothing where no row samples

and stage 0 tells each of the others 4 (6 + T + 5 R + 4 G + P) bytes of control, for R rows with P pages in sum and
adapters in G segments (`parallel.commands.write_run`), before any tensor is there.
"""

from weft.domain.model.config import ModelSpec
from weft.domain.model.tensors import PROJECTIONS
from weft_runner.errors import ExecutorUnavailable
from weft_runner.parallel.shard import Part


def stage_of(whole: ModelSpec, stage: int, stages: int) -> Part:
    """The part of stage `stage` of `stages`. Raises ExecutorUnavailable."""
    ends = _ends(whole, stages)
    return Part(whole, first=ends[stage - 1] if stage else 0, last=ends[stage])


def _ends(whole: ModelSpec, stages: int) -> list[int]:
    """Where each stage ends. Of all cuts one whose dearest stage costs least; what is left over is in the middle.

    Stage 0 chooses tokens as well, so that of the stages before the last one it is among the smaller.
    """
    if whole.layers < stages:
        raise ExecutorUnavailable(
            f"--pipeline-parallel {stages}: this model has {whole.layers} layers, and each stage needs one; "
            f"ask for at most {whole.layers} stages"
        )
    if stages == 1:
        return [whole.layers]
    before, last = stages - 1, _last_layers(whole, stages)
    each, more = divmod(whole.layers - last, before)
    sizes = [each + (stage >= before - more) for stage in range(before)]
    return [sum(sizes[: stage + 1]) for stage in range(before)] + [whole.layers]


def _last_layers(whole: ModelSpec, stages: int) -> int:
    """How many layers stand before the head in the last stage; of equally good numbers the largest."""
    layer, head = layer_cost(whole), whole.hidden_size * whole.vocab_size

    def dearest(last: int) -> int:
        return max(-(-(whole.layers - last) // (stages - 1)) * layer, last * layer + head)

    return min(range(whole.layers - stages + 1, 0, -1), key=dearest)


def layer_cost(spec: ModelSpec) -> int:
    """Numbers in a layer's matrices."""
    sizes = (spec.projection(name) for name in PROJECTIONS)
    return sum(n_in * n_out for n_in, n_out in sizes)
