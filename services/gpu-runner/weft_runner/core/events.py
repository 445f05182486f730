"""Events and effects of the runner's machine beyond those that every machine has (`weft.domain.machine`).

Events: results of the adapter pool's work, an executor that can take a step, a step that is complete, the operator's
drain. Effects: actions for the adapter pool, a step to run, and the status that probes show.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

from weft.domain.adapter import Tier
from weft.domain.ids import Epoch
from weft.domain.kv_transfer import KvHello
from weft.domain.machine import Close, Closed, Connected, Peer, Received, Send, Tick
from weft.domain.request import EndReason, FinishReason, Start, TokenLogprob
from weft.domain.runner import RunnerFigures
from weft_runner.core.batch import Batch
from weft_runner.core.sampling import SampledToken
from weft_runner.core.sequence import Sequence
from weft_runner.core.token_mask import GrammarState
from weft_runner.core.token_times import SequenceTimes

# ---------------------------------------------------------------- events


@dataclass(frozen=True, slots=True)
class Fetched:
    """An adapter is on disk. `n_bytes`: what it takes on the device, exactly, if the fetch was to measure it.

    `host_bytes`: of its copy in host memory (None: no copy was ordered).
    """

    digest: str
    n_bytes: int | None
    host_bytes: int | None
    seconds: float = 0.0  # that the fetch took


@dataclass(frozen=True, slots=True)
class FetchFailed:
    """A fetch has failed. `permanent`: the artifact is wrong, so that another attempt does not help."""

    digest: str
    reason: EndReason
    detail: str
    permanent: bool


@dataclass(frozen=True, slots=True)
class Loaded:
    """An adapter is in its slot. `host_bytes`: of its host copy (None: none); `seconds`: what fetch and load took."""

    digest: str
    rank: int
    n_bytes: int
    host_bytes: int | None
    seconds: float


@dataclass(frozen=True, slots=True)
class LoadFailed:
    """A load has failed. `permanent`: the artifact is wrong, so that another attempt does not help."""

    digest: str
    reason: EndReason
    detail: str
    permanent: bool


@dataclass(frozen=True, slots=True)
class FoundOnDisk:
    """An earlier process left these adapters on disk, in order of last use. The first event."""

    digests: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Drain:
    """Admit no sequence and end every present sequence with DRAINED (or serve again).

    `migrate_s`: how long the scheduler may order them to other runners first.
    """

    on: bool
    migrate_s: float = 0.0


@dataclass(frozen=True, slots=True)
class StepSlot:
    """The executor can take a step. `depth`: how many may be in flight at a time; `free`: how many more may be now.

    `previous`: the step in flight, whose tokens are not known yet, that this one is to follow.
    """

    depth: int = 1
    free: int = 1
    previous: "RunStep | None" = None


_NONE: Mapping[str, list[TokenLogprob]] = MappingProxyType({})
_NO_DRAFTS: Mapping[str, list[SampledToken]] = MappingProxyType({})


class StepResults(NamedTuple):
    """Results of a step by request: a token for each row that samples, or why a row failed.

    `prompts`: log probabilities of prompt tokens behind those that a row has fed, as far as it asks for them.
    `late`: rows whose masks were not there in time and which have no result. `forwards`: passes that the step took.
    `checked`: of rows with a draft all that they sampled: the guesses that were right, and one token behind them.
    """

    tokens: Mapping[str, SampledToken]
    failures: Mapping[str, str]
    prompts: Mapping[str, list[TokenLogprob]] = _NONE
    late: tuple[str, ...] = ()
    forwards: int = 1
    checked: Mapping[str, list[SampledToken]] = _NO_DRAFTS


class StepDone(NamedTuple):
    """A step is complete; `ms` since it was scheduled. A row whose sequence has left meanwhile may have no result."""

    step: "RunStep"
    results: StepResults
    ms: float


@dataclass(frozen=True, slots=True)
class SwapDone:
    """A copy of `pages` pages to host memory or back is complete; `seconds`: of copying, not of waiting between steps.

    No copy that was dropped is reported.
    """

    number: int
    pages: int
    seconds: float


@dataclass(frozen=True, slots=True)
class SwapFailed:
    """A copy ended early: no memory, or another failure that `detail` names."""

    number: int
    detail: str


@dataclass(frozen=True, slots=True, eq=False)
class GrammarCompiled:
    """The state of an epoch's grammar behind its emitted tokens, or why there is none (`fault`)."""

    peer: Peer
    request_id: str
    epoch: Epoch
    state: GrammarState | None
    fault: str = ""


AdapterEvent = Fetched | FetchFailed | Loaded | LoadFailed | FoundOnDisk
SwapEvent = SwapDone | SwapFailed
StepEvent = StepSlot | StepDone
Event = Connected | Received | Closed | Tick | AdapterEvent | Drain | StepEvent | SwapEvent | GrammarCompiled

REPORT = ("report",)  # the timer of a report that is due at once

# ---------------------------------------------------------------- effects


@dataclass(frozen=True, slots=True)
class Fetch:
    """Bring an adapter to disk, and into host memory if asked, in the background.

    `urgent`: a sequence waits for it. `measure`: report what it takes on the device.
    """

    digest: str
    to_host: bool = False
    urgent: bool = False
    measure: bool = False


@dataclass(frozen=True, slots=True)
class Load:
    """Read an adapter that is on disk and convert it for a device slot, in the background.

    `to_host`: keep a copy in host memory. `pages`: those that were allocated for it, exactly what it takes.
    """

    digest: str
    slot: int
    to_host: bool = True
    pages: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Unload:
    """A slot is empty from now on."""

    slot: int


@dataclass(frozen=True, slots=True)
class DropHost:
    """Drop the host copy of an adapter."""

    digest: str


@dataclass(frozen=True, slots=True)
class Retain:
    """The complete list of digests to keep on disk."""

    digests: frozenset[str]


@dataclass(frozen=True, slots=True)
class AdapterPages:
    """Give these pages to adapters, before the loads into them. Their sequence data is not needed."""

    pages: list[int]


@dataclass(frozen=True, slots=True)
class SwapOut:
    """Copy these pages to host memory, under the numbers `hosts`, in parallel to steps.

    They are not written to, and have no other owner meanwhile.
    """

    number: int
    pages: tuple[int, ...]
    hosts: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SwapIn:
    """Copy these pages of host memory to these device pages, in parallel to steps."""

    number: int
    hosts: tuple[int, ...]
    pages: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class DropSwap:
    """End these copies, complete or not. Their host pages are free when the following actions run."""

    numbers: tuple[int, ...]
    hosts: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class OpenKvStream:
    """Open a stream to a runner that is to take KV. Connected follows with its KvReady, or Closed."""

    peer: Peer
    address: str
    hello: KvHello


@dataclass(frozen=True, slots=True)
class SendKv:
    """Send these pages to a peer, in order with its messages. The first page has this number in its sequence.

    `layer_by_layer`: the next step writes them too; a layer leaves when that step has computed it. Else they are
    complete for as long as it takes, or nobody wants them any more (`DropKv`).
    """

    peer: Peer
    request_id: str
    epoch: Epoch
    first_page: int
    pages: tuple[int, ...]
    layer_by_layer: bool = False


@dataclass(frozen=True, slots=True)
class ReceiveKv:
    """Write pages of this sequence, from this number on, to these pages as they arrive on the peer's stream.

    Its KvComplete says how many tokens they hold: the pages of these have arrived whole, once each, or the stream ends.
    """

    peer: Peer
    request_id: str
    epoch: Epoch
    first_page: int
    pages: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class DropKv:
    """Stop sending this epoch to the peer and writing its arriving pages, before the following actions run."""

    peer: Peer
    request_id: str
    epoch: Epoch


@dataclass(frozen=True, slots=True)
class CompileGrammar:
    """Make the grammar's state after these tokens, in parallel to steps. GrammarCompiled follows.

    `ends`: tokens beside the model's own that end an answer of the grammar.
    """

    peer: Peer
    request_id: str
    epoch: Epoch
    grammar: str
    emitted: tuple[int, ...]
    ends: tuple[int, ...] = ()


class PromptComputed(NamedTuple):
    """An answer has its first token, that no runner computed before; `ttft_s`: since the request arrived.

    `cached_tokens`: of the prompt, reused instead of computed.
    """

    prompt_tokens: int
    ttft_s: float
    cached_tokens: int


class SequenceEnded(NamedTuple):
    """A sequence has left. `finish`: how its request ended, as far as the runner knows; None: it goes on elsewhere.

    Times are the machine's, in seconds.
    """

    start: Start
    finish: FinishReason | None
    answer_tokens: int  # those of earlier epochs included
    arrived: float
    times: SequenceTimes
    ended_at: float
    preemptions: int  # here


class AdapterBrought(NamedTuple):
    """An adapter has come a tier nearer: from the depot to disk and host memory, or from there to the device."""

    to_device: bool
    seconds: float


class AdapterUse(NamedTuple):
    """The nearest place of an adapter, and how many sequences run with it and wait for it. `pinned`: never evicted."""

    digest: str
    tier: Tier
    rank: int
    pinned: bool
    running: int
    waiting: int


class AdaptersChanged(NamedTuple):
    """Changes of adapters since the last report."""

    adapters: tuple[AdapterUse, ...]


class RunStep(NamedTuple):
    """Run a batch: `sequences` are those of its rows, in order; `clear_pages` have changed hands and are cleared first.

    `keys`: tokens in KV of its decode rows. `departures`: of sequences from the pool so far. `awaited`: it has an
    interactive row. `stands`: it may run again as it is.
    """

    batch: Batch
    sequences: tuple[Sequence, ...]
    clear_pages: list[int]
    keys: int
    departures: int
    awaited: bool
    stands: bool


class RunnerStatus(NamedTuple):
    """What probes and metrics take of every report. `not_ready`: why requests should not come here, else "".

    `drained`: nothing is left on a runner that drains.
    """

    figures: RunnerFigures
    not_ready: str
    drained: bool


Action = Load | Unload | DropHost | Retain | Fetch
SwapAction = SwapOut | SwapIn | DropSwap
KvAction = OpenKvStream | SendKv | ReceiveKv | DropKv | Close
Fact = PromptComputed | SequenceEnded | AdapterBrought | AdaptersChanged  # for metrics and traces alone
Effect = Send | Action | SwapAction | KvAction | AdapterPages | CompileGrammar | RunStep | RunnerStatus | Fact
