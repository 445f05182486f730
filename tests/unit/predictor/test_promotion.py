"""A candidate serves only once it has predicted better what neither had seen, and is rolled back by the same rule."""

import math
from random import Random
from statistics import mean, stdev

import pytest

from tests.unit.predictor.conftest import CountingModel, World, outcome_of, teach
from weft.domain.request import Outcome
from weft_predictor.core import MAX_JUDGED, MIN_JUDGED, Judge, ObservationResult, PromotedModel, RidgeModel

DIM = 1 << 14


class FixedLoss(CountingModel):
    """Every outcome costs it a drawn loss around a mean that can be changed."""

    def __init__(self, name: str, loss: float, rng: Random) -> None:
        super().__init__()
        self.name, self.loss, self._rng = name, loss, rng

    @property
    def version(self) -> str:
        return self.name

    def observe(self, outcome: Outcome) -> ObservationResult:
        return ObservationResult("learned", True, self._rng.gauss(self.loss, 0.1))


def judged(model: PromotedModel, answers) -> None:
    for answer in answers:
        teach(model, answer)


@pytest.fixture
def decisions():
    return []


def promoted(served, decisions) -> PromotedModel:
    return PromotedModel(served, lambda decision: decisions.append((decision.result, decision.candidate)))


def test_a_better_candidate_is_promoted_and_what_turns_worse_afterwards_is_rolled_back(world, decisions):
    rng = Random(1)
    old, new = FixedLoss("old", 0.2, rng), FixedLoss("new", 0.15, rng)
    model = promoted(old, decisions)
    model.offer(new)
    judged(model, world(1).answers(MIN_JUDGED - 1))
    assert model.version == "old"
    judged(model, world(2).answers(MIN_JUDGED))
    assert (model.version, decisions) == ("new", [("promoted", "new")])
    new.loss = 0.3
    judged(model, world(3).answers(2 * MAX_JUDGED))
    assert (model.version, decisions) == ("old", [("promoted", "new"), ("promoted", "old"), ("dropped", "new")])


@pytest.mark.parametrize("loss", [0.2, 0.21, float("inf")])
def test_a_candidate_that_is_no_better_is_dropped_after_a_bound(loss, world, decisions):
    rng = Random(2)
    model = promoted(FixedLoss("old", 0.2, rng), decisions)
    model.offer(FixedLoss("new", loss, rng))
    judged(model, world(1).answers(MAX_JUDGED))
    assert model.version == "old"
    assert model.candidate is None
    assert decisions == [("dropped", "new")]


def test_equal_models_are_seldom_exchanged():
    rng, exchanged = Random(3), 0
    for _ in range(200):
        judge = Judge()
        while judge.judged < MAX_JUDGED and not judge.better:
            judge.add("", rng.gauss(0.2, 0.1), rng.gauss(0.2, 0.1))
        exchanged += judge.better
    assert exchanged <= 8


@pytest.mark.parametrize("better_by", [0.0, 0.015, 0.02, 0.025, 0.03])
def test_a_candidate_is_better_by_three_standard_errors_of_what_an_outcome_differs_at_most(better_by):
    rng, judge = Random(6), Judge()
    assert (judge.better, judge.gain) == (False, 0.0)
    pairs = [(0.2, 0.2 - rng.gauss(better_by, 0.1)) for _ in range(MIN_JUDGED + 100)] + [(1e9, 0.0), (0.0, 1e9)]
    for n, (served, candidate) in enumerate(pairs, 1):
        judge.add("", served, candidate)
        differences = [min(max(a - b, -1.0), 1.0) for a, b in pairs[:n]]
        error = stdev(differences) / math.sqrt(n) if n > 1 else 0.0
        assert judge.better == (n >= MIN_JUDGED and mean(differences) > 3 * error)
        assert judge.gain == pytest.approx(sum(differences) / sum(served for served, _ in pairs[:n]))


def test_a_flood_of_one_tenant_is_at_most_half_of_what_is_judged():
    judge = Judge()
    for i in range(10 * MIN_JUDGED):
        judge.add("flood", 0.2, 0.1)
        if i < 150:
            judge.add("acme", 0.2, 0.4)
    assert judge.judged <= 302
    assert not judge.better


def test_a_model_that_knows_the_prompts_replaces_a_cold_one_and_continues_to_learn(world, decisions):
    here = world(4)
    trained = RidgeModel.cold("trained", dim=DIM)
    judged(trained, here.answers(600))
    cold = RidgeModel.cold("cold", dim=DIM)
    cold.ridge.variance[:] = 1e-6  # it cannot learn
    model = promoted(cold, decisions)
    model.offer(trained)
    judged(model, here.answers(400))
    assert [(result, name.partition("+")[0]) for result, name in decisions] == [("promoted", "trained")]
    assert model.version == trained.version
    assert model.learned > 800
    assert model.save()["meta"].tobytes() == trained.save()["meta"].tobytes()


def test_a_candidate_changes_no_prediction(world):
    alone, beside = RidgeModel.cold("same", dim=DIM), RidgeModel.cold("same", dim=DIM)
    model = PromotedModel(beside, lambda _: None)
    model.offer(RidgeModel.cold("candidate", dim=DIM))
    for answer in World(Random(5)).answers(100):
        assert alone.predict_batch([answer.query]) == model.predict_batch([answer.query])
        assert alone.observe(outcome := outcome_of(answer)) == model.observe(outcome)
