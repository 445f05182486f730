"""How a pipeline cuts a model's layers into stages of nearly equal cost (ORCA, section 4.1; GPipe's cut). Pure.

A decode step reads each weight once, so a layer costs its matrices, and the head, which the last stage has, its own: a
vocabulary of 128k beside layers of 8B is worth two layers and a half. The embedding is a lookup and costs nothing.
"""

from weft.domain.model.spec import ModelSpec
from weft_runner.errors import ExecutorUnavailable


def stage_layers(model: ModelSpec, stage: int, stages: int) -> range:
    """Cut the layers of stage `stage` of `stages`, so that the dearest stage costs least.

    What is left over is in the middle. Stage 0 samples tokens as well, so that of the stages before the last one it is
    among the smaller. Raises ExecutorUnavailable: the model has fewer layers.
    """
    if model.layers < stages:
        raise ExecutorUnavailable(
            f"--pipeline-parallel {stages}: this model has {model.layers} layers, and each stage needs one; "
            f"ask for at most {model.layers} stages"
        )
    if stages == 1:
        return range(model.layers)
    middle_stages = stages - 1
    middle = model.layers - _last_layers(model, stages)
    if stage == middle_stages:
        return range(middle, model.layers)
    per_stage, remainder = divmod(middle, middle_stages)
    first = stage * per_stage + max(0, stage - (middle_stages - remainder))
    return range(first, first + per_stage + (stage >= middle_stages - remainder))


def layer_cost(spec: ModelSpec) -> int:
    """Count the numbers in a layer's matrices."""
    sizes = (spec.projection(name) for name in spec.family.projections)
    return sum(n_in * n_out for n_in, n_out in sizes)


def _last_layers(model: ModelSpec, stages: int) -> int:
    """Choose how many layers stand before the head in the last stage; of equally good numbers the largest."""
    layer, head = layer_cost(model), model.hidden_size * model.vocab_size

    def dearest(last: int) -> int:
        return max(-(-(model.layers - last) // (stages - 1)) * layer, last * layer + head)

    return min(range(model.layers - stages + 1, 0, -1), key=dearest)
