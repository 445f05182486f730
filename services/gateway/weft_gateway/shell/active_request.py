"""A request between submit and outcome: what was asked, its stream, and what its client has yet to be sent.

A client's request for `n` choices is n requests for the rest of the system, each placed, moved and finished by itself;
`Choices` holds them together for the one answer.
"""

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from weft.telemetry.logs import kv
from weft_gateway.core.events import Emit, Failure, Finish, FinishReason
from weft_gateway.core.routes import Route
from weft_gateway.core.stream import Stream
from weft_gateway.shell.clients import Predicted
from weft_gateway.shell.tokenizer import ModelTokenizer

MAX_PROMPT_CHARS = 4096  # of a prompt that the predictor sees


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are drawn, and what is told of them. `seed` is 64 bits; choice i of a request draws from (seed, i)."""

    seed: int
    temperature: float
    top_p: float
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()  # token, bias
    top_logprobs: int | None = None  # alternatives told beside each token; None: no log probabilities
    choice: int = 0


@dataclass(frozen=True, slots=True)
class Prepared:
    """One choice of a request that is valid, tokenised and allowed."""

    request_id: str  # unique: names the request in every log and message
    client_request_id: str  # what the client calls it
    namespace: str
    route: Route
    prompt_tokens: list[int]
    prompt_text: str  # for the predictor, at most MAX_PROMPT_CHARS
    max_tokens: int
    stops: tuple[str, ...]
    sampling: Sampling
    model_text: ModelTokenizer
    arrived: float  # on the shell's clock


class LiveRequest:
    """One live request. Its owner delivers and wakes; its consumer takes, when `Choices.news` says so."""

    def __init__(self, prepared: Prepared, predicted: Predicted, stream: Stream, choices: "Choices") -> None:
        self.prepared, self.predicted, self.stream, self.choices = prepared, predicted, stream, choices
        self.request_id = prepared.request_id
        self.first_token_at: float | None = None
        self.armed_for: float | None = None  # the hold deadline that the timer stands for
        self._timer: asyncio.TimerHandle | None = None
        self._said: list[Emit] = []

    @property
    def finish(self) -> Finish | None:
        return self.stream.finish

    def take(self) -> Emit | None:
        """Everything that has gathered for the client since the last time, as one; None: nothing has."""
        said, self._said = self._said, []
        if len(said) <= 1:
            return said[0] if said else None
        return Emit("".join([one.text for one in said]), tuple(told for one in said for told in one.told))

    def deliver(self, emit: Emit) -> None:
        """Something for the client."""
        self._said.append(emit)
        self.choices.wake()

    def wake(self) -> None:
        """Something else happened: admission, or the end."""
        self.choices.wake()

    def arm(self, now: float, expired: Callable[["LiveRequest"], None]) -> None:
        """Let the hold timer stand for the stream's present deadline."""
        if self._timer:
            self._timer.cancel()
            self._timer = None
        self.armed_for = deadline = self.stream.hold_deadline
        if deadline is not None:
            delay_s = max(0.0, deadline - now)
            self._timer = asyncio.get_running_loop().call_later(delay_s, expired, self)

    def about(self, **fields: object) -> dict[str, dict[str, object]]:
        """Key-values of a log event about this request."""
        return kv(request_id=self.request_id, model=self.prepared.route.model_name, **fields)


class Choices:
    """The choices of one answer, in their order. They end together as soon as one of them fails."""

    def __init__(self) -> None:
        self._lives: list[LiveRequest] = []
        self._wake = asyncio.Event()

    def add(self, live: LiveRequest) -> None:
        """The next choice."""
        self._lives.append(live)

    def wake(self) -> None:
        """Something happened to one of them."""
        self._wake.set()

    def __iter__(self) -> Iterator[LiveRequest]:
        return iter(self._lives)

    def __getitem__(self, index: int) -> LiveRequest:
        return self._lives[index]

    async def news(self, timeout_s: float | None = None) -> bool:
        """Wait for a sign of life of any choice; False when there was none in time. At the end it returns at once."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._wake.wait()
        except TimeoutError:
            return False
        if not self.over:
            self._wake.clear()
        return True

    @property
    def over(self) -> bool:
        """Every choice has ended, or one has failed. Asked at every step."""
        running = False
        for live in self._lives:
            finish = live.stream.finish
            if finish is None:
                running = True
            elif finish.failure:
                return True
        return not running

    @property
    def failure(self) -> Failure | None:
        """Of the first choice that failed."""
        return next((live.finish.failure for live in self._lives if live.finish and live.finish.failure), None)

    @property
    def gone(self) -> bool:
        """The client went away before the end."""
        ends = [live.finish for live in self._lives if live.finish]
        return self.failure is None and any(end.reason is FinishReason.CANCELLED for end in ends)
