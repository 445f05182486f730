"""The real engine on a tiny model: what was played is what was asked for, and its times follow from its steps."""

import random
from collections.abc import Iterator

import pytest

from weft_bench.cpu_shapes import DISTINCT, MIXED_RANKS, UNIFORM
from weft_bench.drive import Batch, Model, Sizes, Subject, base, decode, load_all, steady
from weft_bench.figures import cpu_adapters
from weft_stage.cpu_models import base_model, files
from weft_stage.cpu_witness import Beat, SlotLoad
from weft_stage.errors import WrongAdapter
from weft_stage.playing import Ask, Life, Played
from weft_stage.shapes import Shape

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


@pytest.mark.parametrize("batch", [base(5), Batch(8, UNIFORM), Batch(8, DISTINCT), Batch(4, DISTINCT, MIXED_RANKS)])
def test_steady_steps_have_every_row_and_its_adapter(model: Model, subject: Subject, batch: Batch) -> None:
    load_all(model, subject, [batch])
    decoded = decode(model, subject, batch, 5, prompt_tokens=6)
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
        (None, cpu_adapters.Parts(0, 0, 10, hit=True)),
        (SlotLoad("a", seated=17, seconds=1, n_bytes=1), cpu_adapters.Parts(6, 1, 3, hit=False)),
        (SlotLoad("a", seated=17, seconds=9, n_bytes=1), cpu_adapters.Parts(0, 7, 3, hit=False)),
        (SlotLoad("a", seated=9, seconds=1, n_bytes=1), cpu_adapters.Parts(0, 0, 10, hit=True)),
        (SlotLoad("a", seated=29, seconds=1, n_bytes=1), cpu_adapters.Parts(0, 0, 10, hit=True)),
    ],
)
def test_a_time_to_first_token_is_parted_at_the_load_it_waited_for(
    load: SlotLoad | None, expected: cpu_adapters.Parts
) -> None:
    life = Life(Ask("a", [1], 1), posted=10, first=20)
    found = cpu_adapters.parts(life, [load] if load else [])
    assert found == expected
    assert found.ttft_s == life.ttft_s
