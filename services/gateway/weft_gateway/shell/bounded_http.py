"""uvicorn's HTTP protocol with bounds on what a client can hold before and after a request.

- Bytes that the parser has taken without any event (a header, a trailer, a chunk's extension) are counted: 431.
- A request's head has to be complete in bounded time: 408.
- The rest of a body whose request is answered already is read for a bounded time, then the connection is closed.
- A client that reads nothing of its answer for too long is cut off, so no answer's task waits for it for ever.
- A request may be dismissed by its head: its answer is written at once or later, and its body is read and dropped.
- Connections are bounded. Beyond it a new one takes another's place (`core.connection_places`), or is a 503.

What two parsers could read differently is refused, and the connection ends. An offer of another protocol is ignored
(RFC 9110, 7.8), and its request's body is read. Trailers are dropped.
"""

import asyncio
import select
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from httptools import HttpParserError, HttpParserUpgrade, HttpRequestParser
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from weft_gateway.core import ConnectionPlaces
from weft_gateway.errors import BadRequest
from weft_gateway.shell.http_heads import check_head, without_offer

if TYPE_CHECKING:
    from weft_gateway.shell.early_refusals import EarlyRefusals

MAX_HEAD_BYTES = 64 << 10
HEAD_SECONDS = 20.0  # from a request's first byte, or the connection's start, to the end of its headers
REST_SECONDS = 5.0  # for the rest of a body whose request is answered: closed earlier, the answer may not be read
STALL_SECONDS = 60.0  # for a client that reads nothing while its answer waits
GONE_SECONDS = 1.0  # between looks for a client that has left behind a request sent ahead
_PIECE_BYTES = 4 << 10  # the bound's precision; what is sent ahead is parsed so far, and 157 small requests are 0.5 MB
_LEFT = getattr(select, "POLLRDHUP", 0)  # Linux's; elsewhere a connection that is reset is seen


class ConnectionBound(ConnectionPlaces["BoundedHttp"]):
    """The places of a gateway's connections."""


@dataclass(frozen=True, slots=True)
class Dismissal:
    """The answer to a request with an unwanted body, after `hold_s`. If `hold_s` is not 0, `end` is called once.

    Nothing more is read from the connection meanwhile. `closes`: it ends with the answer.
    """

    answer: bytes
    hold_s: float
    closes: bool
    end: Callable[[], None]


class _AnswerTransport:
    """The transport of an answer, which closes the connection once the request's body is read.

    Closed earlier, the kernel resets the connection, and the client may lose the answer.
    """

    def __init__(self, http: "BoundedHttp") -> None:
        self.write, self.is_closing = http.transport.write, http.transport.is_closing
        self.close = http.close_behind_body


class BoundedHttp(HttpToolsProtocol):
    """One connection, made by uvicorn for each client."""

    def __init__(self, *args: Any, bound: ConnectionBound, refusals: "EarlyRefusals", **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.closed = asyncio.Event()
        self._bound = bound
        self._head_bytes = 0  # since the parser's last event
        self._in_head = True
        self._head_timer: asyncio.TimerHandle | None = None
        self._rest_timer: asyncio.TimerHandle | None = None
        self._stall_timer: asyncio.TimerHandle | None = None
        self._gone_timer: asyncio.TimerHandle | None = None
        self._refusals, self._dismissed = refusals, False  # the present request is
        self._closes = False  # behind the body of the present request
        self._pending_dismissal: tuple[asyncio.TimerHandle, Dismissal] | None = None
        self._unread = b""  # behind requests that wait for their turn
        self._running: RequestResponseCycle | None = None
        self._answers: _AnswerTransport | None = None

    # ---------------------------------------------------------------- in

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override] (as uvicorn's)
        super().connection_made(transport)
        self._await_head()
        if len(self.connections) > self._bound.limit:
            present = self._bound.next_to_go()
            if present is None:
                self._refuse(HTTPStatus.SERVICE_UNAVAILABLE, "too_many_connections", _TOO_MANY)
                return
            present.give_way()
        self._rank()

    def give_way(self) -> None:
        """Close this connection without a request, as HTTP allows at any time."""
        self._bound.busy(self)
        self.transport.close()

    def _rank(self) -> None:
        """Tell the bound what this connection waits for, and start the deadline of an unfinished head.

        A head that is sent ahead of its turn has its deadline from the end of the answer before it.
        """
        if self._answering or self._pending_dismissal or self.transport.is_closing():
            self._bound.busy(self)
        elif self._in_head and self._head_bytes:
            self._bound.unfinished(self, self.client[0] if self.client else "")
            if self._head_timer is None:
                self._await_head()
        else:
            self._bound.idle(self)

    def data_received(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        self._unread += data
        self._read_on()
        if self.pipeline and not self.transport.is_closing():
            self.flow.pause_reading()
        self._rank()

    def _read_on(self) -> None:
        """Parse what has come, as far as no request waits for its turn."""
        data, end = self._unread, 0
        while end < len(data) and not self.pipeline and not self.transport.is_closing():
            piece = data[end : end + _PIECE_BYTES]
            end += len(piece)
            self._head_bytes += len(piece)
            self._parse(piece)
            if self._head_bytes > MAX_HEAD_BYTES:
                self._refuse(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, "headers_too_large", _TOO_LARGE)
        self._unread = data[end:]

    def _parse(self, piece: bytes) -> None:
        """Feed the parser.

        It skips the body of a request that offers another protocol, and stops behind the head. A new parser gets the
        same head without the offer, and then the rest.
        """
        while piece:
            try:
                self.parser.feed_data(piece)
            except HttpParserUpgrade as offer:
                piece = without_offer(self.parser, self.url, self.headers) + piece[offer.args[0] :]
                self.parser = HttpRequestParser(self)
                self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn's
            except HttpParserError as error:
                self.logger.warning("Invalid HTTP request received.")
                fault = error.__context__
                if not isinstance(fault, BadRequest):
                    reason = "HTTP/2 is not served without TLS" if "PRI" in str(error) else error
                    fault = BadRequest(f"The bytes are no valid HTTP request ({reason}); correct them.")
                self._refuse(fault.status, fault.code, fault.message)
                return
            else:
                return

    def on_headers_complete(self) -> None:
        parser = self.parser
        if self._pending_dismissal or self.transport.is_closing():
            raise BadRequest("Nothing is looked at behind the last answer of a connection.")
        check_head(parser, self.headers, fields := dict(self.headers))
        if parser.should_upgrade():
            if parser.get_method() == b"CONNECT":
                raise BadRequest("Expected another method, got CONNECT; this is no proxy.")
            return  # it comes again without the offer
        dismissal = None
        if (self._refusals.auth or self._refusals.routes.limited) and not self._answering:
            dismissal = self._refusals.dismissal(parser.get_method(), self.url, fields)
        self._dismissed = dismissal is not None
        if dismissal is None:
            super().on_headers_complete()  # or the target is none
        self.headers = []  # trailers follow, which nobody reads
        self._head_bytes, self._in_head = 0, False
        self._head_timer = _cancelled(self._head_timer)
        if dismissal is None:
            if self.pipeline and not self._gone_timer:
                self._gone_timer = self.loop.call_later(GONE_SECONDS, self._check_client)
            return
        if not parser.should_keep_alive():
            dismissal = replace(dismissal, closes=True)
        if dismissal.hold_s:
            self.flow.pause_reading()
            self._pending_dismissal = self.loop.call_later(dismissal.hold_s, self._answer_held), dismissal
        else:
            self._answer_dismissed(dismissal)

    def on_body(self, body: bytes) -> None:
        self._head_bytes = 0
        if not self._dismissed:
            super().on_body(body)

    def on_message_complete(self) -> None:
        if self._in_head:  # its head comes again
            return
        self._head_bytes, self._in_head = 0, True
        self._rest_timer = _cancelled(self._rest_timer)
        if self._closes:
            self.transport.close()
        if not self._dismissed:
            super().on_message_complete()
        elif not self._pending_dismissal:
            self._await_request()

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._head_timer, self._rest_timer, self._stall_timer, self._gone_timer):
            _cancelled(timer)
        if self._pending_dismissal:
            _cancelled(self._pending_dismissal[0])
            self._pending_dismissal[1].end()
        self._bound.busy(self)
        if self._running:  # it is told, rather than a request that waits behind it
            self.cycle = self._running
        super().connection_lost(exc)
        self.closed.set()

    def close_soon(self, idle_s: float) -> None:
        """Close after `idle_s` without a request.

        The next answer asks the client to leave. An answer whose head is out could not ask for it: closed behind that
        one, the connection would be lost under a request that the client sends at once.
        """
        self.timeout_keep_alive = idle_s
        if not self._answering and self._in_head and self.timeout_keep_alive_task:
            self._unset_keepalive_if_required()
            self.timeout_keep_alive_task = self.loop.call_later(idle_s, self.timeout_keep_alive_handler)

    # ---------------------------------------------------------------- out

    def on_response_complete(self) -> None:
        if not self._in_head and not self.pipeline:  # what is being read is the body of what was answered
            self._await_rest()
        super().on_response_complete()
        if self._unread:
            self._read_on()
        self._rank()

    def _answer_held(self) -> None:
        assert self._pending_dismissal is not None, "it waits for its turn"
        (timer, dismissal), self._pending_dismissal = self._pending_dismissal, None
        timer.cancel()
        dismissal.end()
        self._answer_dismissed(dismissal)
        self.flow.resume_reading()
        if self._in_head:
            self._await_request()
        self._rank()

    def _answer_dismissed(self, dismissal: Dismissal) -> None:
        self.server_state.total_requests += 1
        self.transport.write(dismissal.answer)
        if dismissal.closes:
            self.close_behind_body()
        elif not self._in_head:
            self._await_rest()

    def close_behind_body(self) -> None:
        """Close the connection once the body of the answered request is read, or its time is over."""
        self._closes = True
        if self._in_head or self.pipeline:
            self.transport.close()
        else:
            self._await_rest()

    def _await_rest(self) -> None:
        _cancelled(self._rest_timer)
        self._rest_timer = self.loop.call_later(REST_SECONDS, self.transport.close)

    def _await_request(self) -> None:
        """Wait for the next request, as after an answer of uvicorn."""
        if not self.transport.is_closing():
            self._unset_keepalive_if_required()
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )

    def pause_writing(self) -> None:
        self.flow.pause_writing()
        self._watch_stall()

    def resume_writing(self) -> None:
        self._stall_timer = _cancelled(self._stall_timer)
        self.flow.resume_writing()

    def _watch_stall(self) -> None:
        left = self.transport.get_write_buffer_size()
        self._stall_timer = self.loop.call_later(STALL_SECONDS, self._stalled, left)

    def _stalled(self, seen_bytes: int) -> None:
        """Cut off a client that has read nothing since. A slow reader is watched further."""
        if self.transport.get_write_buffer_size() < seen_bytes:
            self._watch_stall()
        else:
            self.transport.abort()

    # ---------------------------------------------------------------- the head's bounds

    def _await_head(self) -> None:
        self._head_timer = self.loop.call_later(HEAD_SECONDS, self._head_overdue)

    def _head_overdue(self) -> None:
        self._refuse(HTTPStatus.REQUEST_TIMEOUT, "timeout", _TOO_SLOW)

    @property
    def _answering(self) -> bool:
        return bool(self.cycle) and not self.cycle.response_complete

    @property
    def _next_to_answer(self) -> bool:
        """Whether the message that is being read is the next to be answered, and nothing of its answer is out."""
        if self._in_head:
            return not self._answering
        return not (self._dismissed or self.pipeline or self.cycle.response_started)

    def _refuse(self, status: int, code: str, message: str) -> None:
        """Send the reason where it would be no part of another answer, and close."""
        if self._pending_dismissal:
            self._answer_held()
        elif self._next_to_answer and not self.transport.is_closing():
            body, headers = BadRequest(message, code=code, status=status).body(), {"content-type": "application/json"}
            self.transport.write(response_bytes(status, headers | {"connection": "close"}, body))
        self.transport.close()

    # ---------------------------------------------------------------- clients that leave

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running = cycle
        self._answers = self._answers or _AnswerTransport(self)
        cycle.transport = self._answers  # pyright: ignore[reportAttributeAccessIssue]
        super()._start_asgi_task(cycle, app)

    def _check_client(self) -> None:
        """While a request waits for its turn nothing is read, and the end of what the client sends is not seen."""
        self._gone_timer = None
        if self.pipeline and not self.transport.is_closing():
            poll = select.poll()
            poll.register(self.transport.get_extra_info("socket").fileno(), _LEFT)
            if poll.poll(0):
                self.transport.abort()
            else:
                self._gone_timer = self.loop.call_later(GONE_SECONDS, self._check_client)


_TOO_LARGE = f"The request's headers are larger than {MAX_HEAD_BYTES} bytes; send fewer or shorter ones."
_TOO_MANY = "This gateway has as many connections as it may have, and none of them is idle; try again later."
_TOO_SLOW = "The request's headers did not arrive in time; send them at once."


def response_bytes(status: int, headers: Mapping[str, str], body: bytes) -> bytes:
    """Return a whole answer as it is sent."""
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    head = f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\n{lines}content-length: {len(body)}\r\n\r\n"
    return head.encode("latin-1") + body


def _cancelled(timer: asyncio.TimerHandle | None) -> None:
    if timer:
        timer.cancel()
