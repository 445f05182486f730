"""Rows of a step that failed, each alone: so that one which cannot be computed ends its own sequence, and no other."""

from weft.domain.request import TokenLogprob
from weft_runner.core.batch import Batch
from weft_runner.core.events import RunStep, StepResults
from weft_runner.core.request_pool import RequestPool
from weft_runner.core.sampling import SampledToken
from weft_runner.engine.builder import StepBuilder
from weft_runner.errors import ExecutorLost
from weft_runner.model.executor import Executor
from weft_runner.model.layer_progress import LayerReports


def run_alone(
    step: RunStep, pool: RequestPool, builder: StepBuilder, executor: Executor, reports: LayerReports
) -> StepResults:
    """Run those whose sequences are still there; those that fail again are failures. Raises ExecutorLost."""
    tokens: dict[str, SampledToken] = {}
    failures: dict[str, str] = {}
    prompts: dict[str, list[TokenLogprob]] = {}
    late: list[str] = []
    forwards = 0
    for row, sequence in zip(step.batch.rows, step.sequences, strict=True):
        if not pool.runs(sequence):
            continue
        try:
            built = builder.build(Batch((row,), 0), (sequence,), keep=False)
            logits = executor.run(built.step, **reports.options)
            found = built.by_key(executor.sample(logits, built.draws()))
            forwards += 1
        except ExecutorLost:
            raise
        except Exception as error:  # noqa: BLE001 (it ends this sequence, with its name, and reaches its gateway)
            found = StepResults({}, {row.key: f"{type(error).__name__}: {error}"})
        tokens.update(found.tokens)
        failures.update(found.failures)
        prompts.update(found.prompts)
        late += found.late
    return StepResults(tokens, failures, prompts, tuple(late), forwards)
