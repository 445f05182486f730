"""A request between submit and outcome: what was asked, its stream, and what its client has yet to be sent."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from weft.telemetry.logs import kv
from weft_gateway.clients import Predicted
from weft_gateway.core.detokenise import BytesOf
from weft_gateway.core.events import Finish
from weft_gateway.core.stream import Stream
from weft_gateway.routes import Route

MAX_PROMPT_CHARS = 4096  # of a prompt that the predictor sees


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are drawn; `seed` is 64 bits."""

    seed: int
    temperature: float
    top_p: float


@dataclass(frozen=True, slots=True)
class Prepared:
    """A request that is valid, tokenised and allowed."""

    request_id: str  # unique: names the request in every log and message
    client_request_id: str  # what the client calls it
    namespace: str
    route: Route
    prompt_tokens: list[int]
    prompt_text: str  # for the predictor, at most MAX_PROMPT_CHARS
    max_tokens: int
    stops: tuple[str, ...]
    sampling: Sampling
    bytes_of: BytesOf
    arrived: float  # on the shell's clock


class LiveRequest:
    """One live request. Its consumer awaits `news`; its owner delivers and wakes."""

    def __init__(self, prepared: Prepared, predicted: Predicted, stream: Stream) -> None:
        self.prepared, self.predicted, self.stream = prepared, predicted, stream
        self.request_id = prepared.request_id
        self.first_token_at: float | None = None
        self.armed_for: float | None = None  # the hold deadline that the timer stands for
        self._timer: asyncio.TimerHandle | None = None
        self._text: list[str] = []
        self._wake = asyncio.Event()

    @property
    def finish(self) -> Finish | None:
        return self.stream.finish

    async def news(self, timeout_s: float | None = None) -> str | None:
        """Wait for a sign of life, then give all text that has gathered; None when nothing came in time.

        After the end it returns at once.
        """
        try:
            async with asyncio.timeout(timeout_s):
                await self._wake.wait()
        except TimeoutError:
            return None
        if not self.finish:
            self._wake.clear()
        text = "".join(self._text)
        self._text.clear()
        return text

    def deliver(self, text: str) -> None:
        """Text for the client."""
        self._text.append(text)
        self._wake.set()

    def wake(self) -> None:
        """Something else happened: admission, or the end."""
        self._wake.set()

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
