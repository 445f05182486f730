"""The real engine on a tiny model: what was played is what was asked for, and its times follow from its steps."""

import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from weft_bench.cpu_decode import FOLDERS, Batch, Decoded, Model, base, decode, load_all, prefill_s, steady
from weft_bench.cpu_engine import Ask, Life, Played, Sizes, Subject
from weft_bench.cpu_loading import SLOTS, Stream
from weft_bench.cpu_models import adapter, base_model, files
from weft_bench.cpu_shapes import DISTINCT, MIXED_RANKS, RANK, UNIFORM
from weft_bench.cpu_slots import STREAMS
from weft_bench.cpu_witness import Beat, SlotLoad
from weft_bench.errors import EngineRefused, WrongAdapter
from weft_bench.roofline import Shape, lora_bytes
from weft_bench.slot_parts import Parts, over_allowed, parts, settled

SMALLEST = Shape(hidden=32, layers=1, heads=2, kv_heads=1, inner=48, vocab=64)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model("smallest", SMALLEST, tmp_path_factory.mktemp("models"), random.Random(0))


@pytest.fixture(scope="module")
def subject(model: Model) -> Iterator[Subject]:
    base_folder = base_model(model.folder, model.name, model.shape)
    sizes = Sizes(executor="reference", rows=8, slots=8, context_tokens=64, prefills=8, adapter_pages=4096)
    with Subject(files(base_folder), sizes) as made:
        yield made


def test_a_model_is_written_once_and_the_same_each_time(model: Model, tmp_path: Path) -> None:
    first = adapter(model.folder, model.name, model.shape, 3, 4)
    written = (first / "adapter_model.safetensors").stat().st_mtime_ns
    assert adapter(model.folder, model.name, model.shape, 3, 4) == first
    assert (first / "adapter_model.safetensors").stat().st_mtime_ns == written
    again = adapter(tmp_path, model.name, model.shape, 3, 4)
    assert (again / "adapter_model.safetensors").read_bytes() == (first / "adapter_model.safetensors").read_bytes()
    assert {path.name for path in tmp_path.rglob("*")} == {
        "smallest", "r4-3", "adapter_config.json", "adapter_model.safetensors",
    }  # fmt: skip


@pytest.mark.parametrize("batch", [base(5), Batch(8, UNIFORM), Batch(8, DISTINCT), Batch(4, DISTINCT, MIXED_RANKS)])
def test_steady_steps_have_every_row_and_its_adapter(model: Model, subject: Subject, batch: Batch) -> None:
    load_all(model, subject, [batch])
    decoded = decode(model, subject, batch, 6, 5)
    assert len(decoded.steps_s) == 4
    assert decoded.step_s == pytest.approx(sum(decoded.steps_s) / 4)


def test_every_request_gets_its_tokens_at_most_so_many_at_a_time(model: Model, subject: Subject) -> None:
    ended: list[int] = []
    asks = [*model.asks(subject, Batch(6, UNIFORM), 4, 3), *model.asks(subject, base(3), 4, 5)]
    played = subject.play(asks, streams=2, advanced=ended.append)
    assert [life.tokens for life in played.lives] == [3] * 6 + [5] * 3
    assert max(beat.rows for beat in played.beats) == 2
    assert sum(ended) == 9
    assert {adapter for beat in played.beats for adapter in beat.adapters if adapter} == {
        ask.adapter for ask in asks if ask.adapter
    }
    assert all(life.posted < life.first for life in played.lives)


def test_a_prefill_takes_what_its_beats_take(model: Model, subject: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[Played] = []
    play = subject.play

    def kept(asks: Sequence[Ask]) -> Played:
        runs.append(play(asks))
        return runs[-1]

    monkeypatch.setattr(subject, "play", kept)
    took = prefill_s(model, subject, base(2), 20)
    (run,) = runs
    assert sum(beat.tokens for beat in run.beats) == 2 * 20
    assert 0 < took == run.beats[-1].ended - run.beats[0].began <= run.wall_s


def test_a_request_that_cannot_be_served_stops_the_run(model: Model) -> None:
    base_folder = base_model(model.folder, model.name, model.shape)
    with Subject(files(base_folder), Sizes(executor="reference", rows=1, slots=1, context_tokens=32)) as small:
        with pytest.raises(EngineRefused, match="no room"):
            small.play([Ask("", [7] * 500, 1)])
        with pytest.raises(EngineRefused, match="no folder is known"):
            small.play([Ask("unheard-of", [7] * 4, 1)])


def test_what_a_run_that_stopped_left_unfinished_does_not_run_beside_the_next(model: Model, subject: Subject) -> None:
    left = model.asks(subject, Batch(3, UNIFORM), 4, 40)
    with pytest.raises(EngineRefused, match="no folder is known"):
        subject.play([*left, Ask("unheard-of", [7] * 4, 1)])
    played = subject.play(model.asks(subject, base(2), 4, 5))
    assert [life.tokens for life in played.lives] == [5, 5]
    assert {beat.rows for beat in played.beats} == {2}


def test_only_adapters_that_are_seated_while_it_runs_count_as_loaded_beside_it(model: Model) -> None:
    idle = Decoded(0.0, ())
    sizes = Sizes(executor="reference", rows=1, slots=SLOTS + 1, context_tokens=32, adapter_pages=4096)
    with Subject(files(base_model(model.folder, model.name, model.shape)), sizes) as own:
        stream = Stream(model, own)

        def loads() -> Decoded:
            stream.flow()
            stream.dry()
            return idle

        assert stream.beside(lambda: idle)[1] == 0
        done, n_bytes, wall_s = stream.beside(loads)
        assert (done, n_bytes) == (idle, stream.n_bytes)
        assert n_bytes >= SLOTS * lora_bytes(SMALLEST, RANK)
        assert wall_s > 0
        loads()
        assert stream.n_bytes == 2 * n_bytes
        assert stream.beside(lambda: idle)[1] == 0


def test_aliases_are_many_adapters_with_the_files_of_one(model: Model, subject: Subject) -> None:
    paths = [subject.adapters.paths[model.alias(subject, f"alias {n}", n)] for n in (1, 2, 1 + FOLDERS)]
    assert paths[0] == paths[2] != paths[1]


def test_a_row_that_runs_with_anothers_adapter_is_found_out(model: Model, subject: Subject) -> None:
    asks = model.asks(subject, Batch(2, DISTINCT), 4, 3)
    manager = subject.engine.runner.pool.adapters
    load_all(model, subject, [Batch(2, DISTINCT)])
    true_slot, others = manager.slot_of, {asks[0].adapter: asks[1].adapter}
    manager.slot_of = lambda digest: true_slot(others.get(digest, digest))
    try:
        with pytest.raises(WrongAdapter, match="rows asked for"):
            subject.play(asks)
    finally:
        manager.slot_of = true_slot


def beat(began: float, ended: float, prefills: int, *adapters: str) -> Beat:
    return Beat(began, ended, prefills, len(adapters), adapters)


def test_steps_with_prompts_or_without_some_rows_are_not_steady() -> None:
    beats = [beat(0, 5, 1, "a", "b"), beat(5, 6, 0, "a", "b"), beat(6, 8, 0, "a", "b"), beat(8, 20, 0, "a")]
    decoded = steady(Played((), beats, 20.0), rows=2, adapters=2)
    assert decoded.steps_s == (1, 2)
    assert decoded.step_s == 1.5


@pytest.mark.parametrize(("rows", "adapters", "message"), [(2, 1, "not 1"), (3, 2, "no step had all 3 rows")])
def test_another_number_of_adapters_or_rows_is_found_out(rows: int, adapters: int, message: str) -> None:
    with pytest.raises(WrongAdapter, match=message):
        steady(Played((), [beat(5, 6, 0, "a", "b")], 1.0), rows, adapters)


@pytest.mark.parametrize(
    ("load", "expected"),
    [
        (None, Parts(0, 0, 10, hit=True)),
        (SlotLoad("a", seated=17, seconds=1, n_bytes=1), Parts(6, 1, 3, hit=False)),
        (SlotLoad("a", seated=17, seconds=9, n_bytes=1), Parts(0, 7, 3, hit=False)),
        (SlotLoad("a", seated=9, seconds=1, n_bytes=1), Parts(0, 0, 10, hit=True)),
        (SlotLoad("a", seated=29, seconds=1, n_bytes=1), Parts(0, 0, 10, hit=True)),
    ],
)
def test_a_time_to_first_token_is_parted_at_the_load_it_waited_for(load: SlotLoad | None, expected: Parts) -> None:
    life = Life(Ask("a", [1], 1), posted=10, first=20)
    found = parts(life, [load] if load else [])
    assert found == expected
    assert found.ttft_s == life.ttft_s


def test_the_first_request_of_each_stream_is_left_out() -> None:
    lives = [Life(Ask("a", [1], 1), posted=0, first=100) for _ in range(STREAMS)]
    lives += [Life(Ask("b", [1], 1), posted=10, first=20)]
    found = settled(Played(lives, (), 1.0), [SlotLoad("b", seated=17, seconds=4, n_bytes=1)], STREAMS)
    assert found == [Parts(3, 4, 3, hit=False)]


def test_queueing_for_a_slot_is_not_held_against_us_and_one_load_is_allowed() -> None:
    loads = [SlotLoad("b", seated=17, seconds=4, n_bytes=1)]
    assert over_allowed([Parts(1000, 4, 8, hit=False)], [2.0], loads) == 2.0
    assert over_allowed([Parts(0, 0, 8, hit=True)], [2.0], []) == 4.0
