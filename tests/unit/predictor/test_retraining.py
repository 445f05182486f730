"""When a network is retrained, on what, and for how much CPU time; the training itself on a tiny network."""

from collections.abc import Iterator
from dataclasses import replace
from random import Random

import numpy as np
import pytest

from tests.unit.predictor.conftest import World, outcome_of
from weft.domain.request import FinishReason
from weft_predictor import encoder_training, training
from weft_predictor.core import (
    MAX_CPU_S,
    EncoderClasses,
    ObservationResult,
    PromotedModel,
    Retraining,
    RidgeModel,
    deciles,
    retraining,
    tenths,
)
from weft_predictor.encoder_files import SIZES, EncoderFiles, encoder_of, read_files, read_model, write_files
from weft_predictor.errors import CorruptModel
from weft_predictor.retrain import retrain
from weft_predictor.samples import decode_samples, encode_samples

FEW = 20
SHARE = 0.1
DECILES = (5, 20, 30, 40, 50, 60, 70, 80, 90, 100)


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setitem(SIZES, "tiny", (1, 2, 16, 32))
    monkeypatch.setattr(retraining, "MIN_SAMPLES", FEW)
    monkeypatch.setattr(retraining, "WINDOW", 3 * FEW)


def network(seed: int = 0, edges=DECILES) -> EncoderFiles:
    prompts = [one.query.prompt_text for one in World(Random(0)).answers(50)]
    start = encoder_training.from_scratch("tiny", prompts, edges, seed)
    return encoder_training.files_of(start, start.weights)


def model_of(files: EncoderFiles) -> RidgeModel:
    features = encoder_of(files)
    rows = [training.AnsweredPrompt("name birds", "", 2, 10), training.AnsweredPrompt("essay on bread", "", 3, 400)] * 5
    return training.fit_and_calibrate(features, rows, None)


class Stage:
    """A served encoder with its retraining; each answer takes `seconds`, one after another."""

    def __init__(self, seconds: float = 10.0) -> None:
        self.model = PromotedModel(model_of(network()), lambda _: None)
        self.retraining = Retraining(self.model, SHARE)
        self.seconds, self.now_s, self._answers = seconds, 1_000.0, World(Random(1)).answers(100_000)

    def answer(self, count: int = 1, *, namespace: str = "", **fields) -> None:
        for _ in range(count):
            one = next(self._answers)
            self.now_s += self.seconds
            self.model.predict_batch([one.query])
            self.retraining.predicted([one.query])
            times = {"finished_unix_ms": round(1_000 * self.now_s), "total_ms": round(1_000 * self.seconds)}
            outcome = replace(outcome_of(one), namespace=namespace, **times, **fields)
            self.retraining.observed(outcome, self.model.observe(outcome))


def test_training_is_due_after_enough_answers_and_enough_time_of_generation():
    stage = Stage(seconds=0.01)
    stage.answer(FEW)
    assert stage.retraining.due() is None, "0.2 s of generation allow 0.02 s of CPU"
    stage = Stage(seconds=30.0)
    stage.answer(FEW - 1)
    assert stage.retraining.due() is None
    stage.answer()
    job = stage.retraining.due()
    assert job is not None
    assert (job.network, len(job.samples)) == (stage.model.served.featurizer.name, FEW)
    assert job.cpu_s == pytest.approx(SHARE * 30.0 * FEW)
    assert stage.retraining.due() is None


def test_all_trainings_together_take_at_most_the_share_of_the_time_of_generation():
    stage, spent, jobs, rng = Stage(seconds=20.0), 0.0, 0, Random(2)
    for _ in range(1_500):
        stage.answer()
        if (job := stage.retraining.due()) is not None:
            jobs += 1
            spent += (used := job.cpu_s * rng.random())
            stage.retraining.ended(used, out_of_time=False)
        assert spent <= SHARE * (stage.now_s - 1_000.0) + 1e-6
    assert jobs == 6, "after 20 answers, then twice as many each time: no candidate was promoted"


def test_time_in_which_several_answers_were_generated_counts_once():
    stage = Stage(seconds=10.0)
    stage.answer(10)
    once = stage.retraining.credit_s
    for _ in range(50):
        stage.now_s -= stage.seconds  # they end when the last one did
        stage.answer()
    assert stage.retraining.credit_s == pytest.approx(once)
    stage.now_s += 2 * 3_600.0
    stage.answer()
    first = replace(outcome_of(next(World(Random(1)).answers(1))), finished_unix_ms=1_010_000, total_ms=10_000)
    stage.retraining.observed(first, ObservationResult("duplicate"))
    assert stage.retraining.credit_s == pytest.approx(once + SHARE * 10.0), "an outcome that is sent again is none"
    stage.answer(100_000 // 200)
    assert stage.retraining.credit_s <= retraining.MAX_CPU_S


def test_one_outcome_whose_clock_is_ahead_does_not_end_the_budget():
    stage = Stage(seconds=10.0)
    stage.now_s += 10 * 86_400.0
    stage.answer()
    stage.now_s -= 10 * 86_400.0
    before = stage.retraining.credit_s
    stage.answer(5)
    assert stage.retraining.credit_s == pytest.approx(before + 5 * SHARE * 10.0)


def test_nothing_is_trained_while_a_candidate_is_judged_and_a_promotion_begins_anew():
    stage = Stage(seconds=30.0)
    stage.answer(FEW)
    stage.model.offer(model_of(network(1)))
    assert stage.retraining.due() is None
    stage.model.served, stage.model.candidate = stage.model.candidate, None
    assert stage.retraining.due() is None, "what was gathered under another network is gone"
    stage.answer(FEW)
    assert stage.retraining.due().network == stage.model.served.featurizer.name


def test_a_second_tenant_ends_it_for_good_and_what_the_first_sent_is_gone():
    stage = Stage(seconds=30.0)
    stage.answer(FEW, namespace="acme")
    name = stage.model.served.featurizer.name
    assert stage.retraining.accepts(name)
    stage.answer(namespace="globex")
    assert not stage.retraining.accepts(name), "a candidate that is trained now is not offered"
    stage.answer(3 * FEW, namespace="acme")
    assert stage.retraining.due() is None
    assert not stage.retraining._samples
    assert not len(stage.retraining._waiting)


def test_answers_that_were_cut_off_are_no_samples_and_the_window_is_bounded():
    stage = Stage(seconds=30.0)
    stage.answer(FEW, finish=FinishReason.LENGTH)
    assert stage.retraining.due() is None
    stage.answer(10 * FEW, completion_tokens=2**62)
    job = stage.retraining.due()
    assert len(job.samples) == 3 * FEW
    assert {sample.tokens for sample in job.samples} == {retraining.MAX_TOKENS}


def test_the_next_training_waits_for_the_time_that_the_last_one_says_and_one_that_needs_too_much_is_given_up():
    stage = Stage(seconds=30.0)
    stage.answer(FEW)
    retraining = stage.retraining
    for used_s, out_of_time, needed_s in (
        (0.0, False, 30.0), (20.0, False, 40.0), (20.0, True, 80.0), (1e9, False, 600.0), (600.0, True, 1_200.0),
    ):  # fmt: skip
        retraining.ended(used_s, out_of_time=out_of_time)
        for credit_s in (needed_s - 1.0, needed_s):
            retraining._new, retraining._wanted, retraining.credit_s = FEW, FEW, credit_s
            assert (retraining.due() is not None) == (credit_s == needed_s <= MAX_CPU_S), (used_s, credit_s)


def test_a_ridge_is_not_retrained():
    stage = Stage(seconds=30.0)
    stage.model.served = RidgeModel.cold("ridge", dim=1 << 10)
    stage.answer(FEW)
    assert stage.retraining.due() is None


# ---- the training itself


def samples_of(count: int, drift: float = 1.0) -> Iterator[retraining.AnsweredIds]:
    tokenize = encoder_of(network()).tokenize
    for one in World(Random(3)).answers(count, adapter="acme/plain", drift=drift):
        yield retraining.AnsweredIds(np.array(tokenize(one.query.prompt_text), np.int32), "acme/plain", one.tokens)


def test_samples_reach_the_training_as_they_are():
    samples = list(samples_of(5))
    again = decode_samples(encode_samples(samples))
    assert [(s.ids.tolist(), s.adapter, s.tokens) for s in again] == [
        (s.ids.tolist(), s.adapter, s.tokens) for s in samples
    ]
    for damaged in (b"", b"PK", encode_samples(samples)[:200]):
        with pytest.raises(CorruptModel):
            decode_samples(damaged)


@pytest.mark.parametrize("kept", [True, False])
def test_a_retrained_network_ranks_prompts_that_the_first_one_could_not(kept, tmp_path, monkeypatch):
    monkeypatch.setattr("weft_predictor.retrain.LEARNING_RATE", 5e-3)  # of a random network
    files = network(edges=tenths(500) if kept else DECILES)
    write_files(tmp_path / "first", files)
    samples = list(samples_of(600))
    retrain(tmp_path / "first", files.name, tmp_path / "second", samples)
    trained = read_model(tmp_path / "second")
    features = trained.featurizer
    assert isinstance(features, EncoderClasses)
    assert trained.family == features.name != files.name
    edges = features.edges
    assert edges == (tenths(500) if kept else deciles(np.array([s.tokens for s in samples])))
    short, long = trained.predict_batch([one.query for one in _pair()])
    assert 2 * short.p50_tokens < long.p50_tokens
    assert read_files(tmp_path / "second").tokenizer == files.tokenizer


def _pair():
    by_task = {one.query.prompt_text.split()[0]: one for one in World(Random(4)).answers(50, adapter="acme/plain")}
    return by_task["name"], by_task["essay"]


def test_a_folder_whose_network_was_exchanged_is_refused(tmp_path):
    write_files(tmp_path, network(1))
    with pytest.raises(CorruptModel, match="by now, not encoder-"):
        retrain(tmp_path, network(0).name, tmp_path / "out", list(samples_of(10)))
