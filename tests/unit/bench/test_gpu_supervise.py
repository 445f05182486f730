"""A worker that dies, hangs or loses its device costs its own case; what was told stays, what was not is written so."""

import signal
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from weft_bench.errors import NotReady
from weft_bench.gpu import main
from weft_bench.gpu_amounts import TINY
from weft_bench.gpu_keeper import Keeper, Table
from weft_bench.gpu_messages import Ended, Hello, Message, Outcome, Told
from weft_bench.gpu_page import raw_path
from weft_bench.gpu_plan import Plan
from weft_bench.gpu_supervise import GRACE_S, Clock, side_by_side, supervise
from weft_bench.lines import Origin, read

HERE = Origin("make gpu-bench", "a GPU", "torch 2")
PLAN = Plan(TINY, "tiny", "tiny")
Script = dict[str, Callable[[], Iterator[Message | None]]]


class Played:
    """A worker that plays what a script says of each case; None: nothing comes in time."""

    def __init__(self, script: Script, hello: Message | None = None) -> None:
        self._script, self._said = script, iter([hello or Hello(HERE)])
        self.ended = False

    def ask(self, name: str, seconds: float) -> None:
        self._said = self._script[name]()

    def receive(self, timeout_s: float) -> Message | None:
        try:
            return next(self._said)
        except StopIteration:
            raise EOFError from None

    def end(self) -> None:
        self.ended = True


class Time:
    """A clock that a hanging case moves on."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def run(script: Script, *, budget_s: float = 100.0, time: Time | None = None) -> tuple[list[Message], list[Played]]:
    workers: list[Played] = []

    def start() -> Played:
        workers.append(Played(script))
        return workers[-1]

    clock = Clock(budget_s, lambda _: 10.0, time or Time())
    return list(supervise(deque(script), start, clock)), workers


def fine(name: str) -> Callable[[], Iterator[Message | None]]:
    return lambda: iter([Ended(name, 1.0)])


def test_one_worker_runs_all_cases() -> None:
    told, workers = run({"a": fine("a"), "b": fine("b")})
    assert told == [Hello(HERE), Ended("a", 1.0), Ended("b", 1.0)]
    assert [worker.ended for worker in workers] == [True]


def test_a_process_that_dies_costs_its_case_alone() -> None:
    line = HERE.line("c", "m", 1.0, "ms")
    told, workers = run({"a": lambda: iter([Told(line)]), "b": fine("b")})
    assert [type(message).__name__ for message in told] == ["Hello", "Told", "Ended", "Hello", "Ended"]
    assert isinstance(told[2], Ended)
    assert "process ended" in told[2].error
    assert len(workers) == 2


def test_a_case_that_hangs_is_stopped_after_its_time_and_some_grace() -> None:
    time = Time()

    def hang() -> Iterator[None]:
        for _ in range(100):
            time.now += 1.0
            yield None

    told, workers = run({"a": hang, "b": fine("b")}, time=time)
    assert isinstance(told[1], Ended)
    assert told[1].error == f"it was stopped after {10 + GRACE_S:.0f} s"
    assert (len(workers), workers[0].ended) == (2, True)


def test_a_lost_device_is_left_behind_and_a_failed_case_is_not() -> None:
    script: Script = {
        "a": lambda: iter([Ended("a", 1.0, "bad address", lost=True)]),
        "b": lambda: iter([Ended("b", 1.0, "a mistake")]),
        "c": fine("c"),
    }
    told, workers = run(script)
    assert [message.name for message in told if isinstance(message, Ended)] == ["a", "b", "c"]
    assert len(workers) == 2


def test_nothing_is_begun_without_time_for_it() -> None:
    told, workers = run({"a": fine("a")}, budget_s=1.0)
    assert told == [Ended("a", 0.0, "no time was left for it")]
    assert workers == []


def test_a_worker_that_cannot_begin_ends_the_run_with_its_reason() -> None:
    clock = Clock(100.0, lambda _: 10.0, Time())
    run_ = supervise(deque("ab"), lambda: Played({}, Ended("", 0.0, "no GPU", lost=True)), clock)
    with pytest.raises(NotReady, match="no GPU"):
        list(side_by_side([run_]))


def test_several_runs_share_the_names() -> None:
    names, clock = deque("abcd"), Clock(100.0, lambda _: 10.0, Time())
    script: Script = {name: fine(name) for name in "abcd"}
    told = list(side_by_side([supervise(names, lambda: Played(script), clock) for _ in range(2)]))
    assert sorted(message.name for message in told if isinstance(message, Ended)) == list("abcd")


def test_figures_are_kept_as_they_come_and_rows_without_one_as_not_measured(tmp_path: Path) -> None:
    keeper, row = Keeper(PLAN, tmp_path), PLAN.rows("attention")[0]
    keeper.take(Hello(HERE))
    keeper.take(Told(HERE.line(row.case, row.metric, 7.0, row.unit)))
    assert [line.value for line in read(raw_path(tmp_path))] == [7.0]
    keeper.take(Ended("attention", 3.0, "a mistake"))
    keeper.close([])
    lines = read(raw_path(tmp_path))
    assert len(lines) == len(PLAN.rows("attention"))
    assert [line.value for line in lines].count(None) == len(lines) - 1
    assert keeper.told() == 1
    assert "not measured" in (tmp_path / "gpu.md").read_text()


def test_the_table_puts_shares_together_and_tells_failures(capsys: pytest.CaptureFixture[str]) -> None:
    table = Table()
    for message in (Outcome("lora 0/2", "x", ""), Outcome("lora 1/2", "y", "first at [3]"), Ended("lora 0/2", 1.0)):
        table.take(message)
    table.take(Ended("lora 1/2", 2.0))
    assert table.told([]) == 1
    said = capsys.readouterr().out
    assert "lora              1 right    1 wrong     3.0 s  WRONG" in said
    assert "first at [3]" in said
    assert Table().told(["lora"]) == 1


@pytest.mark.parametrize(
    ("words", "said"), [(["bench", "--cases", "beauty"], "choose among decode"), (["bench", "--shape", "9B"], "9B")]
)
def test_wrong_words_are_refused(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


@pytest.fixture
def same_signals() -> Iterator[None]:
    """A command may handle them as it likes."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.mark.usefixtures("same_signals")
@pytest.mark.parametrize("what", ["bench", "check"])
def test_without_a_gpu_it_says_so_at_once(
    what: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("weft_bench.gpu.no_gpu", lambda: "there is no GPU")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert main([what]) == 1
    assert capsys.readouterr().err == "error: there is no GPU; `--tiny` shows without one that everything works\n"
