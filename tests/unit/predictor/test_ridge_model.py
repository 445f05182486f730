import math
from dataclasses import dataclass, replace
from random import Random
from statistics import NormalDist, mean

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.predictor.conftest import Answer, World, outcome_of, query_of, teach
from weft.domain.prediction import Prediction, PredictItem
from weft.domain.request import FinishReason, Outcome
from weft_predictor.core import FeatureCache, RidgeModel, feature_rows

DIM = 1 << 14


def cold() -> RidgeModel:
    return RidgeModel.cold("ridge-test", dim=DIM)


def predict(model: RidgeModel, query: PredictItem):
    return model.predict_batch([query])[0]


def taught(world, count: int, **options) -> RidgeModel:
    model = cold()
    for outcome in world.answers(count, **options):
        teach(model, outcome)
    return model


def copy(model: RidgeModel) -> RidgeModel:
    """One that a test may teach."""
    return RidgeModel.load(model.save())


@dataclass(frozen=True)
class School:
    """A model that was taught 1,200 answers, the last 1,000 of them, what it predicted of each, and the losses."""

    model: RidgeModel
    answers: list[Answer]
    predicted: list[Prediction]
    losses: list[float]


@pytest.fixture(scope="module")
def school() -> School:
    here = World(Random(1))
    model, answers, predicted, losses = taught(here, 200), list(here.answers(1_000)), list[Prediction](), list[float]()
    for answer in answers:
        predicted.append(predict(model, answer.query))
        losses.append(model.observe(outcome_of(answer)).loss or 0.0)
    return School(model, answers, predicted, losses)


@pytest.fixture
def model(school) -> RidgeModel:
    return copy(school.model)


@pytest.fixture(scope="module")
def young() -> RidgeModel:
    return taught(World(Random(22)), 200)


def bias(model: RidgeModel, here, adapter: str, task: str) -> float:
    """Mean log of predicted over true median, over 50 prompts of a task."""
    asked = [query for query in (here.query(adapter) for _ in range(200)) if query.prompt_text.startswith(task)]
    answers = model.predict_batch(asked)
    return mean(math.log(one.p50_tokens / here.median(query)) for one, query in zip(answers, asked, strict=True))


def coverage(model: RidgeModel, outcomes) -> float:
    hits = []
    for outcome in outcomes:
        hits.append(outcome.tokens <= predict(model, outcome.query).p90_tokens)
        teach(model, outcome)
    return sum(hits) / len(hits)


def test_a_cold_model_answers_at_once_with_a_wide_margin():
    answer = predict(cold(), query_of("anything", "acme/plain"))
    assert 100 <= answer.p50_tokens <= 150
    assert answer.p90_tokens > 3 * answer.p50_tokens


def test_it_learns_what_the_prompt_and_the_adapter_say(world, model):
    here = world(17)
    for adapter in ("acme/plain", "acme/brief", "globex/chatty"):
        for task in ("name", "list", "explain", "essay"):
            assert abs(bias(model, here, adapter, task)) < 0.4, (adapter, task)  # the effects are 1.1 to 3.9


def test_an_adapter_it_has_hardly_seen_is_answered_like_the_others(world):
    model = taught(world(2), 400, adapter="acme/plain")
    fresh, known = (predict(model, query_of("list something about birds", a, 8)) for a in ("new/one", "acme/plain"))
    assert fresh.p50_tokens == pytest.approx(known.p50_tokens, rel=0.3)


@pytest.mark.slow
@pytest.mark.parametrize("drift", [0.25, 4.0])
def test_coverage_returns_to_90_percent_after_the_answers_change(world, model, drift):
    here = world(3)
    coverage(model, here.answers(300, drift=drift))
    assert coverage(model, here.answers(1_000, drift=drift)) == pytest.approx(0.9, abs=0.03)


def test_each_quantile_covers_its_share_of_the_answers(school):
    for name, share in {"p10": 0.1, "p50": 0.5, "p90": 0.9, "p99": 0.99}.items():
        bounds = [getattr(prediction, f"{name}_tokens") for prediction in school.predicted]
        covered = mean(answer.tokens <= bound for answer, bound in zip(school.answers, bounds, strict=True))
        assert covered == pytest.approx(share, abs=0.04), name
    assert all(p.p10_tokens <= p.p50_tokens <= p.p90_tokens <= p.p99_tokens for p in school.predicted)
    least = 0.4 * (0.5 * math.sqrt(2 / math.pi) + NormalDist().pdf(NormalDist().inv_cdf(0.9)))  # of this law
    assert mean(school.losses) / least == pytest.approx(1.13638, abs=2e-4), "measured: a change of the model says so"


def test_the_reported_coverage_is_what_was_observed_before_learning(school):
    assert cold().coverage is None
    seen = mean(answer.tokens <= p.p90_tokens for answer, p in zip(school.answers, school.predicted, strict=True))
    assert school.model.coverage == pytest.approx(seen, abs=0.02)  # p90 is rounded up to whole tokens


@pytest.mark.slow
def test_censored_answers_do_not_teach_that_answers_are_short(world):
    """Half of the requests are cut off at 64 tokens; the truth does not change, the prediction must not either."""
    here = world(5)
    whole, cut, naive = cold(), cold(), cold()
    for i, outcome in enumerate(here.answers(1_500, adapter="acme/plain")):
        short = replace(outcome, tokens=min(outcome.tokens, 64), censored=outcome.tokens > 64)
        teach(whole, outcome)
        teach(cut, short if i % 2 else outcome)
        teach(naive, replace(short, censored=False) if i % 2 else outcome)
    errors = [bias(model, here, "acme/plain", "essay") for model in (whole, cut, naive)]
    assert errors[0] == pytest.approx(0.0, abs=0.2)
    assert errors[1] == pytest.approx(errors[0], abs=0.2)
    assert errors[2] < errors[0] - 0.5, "the test would notice a model that believes the cut"


def test_answers_that_are_always_cut_off_push_the_prediction_up_to_the_limit_and_not_away(world):
    model, query = cold(), query_of("list something", "acme/plain", 3)
    for _ in range(500):
        teach(model, Answer(query_of("list something", "acme/plain", 3), 1_000, censored=True))
    assert 900 <= predict(model, query).p50_tokens <= 20_000


def test_a_client_that_left_after_one_token_teaches_nothing():
    model, query = cold(), query_of("list something", "acme/plain", 3)
    before = predict(model, query)
    for _ in range(100):
        answer = Answer(query_of("list something", "acme/plain", 3), 1, censored=True)
        assert teach(model, answer).lesson == "censored"
    assert predict(model, query) == before
    assert model.version == "ridge-test+0"


def test_the_version_changes_when_the_model_does(world):
    model, versions = cold(), set()
    for outcome in world(6).answers(5):
        versions.add(model.version)
        teach(model, outcome)
    assert versions == {f"ridge-test+{i}" for i in range(5)}


def test_scale_multiplies_every_prediction(world, model):
    query = world(8).query()
    plain = predict(model, query)
    model.scale = 10.0
    tenfold = predict(model, query)
    assert tenfold.model_version == plain.model_version + "x10"
    assert tenfold.p50_tokens == pytest.approx(10 * plain.p50_tokens, abs=10)
    assert tenfold.p90_tokens == pytest.approx(10 * plain.p90_tokens, abs=10)


@settings(max_examples=settings.default.max_examples // 2)
@given(st.integers(0, 1_000), st.lists(st.tuples(st.text(max_size=60), st.integers(0, 2**32 - 1)), max_size=40))
def test_a_batch_is_answered_to_the_bit_as_its_prompts_are_one_by_one(seed, others):
    here = World(Random(seed))
    model = cold()
    for outcome in here.answers(30):
        teach(model, outcome)
    queries = [here.query() for _ in range(20)] + [query_of(text, "acme/plain", tokens) for text, tokens in others]
    here.rng.shuffle(queries)
    prompts = [(query.prompt_text, query.prompt_tokens) for query in queries]
    centres = model.ridge.predict_rows(feature_rows(prompts, DIM))
    alone = [model.ridge.predict_rows(feature_rows([prompt], DIM))[0] for prompt in prompts]
    assert centres.tolist() == alone
    assert model.predict_batch(queries) == [predict(model, query) for query in queries]


def test_a_long_batch_is_computed_in_parts_and_answered_whole(world, monkeypatch):
    here = world(9)
    model = taught(here, 100)
    queries = [here.query() for _ in range(50)]
    whole = model.predict_batch(queries)
    for chars in (1, 100, 1_000):
        monkeypatch.setattr("weft_predictor.core.ridge_model.PART_CHARS", chars)
        assert model.predict_batch(queries) == whole
    assert model.predict_batch([]) == []


@given(st.text(max_size=200), st.integers(0, 2**32 - 1), st.floats(0.001, 1_000) | st.just(1e12))
def test_whatever_is_asked_the_answer_is_ordered_and_fits_the_wire(text, prompt_tokens, scale):
    model = cold()
    model.scale = scale
    answer = predict(model, query_of(text, "a", prompt_tokens))
    assert 1 <= answer.p10_tokens <= answer.p50_tokens <= answer.p90_tokens <= answer.p99_tokens < 2**31


@given(st.lists(st.tuples(st.integers(0, 2**32 - 1), st.booleans()), max_size=40))
def test_no_sequence_of_outcomes_breaks_the_numbers(outcomes):
    model, query = cold(), query_of("x", "a")
    for tokens, censored in outcomes:
        teach(model, Answer(query_of("x", "a"), tokens, censored))
    answer = predict(model, query)
    assert 1 <= answer.p50_tokens <= answer.p90_tokens < 2**32


def gone(model: RidgeModel, answer: Answer, **fields) -> Outcome:
    """The outcome of a request whose features the model does not have: predicted before a restart, or long ago."""
    predicted = predict(model, replace(answer.query, request_id=""))
    scheduled = {"predicted_p50_tokens": predicted.p50_tokens, "model_version": model.version} | fields
    return outcome_of(answer, **scheduled)


def test_an_outcome_without_features_teaches_offset_and_calibration_and_not_the_ridge(world, model):
    weight, version = model.ridge.weight.copy(), model.version
    answers = world(10).answers(800, adapter="acme/plain", drift=4.0)
    hits = [model.observe(gone(model, answer)) for answer in answers]
    assert {result.lesson for result in hits} == {"partial"}
    assert model.offsets.of_group(("", "acme/plain")) - model.offsets.of_group(("", "acme/brief")) > math.log(4.0)
    assert mean(result.covered for result in hits[300:]) == pytest.approx(0.9, abs=0.04)
    assert (model.ridge.weight == weight).all()
    assert model.version != version


def test_an_adapter_whose_answers_change_is_followed_without_features(world, model):
    here = world(11)
    for answer in here.answers(300, adapter="globex/chatty", drift=0.5):
        model.observe(gone(model, answer))
    for task in ("name", "list", "explain", "essay"):
        assert bias(model, here, "globex/chatty", task) == pytest.approx(math.log(0.5), abs=0.4), task
        assert abs(bias(model, here, "acme/brief", task)) < 0.4, task


def test_many_requests_in_flight_teach_their_common_error_once(world, model):
    """All were predicted with the same offset: it must not run away while their outcomes come in."""
    here = world(16)
    for outcome in [gone(model, answer) for answer in here.answers(600, adapter="acme/plain", drift=2.0)]:
        model.observe(outcome)
    for task in ("name", "list", "explain", "essay"):
        assert bias(model, here, "acme/plain", task) == pytest.approx(math.log(2.0), abs=0.4), task


@pytest.mark.parametrize(
    "fields",
    [{"predicted_p50_tokens": 0}, *({"model_version": version} for version in ("", "other+7", "ridge-test+7x10"))],
)
def test_an_outcome_without_features_and_without_a_prediction_of_this_model_teaches_nothing(world, model, fields):
    before = model.save()
    for answer in world(12).answers(20):
        assert model.observe(gone(model, answer, **fields)).lesson == "unknown"
    assert all((array == before[name]).all() for name, array in model.save().items())


@pytest.mark.parametrize("predicted_as", ["req-1", "req-1/0"])
def test_the_choices_of_a_request_share_the_features_of_its_prompt(predicted_as):
    model, query = cold(), query_of("list something", "acme/plain", 3)
    predict(model, replace(query, request_id=predicted_as))
    answer = Answer(query, 20)
    lessons = [model.observe(outcome_of(answer, f"req-1/{choice}")).lesson for choice in (2, 0, 1)]
    assert lessons == ["learned"] * 3
    assert model.observe(outcome_of(answer, "req-1")).lesson == "learned"
    assert model.observe(outcome_of(answer, "req-1/3")).lesson == "unknown", "the whole request has ended"


@pytest.mark.parametrize("request_id", ["7", "/1", "req-1/", "req-1/x"])
def test_an_id_without_a_choice_is_a_request_of_its_own(request_id):
    model, query = cold(), query_of("list something", "acme/plain", 3)
    predict(model, replace(query, request_id=request_id))
    assert model.observe(outcome_of(Answer(query, 20), request_id)).lesson == "learned"
    assert len(model.features) == 0


def test_features_are_kept_until_the_outcome_and_no_longer_and_within_their_bound(world):
    here, model = world(13), cold()
    queries = [here.query() for _ in range(300)]
    model.predict_batch(queries)
    assert len(model.features) == 300
    for query in queries[:100]:
        model.observe(outcome_of(Answer(query, 20)))
    assert len(model.features) == 200
    size_bytes = model.features.size_bytes
    model.features = FeatureCache(size_bytes // 2)
    model.predict_batch(queries)
    assert size_bytes // 4 < model.features.size_bytes <= size_bytes // 2
    lessons = [model.observe(outcome_of(Answer(query, 20))).lesson for query in queries[100:]]
    assert lessons[0] == "unknown", "the oldest are dropped"
    assert lessons[-1] == "learned"
    assert model.features.size_bytes == 0


@pytest.mark.parametrize("finish", [FinishReason.LENGTH, FinishReason.CANCELLED, FinishReason.FAILED])
def test_an_answer_that_was_cut_off_is_a_lower_bound_also_without_the_flag(finish):
    model = cold()
    for _ in range(20):
        answer = Answer(query_of("list something", "acme/plain", 3), 1)
        predict(model, answer.query)
        assert model.observe(outcome_of(answer, finish=finish)).lesson == "censored"


def test_an_outcome_of_a_scaled_prediction_is_measured_against_the_plain_one(world, school):
    plain, scaled = copy(school.model), copy(school.model)
    scaled.scale = 10.0
    for answer in world(15).answers(100):
        for model in (plain, scaled):
            assert model.observe(gone(model, answer)).lesson == "partial"
    assert scaled.offsets.of_group(("", "acme/plain")) == pytest.approx(
        plain.offsets.of_group(("", "acme/plain")), abs=0.05
    )
    for scale in (1.0, 10.0):
        model = cold()
        model.scale = scale
        model.observe(gone(model, Answer(query_of("x", "acme/plain"), 128)))
        ((_, (residual,)),) = model.offsets.items()
        assert residual == pytest.approx(0.0, abs=0.005), "a cold model's centre is 128 tokens, its median more"


def test_an_outcome_that_arrives_again_teaches_once(world):
    model, answer = cold(), next(world(14).answers(1))
    assert teach(model, answer).lesson == "learned"
    assert teach(model, answer).lesson == "duplicate"
    assert model.learned == 1


def of_tenant(answers, tenant: str):
    return (replace(answer, query=replace(answer.query, namespace=tenant)) for answer in answers)


@pytest.mark.slow
@pytest.mark.parametrize("tokens", [1, 100_000, None])
def test_a_flood_of_one_tenant_moves_no_prediction_of_another_with_outcomes_enough(tokens, world):
    """One token, a hundred thousand, or short answers where others have long ones, on the adapter of all."""
    here, model = world(21), cold()
    for tenant in ("acme", "globex"):
        for answer in of_tenant(here.answers(150, adapter="acme/plain"), tenant):
            teach(model, answer)
    known = [replace(here.query("acme/plain"), request_id="", namespace="acme") for _ in range(50)]
    new = [replace(query, namespace="new") for query in known]
    before, at_first = ([p.p90_tokens for p in model.predict_batch(items)] for items in (known, new))
    for answer in of_tenant(here.answers(1_500, adapter="acme/plain"), "flood"):
        lie = tokens or (5_000 if here.median(answer.query) < 100 else 1)
        teach(model, replace(answer, tokens=lie))
    assert [p.p90_tokens for p in model.predict_batch(known)] == before
    assert model.predict_batch([replace(known[0], namespace="flood")])[0].p90_tokens != before[0]
    assert [p.p90_tokens for p in model.predict_batch(new)] == at_first, "nor those of a tenant without outcomes"


@pytest.mark.parametrize("tokens", [-5, 0, float("nan"), float("inf"), 10**30])
def test_a_poisoned_length_is_an_outcome_within_bounds(tokens, young):
    model = copy(young)
    query = query_of("name something about birds", "acme/plain")
    before = predict(model, query).p50_tokens
    result = model.observe(replace(outcome_of(Answer(query, 1)), completion_tokens=tokens))
    assert result.lesson == "learned"
    answer = predict(model, query)
    assert 1 <= answer.p10_tokens <= answer.p50_tokens <= answer.p90_tokens <= answer.p99_tokens < 2**31
    assert 0.25 < answer.p50_tokens / before < 4.0, "three scales of a model that is young"


def test_a_clock_that_jumps_teaches_nothing_else(world):
    """A model has no clock, and reads none in an outcome."""
    models = [cold(), cold()]
    for i, answer in enumerate(world(23).answers(100)):
        for model, when in zip(models, (0, (-1) ** i * 2**60), strict=True):
            predict(model, answer.query)
            model.observe(replace(outcome_of(answer), finished_unix_ms=when))
    first, second = (model.save() for model in models)
    assert all((first[name] == second[name]).all() for name in first)
