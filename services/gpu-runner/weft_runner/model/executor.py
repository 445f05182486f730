"""The interface of every executor: run layers [first, last) of a step, with a completion mark per layer.

The seam serves pipeline stages (a stage runs its own layers), layer-wise KV transfer (a page may leave when its layer
is done) and weight streaming; a whole step is layers [0, L). Executors own no policy: pages, slots and rows are given.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

from weft.domain.model.spec import ModelSpec
from weft_runner.core.drafts.drafter import Search
from weft_runner.core.sampling import SampledToken
from weft_runner.errors import ExecutorLost
from weft_runner.model.adapter_store import AdapterStore
from weft_runner.model.kv_memory import KvMemory
from weft_runner.model.layer_progress import LayerProgress
from weft_runner.model.sampling import SamplingArgs
from weft_runner.model.step import StepInput
from weft_runner.offload.plan import PassTime
from weft_runner.offload.stages import StageState

Rows = Any  # [rows, width] in fp32: an array of the executor's own kind, which its caller only hands on
LayerDone = Callable[[int], None]  # called with the layer's index when its keys, values and output are complete


class StepHandle(Protocol):
    """A launched step, and the tokens that it will sample."""

    def result(self) -> list[SampledToken | None]:
        """Wait for the step. One token for each row that samples, see `Executor.sample`."""
        ...


class AsyncExecutor(Protocol):
    """An executor whose steps run while the host does something else, the next one already launched behind them.

    Its `run` returns before the step is done. Tokens that a step takes are those drawn last. Each step is drawn from
    before the next one is launched, and its rows of logits are gone then.
    """

    @property
    def keeps_tokens(self) -> bool:
        """A step can have another one launched behind it, which may take its tokens."""
        ...

    def can_follow(self, step: StepInput) -> bool:
        """The tokens of this step of decode rows can be the input of the next one as they are."""
        ...

    def follow(self, step: StepInput) -> Rows:
        """Run the next step of the same rows, a position further each (`StepInput.advance`), on the tokens drawn last.

        Its logits, as `Executor.run`.
        """
        ...

    def draw(self, logits: Rows, draws: Sequence[SamplingArgs]) -> StepHandle:
        """Sample from the step that was launched last, as `Executor.sample` does; returns before the step is done."""
        ...


class Pipelined(Protocol):
    """An executor of several stages: while one works on a step the stage before it works on the next.

    `depth`: steps that are in flight when every stage has work. They land in the order in which they were launched, and
    every other command takes effect, on every stage, between the steps before and the steps after it.
    """

    @property
    def depth(self) -> int: ...

    def depth_for(self, tokens: Callable[[], int]) -> int:
        """Return how many steps are to be in flight, at most `depth`, where the running ones compute `tokens()`."""
        ...

    def launch(self, step: StepInput, draws: Sequence[SamplingArgs]) -> StepHandle:
        """Run a whole step and sample; returns before the step is done. None of its rows is in a step in flight."""
        ...


class OffloadsStage(Protocol):
    """One stage of a pipeline, or all of one, whose weights come from disk."""

    @property
    def stage_state(self) -> StageState: ...

    def predicted(self, tokens: int) -> PassTime | None:
        """Predict a pass of `tokens` rows of one token each; None: the machine was not measured."""
        ...


class RankProcesses(Protocol):
    """The other ranks. See `parallel.worker_group.WorkerGroup`."""

    @property
    def pids(self) -> tuple[int, ...]: ...
    def broadcast(self, *command: Any) -> None: ...
    def listen(self, on_event: Callable[[int, Any], None]) -> None: ...


class Ranks(Protocol):
    """An executor of several processes. See `parallel.executor.MultiProcessExecutor`."""

    @property
    def kv_shard(self) -> KvMemory | None: ...
    @property
    def kv_addresses(self) -> tuple[str, ...]: ...
    @property
    def kv_grid(self) -> str: ...
    @property
    def others(self) -> RankProcesses: ...
    def watch(self, on_lost: Callable[[ExecutorLost], None]) -> None: ...


class PackedAdapters(Protocol):
    """Adapters that are packed on the engine's thread, between steps."""

    complete: Callable[[Iterator[None]], None]


class Capabilities(NamedTuple):
    """What an executor does beyond running a step while it is called; None: it does not.

    `follows`: it computes beside the host, one step behind the other; `pipelined`: in several stages; `ranks`: in
    several processes. `stages`: weights of each of its stages come from disk, whose states it tells any thread;
    `stage`: its own one. `layer_counter`: its own, raised while a step runs. `packs`: its adapters. `close`: ends what
    it has started, once the engine has ended.
    `drafts`: finds what texts go on with; a row of several tokens has the bits of the tokens one by one, and rows of
    logits are numpy's, so that a step checks drafts.
    """

    follows: AsyncExecutor | None = None
    pipelined: Pipelined | None = None
    ranks: Ranks | None = None
    stages: Callable[[], Sequence[StageState]] | None = None
    stage: OffloadsStage | None = None
    layer_counter: LayerProgress | None = None
    packs: PackedAdapters | None = None
    close: Callable[[], None] = lambda: None
    drafts: Search | None = None

    @property
    def launches(self) -> bool:
        """Say whether steps are not complete when a call returns."""
        return self.pipelined is not None or self.follows is not None


class Executor(Protocol):
    """One model on one device. Not thread-safe: the engine's thread owns it."""

    @property
    def spec(self) -> ModelSpec: ...

    @property
    def can(self) -> Capabilities: ...

    @property
    def numerics_class(self) -> str:
        """Sequences may move between runners of one class and continue bit for bit, if the class promises it."""
        ...

    @property
    def torch_threads(self) -> int:
        """How many threads torch's operators may use on the engine's thread, if it computes with torch."""
        ...

    @property
    def adapters(self) -> AdapterStore:
        """Adapters by slot; a step's plan names slots."""
        ...

    @property
    def page_bytes(self) -> int:
        """Bytes of one KV page, for all layers."""
        ...

    @property
    def kv_memory(self) -> KvMemory | None:
        """For copies of KV to host memory and back; None: the pages are spread over several processes."""
        ...

    def run(
        self, step: StepInput, *, first: int = 0, last: int | None = None, hidden: Rows | None = None,
        layer_done: LayerDone | None = None,
    ) -> Rows:  # fmt: skip
        """Run layers [first, last) and write their keys and values to the step's pages.

        `hidden`: [tokens, H] of the layer before `first`; None embeds the tokens (first = 0). Returns hidden
        [tokens, H] when `last` < L, else logits [rows that sample, V] in row order, see `model.pooling` for rows that
        pool.
        """
        ...

    def sample(self, logits: Rows, draws: Sequence[SamplingArgs]) -> list[SampledToken | None]:
        """A token for each row of the logits that `run` returned, see `model.sampling`; None if a row has none."""
        ...

    def clear_pages(self, pages: list[int]) -> None:
        """Pages that changed hands: nothing of their last owner stays."""
        ...

    def allocate_adapter_pages(self, pages: list[int]) -> None:
        """These pages belong to adapters now: no sequence reads or writes them before they are cleared again."""
        ...
