"""What the answers to a client's call have for it. They end together as soon as one of them fails."""

import asyncio
from collections.abc import Sequence

from weft.domain.request import FinishReason, TokenLogprob
from weft_gateway.core.events import Emit, Failure, Finish, PreparedRequest


class PendingAnswer:
    """One answer's side towards the client: what has gathered since the last chunk, and the end.

    `prompt_logprobs`: of every token of the prompt, None for the first one; empty where they are not asked for, not
    here yet, or another answer's (`PreparedRequest.sampling_of`).
    """

    def __init__(self) -> None:
        self.finish: Finish | None = None
        self.prompt_logprobs: Sequence[TokenLogprob | None] = ()
        self._pending: list[Emit] = []

    def add(self, emit: Emit) -> None:
        if emit.prompt_logprobs:
            self.prompt_logprobs = emit.prompt_logprobs
        else:
            self._pending.append(emit)

    def take(self) -> Emit | None:
        """Everything that has gathered since the last time, as one; None: nothing has."""
        pending, self._pending = self._pending, []
        if len(pending) <= 1:
            return pending[0] if pending else None
        logprobs = tuple(logprob for one in pending for logprob in one.logprobs)
        tokens = tuple(token for one in pending for token in one.tokens)
        text = "".join([one.text for one in pending])
        return Emit(pending[0].request_id, text, logprobs, pending[-1].answer_tokens, tokens)


class ResponseGroup:
    """The answers to a call, in their order, and the consumer that waits for them.

    `requests`: one for each prompt of the call; the answers of the first prompt come first.
    """

    def __init__(self, requests: Sequence[PreparedRequest]) -> None:
        self.requests = requests
        self.answers = tuple(PendingAnswer() for request in requests for _ in range(request.n))
        self._event = asyncio.Event()

    def wake(self) -> None:
        """One of the answers has something new."""
        self._event.set()

    async def wait(self, timeout_s: float | None = None) -> bool:
        """Wait for something new; False: there was nothing in time. At the end it returns at once."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._event.wait()
        except TimeoutError:
            return False
        if not self.over:
            self._event.clear()
        return True

    @property
    def over(self) -> bool:
        """Every answer has ended, or one has failed. Asked at every step."""
        running = False
        for answer in self.answers:
            if answer.finish is None:
                running = True
            elif answer.finish.failure:
                return True
        return not running

    @property
    def failure(self) -> Failure | None:
        """The failure of the first answer that failed."""
        return next((one.finish.failure for one in self.answers if one.finish and one.finish.failure), None)

    @property
    def client_gone(self) -> bool:
        """The client went away before the end."""
        ends = [one.finish for one in self.answers if one.finish]
        return self.failure is None and any(end.reason is FinishReason.CANCELLED for end in ends)

    @property
    def prompt_tokens(self) -> int:
        return sum(len(request.prompt) for request in self.requests)

    @property
    def completion_tokens(self) -> int:
        return sum(one.finish.outcome.completion_tokens for one in self.answers if one.finish)
