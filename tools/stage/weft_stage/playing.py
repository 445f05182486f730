"""Requests in, times out: plays requests through an engine, whatever computes, and keeps what became of each.

The engine is beaten from the caller's thread, so that nothing but it runs. What it really did is witnessed
(`cpu_witness.py`): the adapter of each row of each step is compared with the one asked for, after the clock has
stopped.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from weft.artifacts.adapter_config import parse_adapter_config
from weft.domain.ids import Epoch
from weft.domain.machine import Closed, Connected, Kind, Peer, Received
from weft.domain.request import Ended, NoCapacity, Priority, Sampling, SessionHello, Start, Step
from weft_runner.errors import ArtifactUnknown
from weft_runner.model import AdapterFiles
from weft_runner.shell.engine import Engine, Output
from weft_stage.cpu_witness import Beat, Witness
from weft_stage.errors import EngineRefused

WHOLE = Sampling(ignore_eos=True)  # as many tokens as are asked for
SESSION = Peer(Kind.GATEWAY, "bench")  # that all requests belong to


@dataclass(frozen=True, slots=True)
class Ask:
    """A request: the adapter's digest ("" is the base), the prompt, and how many tokens to make.

    `salt`: prefixes are shared among those that have the same one.
    """

    adapter: str
    prompt: Sequence[int]
    tokens: int
    salt: str = ""
    priority: Priority = Priority.INTERACTIVE
    grammar: str = ""  # as the runner takes it; "": any text
    sampling: Sampling = WHOLE


@dataclass(slots=True)
class Life:
    """When a request was posted, and which tokens came when; seconds on a monotonic clock."""

    ask: Ask
    posted: float
    first: float = 0.0
    answer: list[int] = field(default_factory=list[int])
    at: list[float] = field(default_factory=list[float])

    @property
    def tokens(self) -> int:
        return len(self.answer)

    @property
    def ttft_s(self) -> float:
        return self.first - self.posted


@dataclass(frozen=True, slots=True)
class Played:
    """What became of some requests, in their order, and every beat of the engine meanwhile."""

    lives: Sequence[Life]
    beats: Sequence[Beat]
    wall_s: float

    @property
    def tokens(self) -> int:
        return sum(life.tokens for life in self.lives)


class Folders:
    """Adapters by digest, each in a folder. One folder may stand for many digests: they are then many adapters."""

    def __init__(self) -> None:
        self.paths: dict[str, Path] = {}

    def adapter(self, digest: str) -> AdapterFiles:
        """Return the files in the adapter's folder, as `Source.adapter`."""
        if digest not in self.paths:
            raise ArtifactUnknown(f"no folder is known for {digest}")
        folder = self.paths[digest]
        scales = parse_adapter_config((folder / "adapter_config.json").read_bytes())
        return AdapterFiles(folder / "adapter_model.safetensors", scales)

    def retain(self, digests: frozenset[str]) -> None:
        """Keep everything: nothing leaves the disk here."""

    def on_disk(self) -> tuple[str, ...]:
        return ()


class Player:
    """Plays requests, again and again, through the engine that `make` builds; it is told where iterations go to."""

    def __init__(self, make: Callable[[Callable[[Output], None]], Engine]) -> None:
        self._lives: dict[str, Life] = {}
        self._running: set[str] = set()
        self._count = 0
        self.engine = make(self._told)
        self.engine.post(Connected(SESSION, SessionHello("bench", "")))
        self.witness = Witness(self.engine)

    def play(
        self, asks: Sequence[Ask], *, streams: int | None = None, advanced: Callable[[int], None] = lambda _: None,
        between: Callable[[], None] | None = None,
    ) -> Played:  # fmt: skip
        """Serve all of them, first come first served, at most `streams` at a time; `advanced` hears of each that ends.

        `between` is called before every beat.
        Raises EngineRefused when one is refused or ends before its time, WrongAdapter when a row ran with another's.
        """
        self.witness.begin()
        waiting, lives = deque(asks), list[Life]()
        started = time.perf_counter()
        try:
            while waiting or self._running:
                while waiting and (streams is None or len(self._running) < streams):
                    lives.append(self._post(waiting.popleft()))
                before = len(self._running)
                if between is not None:
                    between()
                self.engine.run_once()
                if ended := before - len(self._running):
                    advanced(ended)
            wall_s = time.perf_counter() - started
        finally:
            self._forget()
        return Played(lives, self.witness.verified(), wall_s)

    def _post(self, ask: Ask) -> Life:
        self._count += 1
        key = str(self._count)
        start = Start(
            key, Epoch(1, self._count), tuple(ask.prompt), (), max_tokens=ask.tokens, reservation_tokens=ask.tokens,
            adapter=ask.adapter, sampling=replace(ask.sampling, grammar=ask.grammar), cache_salt=ask.salt,
            priority=ask.priority,
        )  # fmt: skip
        life = self._lives[key] = Life(ask, time.perf_counter())
        self._running.add(key)
        self.engine.post(Received(SESSION, start))
        return life

    def _forget(self) -> None:
        """End what a run, whole or not, has left unfinished: it must not run beside the next one."""
        if self._running:
            self.engine.post(Closed(SESSION))
            self.engine.post(Connected(SESSION, SessionHello("bench", "")))
        self._running.clear()
        self._lives.clear()

    def _told(self, output: Output) -> None:
        now = time.perf_counter()
        self.witness.ended(now)
        for _, message in output.sends:
            match message:
                case Step():
                    for sequence in message.sequences:
                        life = self._lives[sequence.request_id]
                        life.first = life.first or now
                        life.answer.extend(sequence.tokens)
                        life.at.append(now)
                        if sequence.finish is not None:
                            self._running.discard(sequence.request_id)
                case NoCapacity():
                    raise EngineRefused(f"no room for a request: {message.reason}, {message.free_pages} pages are free")
                case Ended():
                    raise EngineRefused(f"a request ended early: {message.reason.value}: {message.detail}")
                case _:
                    pass
