"""Our drafts beside arctic-inference's suffix cache, on the same answers in the same order: replayed, not computed."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

from weft.domain.ids import Epoch
from weft.domain.request import Sampling, Start
from weft_bench.cpu_engine import Ask, Subject
from weft_bench.peers.arctic_worker import Answer, Replayed, replay
from weft_bench.peers.worker import Worker, command
from weft_kernels.cpu.library import load
from weft_runner.core import Batch, Row, Search
from weft_runner.core import Sequence as PoolSequence
from weft_runner.core.drafts.drafter import Drafter
from weft_runner.model.draft_search import NativeSearch
from weft_stage.lines import Line, Origin
from weft_stage.playing import SESSION

MAX_GUESSES = 16  # of a step: the default of arctic-inference's plugin
MAX_TOKENS = 1 << 16  # of a request
ALL = -1  # answers
STEP_MS = 10.0  # about m135's: how long the drafter rests where it finds nothing, and how much it reads, follow it
Bar = Callable[[str, int], AbstractContextManager[Callable[[int], None]]]


@dataclass(frozen=True, slots=True)
class Kept:
    """What was replayed, and the bytes that the answers take at its end."""

    replayed: Replayed
    n_bytes: int


class Suffixes:
    """The runner's drafter, for one request at a time; `Drafts`. Every guess that it weighs pays: no step is run."""

    def __init__(self, search: Search) -> None:
        self.drafter, self._number = Drafter(search), 0

    def begin(self, prompt: Sequence[int]) -> None:
        self._number += 1
        start = Start(
            str(self._number), Epoch(1, self._number), tuple(prompt), (), max_tokens=MAX_TOKENS,
            reservation_tokens=MAX_TOKENS, adapter="task", sampling=Sampling(),
        )  # fmt: skip
        self._sequence = PoolSequence(
            start, SESSION, SESSION.name, admitted=self._number, now=0.0, max_context_tokens=MAX_TOKENS
        )
        self._row = Row(start.request_id, start.adapter, 1, samples=True)
        self._batch = Batch((self._row,), 0, number=self._number)

    def draft(self, most: int) -> Sequence[int]:
        batch, key = self._batch, self._sequence.key
        if not self.drafter.rests(batch):
            batch = self.drafter.extend(batch, {key: self._sequence}, lambda _: most, len, STEP_MS, 0.0)
        (self._row,) = batch.rows
        return self._row.drafted

    def take(self, tokens: Sequence[int]) -> None:
        if self._row.drafted:
            self.drafter.learn(self._row, tokens)
        self._sequence.tokens.extend(tokens)

    def end(self) -> None:
        self.drafter.remove(self._sequence, 0.0, ended=True)


def arctic_figures(
    python: Path, subject: Subject, asks: Mapping[str, Sequence[Ask]], warm: int, origin: Origin, bar: Bar
) -> Iterator[Line]:
    """Replay the answers to each task's requests in both. `python`: it has the peer. Raises PeerFailed."""
    search = NativeSearch(load().native)
    with TemporaryDirectory(prefix="weft-bench-") as folder:
        work = {"most": MAX_GUESSES}
        with Worker("arctic-inference", command(python, "arctic_worker"), work, Path(folder) / "log") as peer:
            origin = replace(origin, versions=f"{origin.versions}, {subject.executor}, {peer.versions}")
            for task, asked in asks.items():
                with bar(f"{task}, replayed", 3) as advanced:
                    lives = subject.play(asked, streams=8).lives
                    answers = [(life.ask.prompt, life.answer) for life in lives]
                    drafts = Suffixes(search)
                    ours = Kept(replay(drafts, answers, warm, MAX_GUESSES), drafts.drafter.answers.n_bytes)
                    advanced(1)
                    whole = _theirs(peer, answers, warm, ALL)
                    advanced(1)
                    bounded = _at_least(ours.n_bytes, peer, answers, warm, ours.n_bytes * len(answers) // whole.n_bytes)
                    advanced(1)
                case = f"quickstart, {task}, drafts of {len(answers) - warm} answers after {warm}"
                yield from _lines(case, ours, whole, origin)
                yield from _lines(f"{case}, in our bytes", ours, bounded, origin)


def _theirs(peer: Worker, answers: Sequence[Answer], warm: int, cached: int) -> Kept:
    got = peer.ask({"answers": answers, "warm": warm, "cached": cached})
    del got["seconds"]
    return Kept(n_bytes=got.pop("bytes"), replayed=Replayed(**got))


def _at_least(n_bytes: int, peer: Worker, answers: Sequence[Answer], warm: int, cached: int) -> Kept:
    """Let it keep as many answers, `cached` or more, as take `n_bytes` of its memory."""
    for most in range(max(1, cached), len(answers)):
        if (found := _theirs(peer, answers, warm, most)).n_bytes >= n_bytes:
            return found
    return _theirs(peer, answers, warm, ALL)


def _lines(case: str, ours: Kept, theirs: Kept, origin: Origin) -> Iterator[Line]:
    """Put ours beside theirs, as the baseline."""
    one, other = ours.replayed, theirs.replayed
    yield origin.line(case, "tokens a step, ours / theirs", one.tokens_a_step / other.tokens_a_step, "x", target=">= 1")
    for metric, unit, our, their in (
        ("tokens a step", "tokens", one.tokens_a_step, other.tokens_a_step),
        ("guesses a step", "guesses", one.guesses / one.steps, other.guesses / other.steps),
        ("a draft, median", "us", one.draft_median_us, other.draft_median_us),
        ("a draft, mean", "us", one.draft_mean_us, other.draft_mean_us),
        ("keeping a step's tokens, mean", "us", one.keep_us, other.keep_us),
        ("answers kept", "KiB", ours.n_bytes / 1024, theirs.n_bytes / 1024),
    ):
        yield origin.line(case, metric, our, unit, baseline=their)
