"""The machine of batches: when and where a line runs, the effect of an answer, and the end of a batch.

A line is waiting, at a gateway, on its way to the store, or finished. Only stored lines are finished. After a restart
everything else follows from the store and the input, and lines at gateways are waiting again.

Lines go to the gateway with the most room, while it has room and fewer than `lines_in_flight` are out in total.
Namespaces take turns. Within a namespace the oldest batch with a runnable line goes first, and its lines in order. A
line released by its gateway, or lost with its gateway's stream, waits again: at first without a pause, then with
doubling pauses. An answer of 429 or 5xx is also tried again, `TRIES` times in all. Any other answer, and the last of
these, is the line's result.

A batch ends when all its lines are finished, when it is cancelled, or when its window is over. Then no more lines are
sent, and lines at gateways are cancelled. Once the store has the results on their way, its files are written.
"""

import heapq
from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from weft.domain.batch import BatchStatus, CancelLines, LineEnds, LineResult, LinesHello
from weft.domain.machine import Closed, Connected, Peer, Received, Send, Tick
from weft.domain.timers import TimerQueue

TRIES = 3  # of a line answered by 429 or 5xx
LOSSES = 10  # of gateways by a line: a line that crashes every gateway must not do so for a day
PAUSE_S, MAX_PAUSE_S = 1.0, 60.0
RETRY_S = 2.0  # after the first answer of 429 or 5xx
MAX_WAITING = 1_000  # lines of a batch that wait again; at this limit no new line is sent
MAX_STORING_BYTES = 64 << 20  # answers on their way to the store; at this limit no line is sent


@dataclass(frozen=True, slots=True)
class Added:
    """An unfinished batch. Without a total its input is still to be read. With an ending it only has to end.

    `order`: lower for older batches. `expires_s`: on the machine's clock.
    """

    batch_id: str
    namespace: str
    order: tuple[int, str]
    expires_s: float
    ending: BatchStatus | None = None


@dataclass(frozen=True, slots=True)
class Validated:
    """The input of a batch is read: lines 1..total, some already finished."""

    batch_id: str
    total: int
    finished: Iterable[int]


@dataclass(frozen=True, slots=True)
class CancelAsked:
    """The tenant cancels the rest of a batch."""

    batch_id: str


@dataclass(frozen=True, slots=True)
class LinesStored:
    """The store has received the results of some lines."""

    lines: Sequence[tuple[str, int]]


@dataclass(frozen=True, slots=True)
class BatchGone:
    """A batch has ended: its files are written, or its input was invalid."""

    batch_id: str


@dataclass(frozen=True, slots=True)
class Validate:
    """Read the input of a batch."""

    batch_id: str


@dataclass(frozen=True, slots=True)
class Give:
    """Send a line to a gateway. If it cannot be read now, the gateway releases it."""

    peer: Peer
    batch_id: str
    line: int


@dataclass(frozen=True, slots=True)
class LineFailed:
    """A line without an answer."""

    batch_id: str
    line: int
    code: str
    message: str


@dataclass(frozen=True, slots=True)
class StoreResult:
    """Make a result durable, then report it with LinesStored."""

    result: LineResult | LineFailed


@dataclass(frozen=True, slots=True)
class Finalize:
    """Write a batch's files. Its status will be `ending`."""

    batch_id: str
    ending: BatchStatus


Event = Added | Validated | CancelAsked | LinesStored | BatchGone | Connected | Closed | Received | Tick
Effect = Validate | Give | Send | StoreResult | Finalize


@dataclass(slots=True)
class LineCounters:
    """Counts of events since the process started."""

    sent: int = 0
    retried: int = 0
    released: int = 0
    lost: int = 0


@dataclass(slots=True)
class NamespaceFigures:
    """The open batches of a namespace, and the places of their unfinished lines if their input is read."""

    batches: int = 0
    waiting: int = 0
    running: int = 0
    storing: int = 0


@dataclass(slots=True)
class _History:
    """The history of a line that ran before and has no result."""

    failures: int = 0
    losses: int = 0
    pause_s: float = 0.0  # before it runs again


@dataclass(slots=True)
class _Book:
    """A batch. Lines below `cursor` outside of the other places are finished."""

    batch_id: str
    namespace: str
    order: tuple[int, str]
    ending: BatchStatus | None = None
    total: int | None = None  # None: the input is being read
    finished: bytearray = field(default_factory=bytearray)  # by line; [0] is not used
    finished_lines: int = 0
    cursor: int = 1
    flying: dict[int, Peer] = field(default_factory=dict[int, Peer])
    storing: dict[int, int] = field(default_factory=dict[int, int])  # line: bytes
    back: list[tuple[float, int]] = field(default_factory=list[tuple[float, int]])  # a heap: (when, line)
    history: dict[int, _History] = field(default_factory=dict[int, _History])
    finalized: bool = False

    def has_new(self) -> bool:
        if self.total is None:
            return False
        while self.cursor <= self.total and self.finished[self.cursor]:
            self.cursor += 1
        return self.cursor <= self.total and len(self.back) < MAX_WAITING

    def take(self, now: float) -> int:
        """Take a runnable line: a line that waits again before a new line."""
        if self.back and self.back[0][0] <= now:
            return heapq.heappop(self.back)[1]
        assert self.has_new(), "a batch without a runnable line"
        self.cursor += 1
        return self.cursor - 1


@dataclass(slots=True)
class _Gateway:
    max_lines: int
    flying: set[tuple[str, int]] = field(default_factory=set[tuple[str, int]])

    @property
    def free(self) -> int:
        return self.max_lines - len(self.flying)


class Batches:
    """The machine of batches, as described in the module's text."""

    def __init__(self, *, lines_in_flight: int) -> None:
        self._limit = lines_in_flight
        self._books: dict[str, _Book] = {}
        self._gateways: dict[Peer, _Gateway] = {}
        self._ready: OrderedDict[str, set[str]] = OrderedDict()  # namespace: batches with a runnable line
        self._timers: TimerQueue[tuple[str, str]] = TimerQueue()  # ("expire" | "wait", batch)
        self._out = self._storing_bytes = 0
        self.counters = LineCounters()

    # ------------------------------------------------------------------------------------------ the machine

    def handle(self, event: Event, now: float) -> list[Effect]:
        effects: list[Effect] = []
        match event:
            case Received():
                self._received(event.peer, event.message, now, effects)
            case LinesStored():
                self._stored(event.lines, effects)
            case Tick():
                self._due(now, effects)
            case Added():
                self._add(event, effects)
            case Validated():
                self._validated(event, now, effects)
            case CancelAsked():
                if book := self._books.get(event.batch_id):
                    self._end(book, BatchStatus.CANCELLED, effects)
            case BatchGone():
                self._drop(event.batch_id)
            case Connected():
                assert isinstance(event.hello, LinesHello), "a gateway begins with its hello"
                self._gateways[event.peer] = _Gateway(event.hello.max_lines)
            case Closed():
                self._lose_gateway(event.peer, now, effects)
        self._give(now, effects)
        return effects

    def next_deadline(self) -> float | None:
        return self._timers.next()

    def is_at(self, peer: Peer, batch_id: str, line: int) -> bool:
        """Return whether a gateway has the line, or is to get it."""
        return (batch_id, line) in gateway.flying if (gateway := self._gateways.get(peer)) else False

    def gateways(self) -> int:
        return len(self._gateways)

    def namespaces(self) -> dict[str, NamespaceFigures]:
        by_namespace: defaultdict[str, NamespaceFigures] = defaultdict(NamespaceFigures)
        for book in self._books.values():
            figures = by_namespace[book.namespace]
            figures.batches += 1
            if book.total is not None and book.ending is None:
                flying, storing = len(book.flying), len(book.storing)
                figures.waiting += book.total - book.finished_lines - flying - storing
                figures.running += flying
                figures.storing += storing
        return by_namespace

    # ------------------------------------------------------------------------------------------ batches

    def _add(self, event: Added, effects: list[Effect]) -> None:
        if event.batch_id in self._books:
            return
        book = self._books[event.batch_id] = _Book(event.batch_id, event.namespace, event.order)
        if event.ending is not None:
            self._end(book, event.ending, effects)
            self._settle(book, effects, unread=True)
            return
        self._timers.set(("expire", book.batch_id), event.expires_s)
        effects.append(Validate(book.batch_id))

    def _validated(self, event: Validated, now: float, effects: list[Effect]) -> None:
        if (book := self._books.get(event.batch_id)) is None:
            return
        book.total, book.finished = event.total, bytearray(event.total + 1)
        for line in event.finished:
            book.finished[line] = 1
        book.finished_lines = sum(book.finished)
        self._settle(book, effects)
        self._refresh(book, now)

    def _end(self, book: _Book, ending: BatchStatus, effects: list[Effect]) -> None:
        """End a batch: no more lines run. Its files are written once its results on their way are stored."""
        if book.ending is not None:
            return
        book.ending = ending
        for timer in ("expire", "wait"):
            self._timers.clear((timer, book.batch_id))
        cancelled: defaultdict[Peer, list[int]] = defaultdict(list)
        for line, peer in book.flying.items():
            self._gateways[peer].flying.discard((book.batch_id, line))
            cancelled[peer].append(line)
        effects.extend(Send(peer, CancelLines(book.batch_id, lines)) for peer, lines in cancelled.items())
        self._out -= len(book.flying)
        book.flying.clear()
        book.back.clear()
        self._unready(book)
        self._settle(book, effects)

    def _settle(self, book: _Book, effects: list[Effect], *, unread: bool = False) -> None:
        """Order a batch's files if nothing of it is left to wait for. `unread`: an ending without a read of the
        input."""
        if book.finalized or book.storing or (book.total is None and not unread):
            return
        complete = book.total is not None and book.finished_lines == book.total
        if complete and book.ending in (None, BatchStatus.EXPIRED):
            book.ending = BatchStatus.COMPLETED
        if book.ending is not None:
            book.finalized = True
            effects.append(Finalize(book.batch_id, book.ending))

    def _drop(self, batch_id: str) -> None:
        book = self._books.pop(batch_id, None)
        assert book is None or book.finalized or book.total is None, "a dropped batch has ended, or never began"
        for timer in ("expire", "wait"):
            self._timers.clear((timer, batch_id))

    def _due(self, now: float, effects: list[Effect]) -> None:
        while (key := self._timers.take_due(now)) is not None:
            timer, batch_id = key
            if timer == "expire":
                self._end(self._books[batch_id], BatchStatus.EXPIRED, effects)
            else:
                self._refresh(self._books[batch_id], now)

    # ------------------------------------------------------------------------------------------ lines

    def _received(self, peer: Peer, message: object, now: float, effects: list[Effect]) -> None:
        gateway = self._gateways[peer]
        match message:
            case LinesHello():
                gateway.max_lines = message.max_lines
            case LineEnds():
                for result in message.results:
                    if book := self._remove_line(peer, result.batch_id, result.line):
                        self._answered(book, result, now, effects)
                for released in message.released:
                    if book := self._remove_line(peer, released.batch_id, released.line):
                        self.counters.released += 1
                        self._wait_again(book, released.line, now)
            case _:
                raise AssertionError(f"a gateway does not send {type(message).__name__}")

    def _remove_line(self, peer: Peer, batch_id: str, line: int) -> _Book | None:
        """Remove the line from a gateway. Return its batch; None: it was not there, or its batch has ended."""
        book = self._books.get(batch_id)
        if book is None or book.flying.get(line) != peer:
            return None
        del book.flying[line]
        self._gateways[peer].flying.discard((batch_id, line))
        self._out -= 1
        return book

    def _answered(self, book: _Book, result: LineResult, now: float, effects: list[Effect]) -> None:
        again = result.status == 429 or result.status >= 500
        if again:
            history = book.history.setdefault(result.line, _History())
            history.failures += 1
            if history.failures < TRIES:
                self.counters.retried += 1
                self._back_at(book, result.line, now + RETRY_S * 2 ** (history.failures - 1), now)
                return
        self._store(book, result.line, result, len(result.body), effects)

    def _store(self, book: _Book, line: int, result: LineResult | LineFailed, size: int, effects: list[Effect]) -> None:
        book.history.pop(line, None)
        book.storing[line] = size
        self._out += 1
        self._storing_bytes += size
        effects.append(StoreResult(result))

    def _stored(self, lines: Iterable[tuple[str, int]], effects: list[Effect]) -> None:
        for batch_id, line in lines:
            book = self._books[batch_id]
            self._storing_bytes -= book.storing.pop(line)
            self._out -= 1
            book.finished[line] = 1
            book.finished_lines += 1
            self._settle(book, effects)

    def _lose_gateway(self, peer: Peer, now: float, effects: list[Effect]) -> None:
        """Let the lines of a gateway wait again, since its stream is over."""
        for batch_id, line in sorted(self._gateways[peer].flying):
            book = self._remove_line(peer, batch_id, line)
            assert book is not None, "a line of a gateway belongs to no batch"
            self.counters.lost += 1
            history = book.history.setdefault(line, _History())
            history.losses += 1
            if history.losses >= LOSSES:
                reason = f"{LOSSES} gateways were lost while they ran the line"
                self._store(book, line, LineFailed(batch_id, line, "gateway_lost", reason), len(reason), effects)
            else:
                self._wait_again(book, line, now)
        del self._gateways[peer]

    def _wait_again(self, book: _Book, line: int, now: float) -> None:
        history = book.history.setdefault(line, _History())
        due_s, history.pause_s = now + history.pause_s, min(max(PAUSE_S, 2 * history.pause_s), MAX_PAUSE_S)
        self._back_at(book, line, due_s, now)

    def _back_at(self, book: _Book, line: int, due_s: float, now: float) -> None:
        heapq.heappush(book.back, (due_s, line))
        self._refresh(book, now)

    # ------------------------------------------------------------------------------------------ whose turn it is

    def _refresh(self, book: _Book, now: float) -> None:
        """Record whether the batch has a runnable line, or the time of the next."""
        due = bool(book.back) and book.back[0][0] <= now
        if book.ending is None and (due or book.has_new()):
            self._ready.setdefault(book.namespace, set()).add(book.batch_id)
        else:
            self._unready(book)
        if book.back and not due and book.ending is None:
            self._timers.set(("wait", book.batch_id), book.back[0][0])
        else:
            self._timers.clear(("wait", book.batch_id))

    def _unready(self, book: _Book) -> None:
        if batches := self._ready.get(book.namespace):
            batches.discard(book.batch_id)
            if not batches:
                del self._ready[book.namespace]

    def _give(self, now: float, effects: list[Effect]) -> None:
        while self._ready and self._out < self._limit and self._storing_bytes < MAX_STORING_BYTES:
            peer, gateway = max(
                self._gateways.items(), key=lambda item: (item[1].free, item[0].name), default=(None, None)
            )
            if peer is None or gateway is None or gateway.free <= 0:
                return
            namespace = next(iter(self._ready))
            book = min((self._books[batch_id] for batch_id in self._ready[namespace]), key=lambda book: book.order)
            self._ready.move_to_end(namespace)
            line = book.take(now)
            book.flying[line] = peer
            gateway.flying.add((book.batch_id, line))
            self._out += 1
            self.counters.sent += 1
            self._refresh(book, now)
            effects.append(Give(peer, book.batch_id, line))

    # ------------------------------------------------------------------------------------------ laws

    def check(self) -> None:
        self.check_lines()
        self.check_turns()

    def check_lines(self) -> None:
        """Check that each line has exactly one place. Check the sums against the places."""
        out = stored_bytes = 0
        for book in self._books.values():
            back = [line for _, line in book.back]
            places = [*book.flying, *book.storing, *back]
            assert len(set(places)) == len(places), f"{book.batch_id}: a line is in two places"
            assert all(line < book.cursor for line in places), f"{book.batch_id}: a line out before its turn"
            assert not any(book.finished[line] for line in places), f"{book.batch_id}: a finished line runs"
            assert not any(book.finished[line] for line in book.history), f"{book.batch_id}: a finished line is kept"
            assert book.finished_lines == sum(book.finished), f"{book.batch_id}: finished lines are miscounted"
            if book.total is not None and book.ending is None:
                begun = sum(book.finished[: book.cursor]) + len(places)
                assert begun == book.cursor - 1, f"{book.batch_id}: a line below the cursor is nowhere"
            if book.ending is not None:
                assert not book.flying, f"{book.batch_id} has ended and runs"
                assert not back, f"{book.batch_id} has ended and waits"
            if book.finalized:
                assert not book.storing, f"{book.batch_id}: a result after the files were ordered"
            out += len(book.flying) + len(book.storing)
            stored_bytes += sum(book.storing.values())
        flying = {(book.batch_id, line): peer for book in self._books.values() for line, peer in book.flying.items()}
        at_gateways = {line: peer for peer, gateway in self._gateways.items() for line in gateway.flying}
        assert flying == at_gateways, "batches and gateways disagree on the running lines"
        assert (out, stored_bytes) == (self._out, self._storing_bytes), "the sums of sent lines are wrong"
        assert out <= self._limit, f"{out} lines are out, the limit is {self._limit}"

    def check_turns(self) -> None:
        """Check that a batch has a turn if and only if it has a runnable line. Check the timers of lines that wait for
        a time."""
        ready = {batch_id for batches in self._ready.values() for batch_id in batches}
        assert all(self._ready.values()), "a namespace without a batch has a turn"
        for book in self._books.values():
            waits = ("wait", book.batch_id) in self._timers
            may_run = book.ending is None and (book.has_new() or (bool(book.back) and not waits))
            assert (book.batch_id in ready) == may_run, f"{book.batch_id}: its turn does not fit its lines"
            if waits:
                assert self._timers.get(("wait", book.batch_id)) == book.back[0][0], f"{book.batch_id}: a wrong timer"
