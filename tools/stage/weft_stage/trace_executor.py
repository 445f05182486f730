"""An executor that ends answers where a table says: as long as a trace's, whatever the model would have said.

A request is known by its seed, which is a row's key in the table and says nothing else; requests with other seeds run
as they are. A known answer has no end-of-sequence token before its end, and one there, so that `max_tokens` may stay
what clients of the trace asked for. Steps may last as long as a device's would, so that several runners on one machine
do not compete for its cores. Only `weft_stage.trace_runner` makes one: no flag of a runner leads here, and its
numerics class is none of a runner's that serves, so that no sequence moves from one to the other.
"""

import json
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from weft.domain.model.spec import ModelSpec
from weft.domain.strict_json import is_int, parse_object
from weft_runner.core import SampledToken
from weft_runner.model import AdapterStore, Capabilities, Executor, KvMemory, LayerDone, SamplingArgs, StepInput
from weft_stage.errors import BadTable

MAX_LINE_BYTES, MAX_LINES, MAX_NUMBER = 256, 1_000_000, 2**63 - 1


@dataclass(frozen=True, slots=True)
class TracedAnswer:
    """A row of the table. `output_tokens`: without the end."""

    seed: int
    prompt_tokens: int
    output_tokens: int

    def ends(self, position: int) -> bool:
        """True where the token at this position of the sequence is its end."""
        return position - self.prompt_tokens >= self.output_tokens


def write_table(path: Path, answers: Iterable[TracedAnswer]) -> None:
    """Write a JSON line for each answer."""
    path.write_text("".join(json.dumps(asdict(answer)) + "\n" for answer in answers), encoding="utf-8")


def trace_up(table: Path, step_ms: int = 0, best_batch: int = 1) -> tuple[str, ...]:
    """Return what `Stack` starts so that runners follow a table."""
    runner = ("weft_stage.trace_runner", str(table.resolve()), str(step_ms), str(best_batch))
    return ("weft_stage.runner_up", *runner, "--")


def read_table(path: Path) -> dict[int, TracedAnswer]:
    """Read answers by seed. Raises BadTable."""
    found: dict[int, TracedAnswer] = {}
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            try:
                answer = _parsed(line)
            except ValueError as error:
                raise BadTable(f"{path.name}, line {number}: {error}") from error
            if answer.seed in found or number > MAX_LINES:
                raise BadTable(f"{path.name}, line {number}: seed {answer.seed} again, or more than {MAX_LINES} lines")
            found[answer.seed] = answer
    return found


def _parsed(line: bytes) -> TracedAnswer:
    record = parse_object(line, max_bytes=MAX_LINE_BYTES)
    names = ("seed", "prompt_tokens", "output_tokens")
    if record.keys() != {*names}:
        raise ValueError(f"{', '.join(record)} instead of {', '.join(names)}")
    if wrong := [name for name in names if not is_int(record[name]) or not 0 <= record[name] <= MAX_NUMBER]:
        raise ValueError(f"{wrong[0]} is {record[wrong[0]]!r}, not within 0..2^63-1")
    return TracedAnswer(**{name: record[name] for name in names})


@dataclass(frozen=True, slots=True)
class Pace:
    """What steps take at the least: `step_s` up to `best_batch` rows, and in proportion to the rows beyond."""

    step_s: float = 0.0
    best_batch: int = 1

    def seconds(self, rows: int) -> float:
        return self.step_s * max(1.0, rows / self.best_batch)


FAST = Pace()


class TraceExecutor:
    """An Executor around another one of the same process, which ends answers where its table says."""

    def __init__(self, inner: Executor, answers: Mapping[int, TracedAnswer], pace: Pace = FAST) -> None:
        """Wrap `inner`. Raises BadTable for a model that knows no end."""
        self._inner, self._answers, self._pace = inner, answers, pace
        self._eos = sorted(inner.spec.eos)
        if not self._eos:
            raise BadTable("the model has no end-of-sequence token, so no answer of a trace can end")

    @property
    def spec(self) -> ModelSpec:
        return self._inner.spec

    @property
    def can(self) -> Capabilities:
        return Capabilities(packs=self._inner.can.packs)

    @property
    def numerics_class(self) -> str:
        return f"{self._inner.numerics_class}/trace"

    @property
    def torch_threads(self) -> int:
        return self._inner.torch_threads

    @property
    def adapters(self) -> AdapterStore:
        return self._inner.adapters

    @property
    def page_bytes(self) -> int:
        return self._inner.page_bytes

    @property
    def kv_memory(self) -> KvMemory | None:
        return self._inner.kv_memory

    def run(
        self, step: StepInput, *, first: int = 0, last: int | None = None, hidden: torch.Tensor | None = None,
        layer_done: LayerDone | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """Run a step as `Executor.run` does, no faster than the pace."""
        ends_at = time.perf_counter() + self._pace.seconds(len(step.rows))
        done = self._inner.run(step, first=first, last=last, hidden=hidden, layer_done=layer_done)
        time.sleep(max(0.0, ends_at - time.perf_counter()))
        return done

    def sample(self, logits: torch.Tensor, draws: Sequence[SamplingArgs]) -> list[SampledToken | None]:
        """Sample as `Executor.sample` does, with the table's ends. Changes the logits of rows that the table knows."""
        answers = [self._answers.get(draw.sampling.seed) for draw in draws]
        known = [row for row, answer in enumerate(answers) if answer is not None]
        with torch.inference_mode():
            for row in known:
                logits[row, self._eos] = -torch.inf
        sampled = self._inner.sample(logits, draws)
        for row in known:
            answer = answers[row]
            if answer is not None and answer.ends(draws[row].position):
                sampled[row] = SampledToken(self._eos[0])
        return sampled

    def clear_pages(self, pages: list[int]) -> None:
        """Clear pages of the executor within."""
        self._inner.clear_pages(pages)

    def allocate_adapter_pages(self, pages: list[int]) -> None:
        """Let the executor within have these pages for adapters."""
        self._inner.allocate_adapter_pages(pages)
