"""One long-lived bidirectional stream per pair of processes, and how it comes back.

The rule that keeps this small: what a stream carries is *state that can be told again*. A link that breaks drops what
was queued; on the next connection `hello()` tells everything that still counts. So there is no sequence number, no
replay buffer and no unbounded queue: a queue that fills up breaks the link, and the hello, which no queue bounds,
repairs it.

A link to a peer of the control plane reconnects for as long as its process lives (pauses are bounded and jittered): a
restarted peer has to be found again without anybody's help.
"""

import asyncio
import logging
import random
import sys
from collections import deque
from collections.abc import AsyncIterator, Callable, Generator, Iterable
from contextlib import contextmanager, suppress
from typing import Any, Generic, Protocol, TypeVar

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from weft.telemetry.logs import kv
from weft.wire.channels import SecureChannel, options_to
from weft.wire.errors import PeerError, report_peer_error
from weft.wire.roles import Role
from weft.wire.tls import Tls

Out = TypeVar("Out")
In = TypeVar("In")
log = logging.getLogger(__name__)

MIN_PAUSE_S, MAX_PAUSE_S = 0.05, 1.0
LOGGED_REASONS = 8
SEND_QUEUE = 20_000  # messages on their way to a peer, beside what its hello is answered with
# A server's first word: the handler runs (a failed call has no such metadata). Either side says by its metadata that
# it takes messages that follow another one in its envelope; versions before say "1", or nothing.
TAKES_FOLLOWING = "2"
ACCEPTED, CALLED = ("weft-accepted", TAKES_FOLLOWING), ("weft-called", TAKES_FOLLOWING)
MAX_FOLLOWING, MAX_JOINED_BYTES = 63, 64 << 10  # of one envelope: each has gRPC's cost, 100 us at either end, once


class SendQueue(Generic[Out]):
    """Messages on their way out: bounded, ordered, closed once. Iterate it to send; overflow closes it.

    `joins`: the peer takes envelopes with `following` messages. What waits together then goes as one.
    """

    def __init__(self, limit: int = SEND_QUEUE) -> None:
        self._messages = deque[Out]()
        self._ready = asyncio.Event()
        self._patience: asyncio.TimerHandle | None = None
        self._limit = limit
        self.closed = self.overflowed = self.joins = False

    def put(self, message: Out, *, patience_s: float = 0.0) -> bool:
        """Queue a message. Returns False (and is closed from then on) when the peer does not keep up.

        It may wait so long for another one to go with, if the peer takes several as one.
        """
        if self.closed:
            return False
        if len(self._messages) >= self._limit:
            self.overflowed = True
            self.close()
            return False
        self._messages.append(message)
        if not (patience_s and self.joins):
            self._ready.set()
        elif self._patience is None and not self._ready.is_set():
            self._patience = asyncio.get_running_loop().call_later(patience_s, self._ready.set)
        return True

    @contextmanager
    def unbounded(self) -> Generator[None]:
        """Let the block queue messages that do not count against the limit: the sender bounds them by itself."""
        limit, self._limit = self._limit, sys.maxsize
        try:
            yield
        finally:
            self._limit = limit + len(self._messages)

    def close(self) -> None:
        """Close the queue to messages; what is queued is still delivered to the iterator."""
        self.closed = True
        self._ready.set()

    async def __aiter__(self) -> AsyncIterator[Out]:
        while True:
            await self._ready.wait()
            if not self._messages:
                return  # it is closed
            message = self._next()
            if not (self._messages or self.closed):
                self._ready.clear()  # what comes while this one is sent may have patience again
            if self._patience is not None:
                self._patience.cancel()
                self._patience = None
            yield message

    def _next(self) -> Out:
        """Take the next message, with what may follow it in its envelope. A message may be in other queues, too."""
        messages = self._messages
        first: Any = messages.popleft()
        if not (self.joins and messages):
            return first
        size, following = first.ByteSize(), list[Any]()
        while messages and len(following) < MAX_FOLLOWING:
            size += messages[0].ByteSize()  # pyright: ignore[reportAttributeAccessIssue] (an envelope's, where it joins)
            if size > MAX_JOINED_BYTES:
                break
            following.append(messages.popleft())
        if not following:
            return first
        joined = type(first)()
        joined.CopyFrom(first)
        joined.following.extend(following)
        return joined


def unjoined(envelope: Any) -> Iterable[Any]:
    """Return an envelope and the envelopes joined in it. Raises PeerError."""
    following = getattr(envelope, "following", ())
    if len(following) > MAX_FOLLOWING:
        raise PeerError(f"{len(following)} messages follow one, expected at most {MAX_FOLLOWING}")
    return (envelope, *following) if following else (envelope,)


class Opener(Protocol):
    """A generated stub's stream-stream method."""

    def __call__(self, request_iterator: Any, /, *, metadata: Any = None) -> Any: ...


class ClientStream(Generic[Out, In]):
    """The client's end of a stream with automatic reconnection, for one owner on one event loop.

    `open` is the stub's method, `hello()` returns what has to be told first on every connection, `on_message` takes
    each message in order, `on_up`/`on_down` (optional) mark the connection's beginning and end. What `on_up` sends
    does not count against the queue's limit. Callbacks must not block. A PeerError of `on_message` ends the
    connection, any other exception `run()`. `joins`: the envelopes that it sends have `following` ones.
    """

    def __init__(
        self,
        name: str,
        open: Opener,  # noqa: A002 (it opens)
        *,
        hello: Callable[[], Iterable[Out]],
        on_message: Callable[[In], None],
        on_up: Callable[[], None] | None = None,
        on_down: Callable[[str], None] | None = None,
        joins: bool = False,
    ) -> None:
        self._name, self._open, self._hello, self._on_message = name, open, hello, on_message
        self._joins = joins
        self._on_up, self._on_down = on_up, on_down
        self._queue: SendQueue[Out] | None = None
        self._call: Any = None
        self._abandoned_for = ""
        self._closed = asyncio.Event()
        self._logged = set[str]()  # why it does not come up: each reason is logged once, a few at most
        self.up = False

    def send(self, message: Out, *, patience_s: float = 0.0) -> bool:
        """Queue a message on the present connection. Returns False when there is none (the next hello will tell).

        It may wait so long for another one to go with.
        """
        return self._queue is not None and self._queue.put(message, patience_s=patience_s)

    def reconnect(self) -> None:
        """End the present connection: on the next one both sides tell again what counts."""
        if self._queue is not None:
            self._queue.close()

    def abandon(self, reason: str) -> None:
        """End the present connection at this end alone, whatever the peer still says on it."""
        if self._call is not None:
            self._abandoned_for = reason
            self._call.cancel()

    def close(self) -> None:
        """End the stream and `run()`."""
        self._closed.set()
        if self._queue is not None:
            self._queue.close()

    async def run(self) -> None:
        """Connect, pump, reconnect, until closed."""
        pause_s = MIN_PAUSE_S
        while not self._closed.is_set():
            was_up = await self._connection()
            pause_s = MIN_PAUSE_S if was_up else min(pause_s * 2, MAX_PAUSE_S)
            with suppress(TimeoutError):
                jitter = random.uniform(0.5, 1.0)  # noqa: S311 (no secret)
                await asyncio.wait_for(self._closed.wait(), pause_s * jitter)

    async def _connection(self) -> bool:
        """Run one connection from hello to its end. Returns whether the peer was there and said nothing wrong."""
        queue: SendQueue[Out] = SendQueue()
        call = self._open(_after_hello(list(self._hello()), queue), metadata=(CALLED,))
        self._queue, self._call, reason, broken = queue, call, "closed by the peer", False
        try:
            if accepted := await accepted_by(call):
                queue.joins = self._joins and accepted == TAKES_FOLLOWING
                self._mark_up()
            async for message in call:
                for part in unjoined(message):
                    self._on_message(part)
        except grpc.aio.AioRpcError as error:
            reason = f"{error.code().name}: {error.details()}"
        except (PeerError, DecodeError) as error:
            reason, broken = f"it broke the contract: {error}", True
            report_peer_error(self._name, _as_peer_error(error))
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if not self._abandoned_for or (task is not None and task.cancelling()):
                raise
            reason = self._abandoned_for
        finally:
            self._queue, self._call, self._abandoned_for = None, None, ""
            queue.close()
            call.cancel()
        was_up, self.up = self.up, False
        if was_up:
            log.info("link down", extra=kv(link=self._name, reason=reason))
            if self._on_down:
                self._on_down(reason)
        elif not self._closed.is_set() and reason not in self._logged and len(self._logged) < LOGGED_REASONS:
            self._logged.add(reason)
            log.warning("link does not come up", extra=kv(link=self._name, reason=reason))
        return was_up and not broken

    def _mark_up(self) -> None:
        self.up = True
        self._logged.clear()
        log.info("link up", extra=kv(link=self._name))
        if self._on_up and self._queue is not None:
            with self._queue.unbounded():
                self._on_up()


async def accepted_by(call: Any) -> str | None:
    """Wait for a server's first word: TAKES_FOLLOWING where it does, None if the call has failed."""
    return dict(await call.initial_metadata() or ()).get(ACCEPTED[0])


async def _after_hello(hello: Iterable[Out], queue: SendQueue[Out]) -> AsyncIterator[Out]:
    """Send the hello, then the queue. The hello is as long as what it tells, which has bounds of its own; the queue's
    bound is for what follows."""
    for message in hello:
        yield message
    async for message in queue:
        yield message


async def serve_stream(
    requests: AsyncIterator[In],
    context: "grpc.aio.ServicerContext[In, Out]",
    queue: SendQueue[Out],
    on_message: Callable[[In], None],
    *,
    joins: bool = False,
) -> AsyncIterator[Out]:
    """The server's end of a stream: hands each request to `on_message`, yields the queue until either side ends.

    An exception of `on_message` ends the stream with that exception. The caller's `finally` learns of every end.
    `joins`: the envelopes of the queue have `following` ones.
    """
    queue.joins = joins and CALLED in map(tuple, context.invocation_metadata() or ())
    await context.send_initial_metadata((ACCEPTED,))
    reader = asyncio.create_task(_read(requests, queue, on_message))
    try:
        async for message in queue:
            yield message
        if queue.overflowed:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "the peer does not read fast enough")
        if reader.done():
            reader.result()
    finally:
        reader.cancel()


async def _read(requests: AsyncIterator[In], queue: SendQueue[Out], on_message: Callable[[In], None]) -> None:
    try:
        async for message in requests:
            for part in unjoined(message):
                on_message(part)
    except DecodeError as error:
        raise _as_peer_error(error) from error
    finally:
        queue.close()


def _as_peer_error(error: PeerError | DecodeError) -> PeerError:
    return error if isinstance(error, PeerError) else PeerError("bytes that are no message of the contract")


def channel(
    address: str, tls: Tls | None = None, peer: Role | None = None, *, namespace: str = "", hurried: bool = True
) -> grpc.aio.Channel:
    """Open a channel with Weft's keepalive and bounds. With `tls` its other end has to be a `peer`, whatever its
    address, and a runner one of pools of `namespace`; without, it is plain text, as on loopback. `hurried`: requests
    wait for what comes over it."""
    if tls is None:
        return grpc.aio.insecure_channel(address, options=options_to(peer, hurried=hurried))
    assert peer is not None, "a TLS channel checks its peer's role"
    return SecureChannel(address, tls, peer, namespace=namespace, hurried=hurried)
