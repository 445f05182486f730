"""Drafts from texts to the Step: answers with them are those without them, to the bit."""

import random
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from harness.draft_search import guess, know, search_plainly
from harness.small_runner import SMALL, Driver, World, executor_of
from weft.domain.request import Ended, EndReason, NoCapacity, Sampling, SequenceTokens, Stop
from weft_runner.core import SUREST, Batch, BatchLimits, Draft, DraftQuery, StepModel, weigh_alike
from weft_runner.core.batch import Row
from weft_runner.core.batch_scheduler import BatchScheduler
from weft_runner.core.drafts.acceptance import ALL_PRIORS, Acceptance
from weft_runner.core.drafts.caller_draft import CallerDraft
from weft_runner.core.drafts.recent_answers import RecentAnswers, check_recent_answers
from weft_runner.core.request_pool import check_pool
from weft_runner.core.step_time_model import StepTimeEstimator

NOT_FINITE = "the model's output is not finite"
ADAPTERS = ("", "a", "b")
GREEDY = Sampling(ignore_eos=True)


def wide_world(folder: Path) -> World:
    """Make a model of sizes that the native executor computes."""
    world = World(folder / "world", {**SMALL, "hidden_size": 128, "intermediate_size": 96})
    world.write_base()
    for seed, name in enumerate(ADAPTERS[1:]):
        world.write_adapter(name, seed=seed, rank=4)
    return world


def cpu_driver(
    make_driver: Callable[..., Driver], world: World, flags: dict[str, Any] | None = None, **how: Any
) -> Driver:
    """Make a driver over the native executor, which checks guesses to the bit: all of them, whatever time they take."""
    made = partial(executor_of, kind="cpu", **flags or {})
    driver = make_driver(world, make_executor=made, page_tokens=16, **how)
    driver.pool.scheduler.guesses_worth = lambda _, gains: len(gains)
    return driver


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> World:
    return wide_world(tmp_path_factory.mktemp("wide"))


@pytest.fixture
def native(wide: World, make_driver: Callable[..., Driver]) -> Callable[..., Driver]:
    return partial(cpu_driver, make_driver, wide)


def samplings(rng: random.Random) -> Sampling:
    """Greedy and hot ones, with what makes of a token what may come behind it."""
    fields: dict[str, Any] = {"seed": rng.randrange(9), "temperature": rng.choice((0.0, 0.0, 0.7, 1.3))}
    if rng.random() < 0.3:
        fields |= {"frequency_penalty": 0.6, "presence_penalty": 0.2}
    if rng.random() < 0.3:
        fields |= {"repetition_penalty": 1.2, "min_tokens": rng.randrange(1, 12)}
    if rng.random() < 0.3:
        fields |= {"min_tokens": rng.randrange(1, 20), "bad_words": ((5,), (6, 7))}
    if rng.random() < 0.3:
        fields["stop_token_ids"] = (rng.randrange(3, 61),)
    if rng.random() < 0.3:
        fields |= {"top_k": 5, "top_p": 0.9}
    if rng.random() < 0.4:
        fields["top_logprobs"] = rng.randrange(4)
    return Sampling(ignore_eos=rng.random() < 0.7, **fields)


def asks(seed: int, n: int = 12) -> list[tuple[str, list[int], int, dict[str, Any]]]:
    rng = random.Random(seed)
    found = []
    for i in range(n):
        period = [rng.randrange(3, 61) for _ in range(rng.randrange(1, 6))]
        prompt = (period * 9)[: rng.randrange(1, 24)]
        fields = {"adapter": rng.choice(ADAPTERS), "sampling": samplings(rng), "reservation_tokens": 1}
        found.append((f"r{i}", prompt, rng.choice((1, 2, 30, 70)), fields))
    return found


def answers(driver: Driver, seed: int, drafts: Mapping[str, tuple[int, ...]] = MappingProxyType({})) -> dict[str, Any]:
    """What each request is told: tokens, how it ended, log probabilities. One that finds no room is asked again."""
    rng, waiting = random.Random(seed), asks(seed)
    for _ in range(2000):
        if waiting and rng.random() < 0.7:
            key, *given, fields = waiting.pop(0)
            emitted = tuple(driver.answer(key))
            driver.ask(key, *given, emitted=emitted, draft=drafts.get(key, ()), **fields)
            driver.beat()
        elif driver.pool.sequences:
            driver.beat()
        check_pool(driver.pool)
        if not waiting and not driver.pool.sequences:
            refused = {event.request_id for event in driver.events if isinstance(event, NoCapacity | Ended)}
            waiting = [ask for ask in asks(seed) if ask[0] in refused and told(driver, ask[0])[1] is None]
            if not waiting:
                break
    return {key: told(driver, key) for key, *_ in asks(seed)}


def told(driver: Driver, key: str) -> Any:
    events = [event for event in driver.events if event.request_id == key and isinstance(event, SequenceTokens)]
    return (
        driver.answer(key),
        events[-1].finish if events else None,
        [one for event in events for one in event.logprobs],
    )


FLAGS: list[dict[str, Any]] = [{}, {"dtype": "fp32"}, {"kv_dtype": "int4"}, {"sparse_attention": 0.5}]
FLAG_IDS = ["bf16", "fp32", "int4 keys", "best keys"]
SHORT = {"batch": BatchLimits(max_prefills=2, max_batch_tokens=48), "total_pages": 12, "swap_page_bytes": 1}


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 6))])
@pytest.mark.parametrize("flags", FLAGS, ids=FLAG_IDS)
def test_answers_with_drafts_are_those_without_them(native: Any, seed: int, flags: dict[str, Any]) -> None:
    """Adapters, chunks, penalties, stops, pauses for want of pages: whatever is guessed, right or wrong."""
    plain = native(flags=flags, **SHORT)
    expected = answers(plain, seed)
    texts = [[*prompt, *expected[key][0]] for key, prompt, *_ in asks(seed)]
    drafting = native(flags=flags, search=know(texts, seed), **SHORT)
    assert answers(drafting, seed) == expected
    drafts, guesses, accepted = drafting.pool.scheduler.drafter.figures
    assert 0 < drafts < accepted < guesses, "most are right"
    assert plain.pool.reservations.grown_pages
    assert sum(len(one.rows) for one in drafting.batches) < sum(len(one.rows) for one in plain.batches) - accepted / 2


EDITS: dict[str, Callable[[list[int]], list[int]]] = {
    "each fifth token is changed": lambda answer: [3 + t % 58 if i % 5 == 4 else t for i, t in enumerate(answer)],
    "some tokens are inserted, some left out": lambda answer: [*answer[:6], 9, 9, 9, *answer[6:12], *answer[14:]],
    "two of four tokens are wrong": lambda answer: [3 + t % 58 if i % 4 > 1 else t for i, t in enumerate(answer)],
}


@pytest.mark.parametrize("search", [None, search_plainly], ids=["no search", "search"])
@pytest.mark.parametrize("edit", EDITS)
def test_answers_with_a_draft_of_their_caller_are_those_without_it(native: Any, edit: str, search: Any) -> None:
    """With the pauses, penalties and stops of other drafts. How a draft fared is told with the tokens."""
    expected = answers(native(**SHORT), 0)
    drafts = {key: tuple(EDITS[edit](told[0])) for key, told in expected.items()}
    driver = native(search=search, checks_drafts=True, **SHORT)
    assert answers(driver, 0, drafts) == expected
    used = [event for event in driver.events if isinstance(event, SequenceTokens) and event.draft_use]
    accepted, rejected = (sum(column) for column in zip(*(event.draft_use for event in used), strict=True))
    assert all(event.draft_use.accepted <= len(event.tokens) for event in used)
    if search is None:
        assert (len(used), accepted + rejected, accepted) == driver.pool.scheduler.drafter.figures
    n_tokens = sum(map(len, drafts.values()))
    if edit == "two of four tokens are wrong":
        assert rejected < n_tokens, "as many at most as a prompt of that length costs"
    else:
        assert accepted > n_tokens / 2, (accepted, rejected, n_tokens)


PLACES = {
    "at its beginning": ([], [1, 2, 3]),
    "along it": ([1, 2, 3], [4, 5, 6]),
    "behind a changed token": ([1, 2, 9], [4, 5, 6]),
    "behind two changed tokens nowhere": ([1, 2, 9, 9], []),
    "behind two changed tokens, once two are found": ([1, 2, 9, 9, 5, 6], [7, 8, 5]),
    "behind tokens that were inserted": ([1, 2, 9, 9, 9, 9, 3, 4], [5, 6, 7]),
    "behind tokens that were left out": ([1, 2, 7, 8], [5, 6, 9]),
    "nearest of equal matches": ([1, 2, 9, 9, 5, 6], [7, 8, 5]),
    "of two the longer match": ([1, 9, 9, 8, 5, 6], [9]),
    "at its end nowhere": ([1, 2, 3, 4, 5, 6, 7, 8, 5, 6, 9], []),
}


@pytest.mark.parametrize("place", PLACES)
def test_a_caller_s_draft_goes_on_where_the_answer_stands_in_it(place: str) -> None:
    answer, expected = PLACES[place]
    by_token, at_once = (CallerDraft((1, 2, 3, 4, 5, 6, 7, 8, 5, 6, 9), 2) for _ in range(2))
    for length in range(len(answer)):
        by_token.draft([0, 0, *answer[:length]], 3, ALL_PRIORS)
    for draft in (by_token, at_once):
        found = draft.draft([0, 0, *answer], 3, [1.0] * len(ALL_PRIORS))
        assert list(found.tokens if found else ()) == expected


def test_an_answer_that_comes_again_is_drafted_from_the_first_one(native: Any) -> None:
    """One that nobody broke off, in its own namespace and with its own adapter only."""
    driver = native(search=search_plainly)
    said = {"sampling": Sampling(ignore_eos=True), "cache_salt": "tenant"}
    first = driver.run("first", [7, 8, 9], 40, adapter="a", **said)
    steps = len(driver.batches)
    drafts = driver.pool.scheduler.drafter.figures
    assert driver.run("again", [7, 8, 9], 40, adapter="a", **said) == first
    assert len(driver.batches) - steps < steps / 2
    accepted = driver.pool.scheduler.drafter.figures.accepted - drafts.accepted
    assert accepted > 20


POISON = 60


@pytest.fixture(scope="module")
def spoilt(tmp_path_factory: pytest.TempPathFactory) -> World:
    """A model that cannot compute the token POISON: the first number of its hidden state meets weights too large."""
    world = wide_world(tmp_path_factory.mktemp("spoilt"))
    tensors = load_file(world.base / "model.safetensors")
    for name, tensor in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor[0] = 0.0
        elif name.endswith("layers.0.self_attn.v_proj.weight"):
            tensor[:, 0] = 3e38
    tensors["model.embed_tokens.weight"][:, 0] = torch.arange(61) == POISON
    save_file(tensors, world.base / "model.safetensors")
    return world


@pytest.mark.parametrize("flags", FLAGS, ids=FLAG_IDS)
def test_the_nan_of_a_guess_touches_nobody(
    spoilt: World, make_driver: Callable[..., Driver], flags: dict[str, Any]
) -> None:
    """A token that cannot be computed is guessed before each: where it is wrong, nothing is seen of it.

    Where it is right, the answer ends behind it, as without drafts.
    """
    poisoned = guess(lambda query: [POISON, POISON] if query.tail[0] != 8 else [])
    plain, drafting = (cpu_driver(make_driver, spoilt, flags, search=search) for search in (None, poisoned))
    for driver in (plain, drafting):
        for key, token, bias in (("wrong", 7, -100.0), ("other", 8, -100.0), ("right", 9, 100.0)):
            driver.ask(key, [token, 9, 10], 40, sampling=Sampling(ignore_eos=True, logit_bias=((POISON, bias),)))
        driver.finish()
    assert drafting.pool.scheduler.drafter.figures.drafts > 20
    for key in ("wrong", "other"):
        assert drafting.answer(key) == plain.answer(key)
        assert len(plain.answer(key)) == 40
    assert drafting.answer("right") == plain.answer("right") == [POISON]
    assert drafting.ending("right").detail == plain.ending("right").detail == NOT_FINITE


def test_nothing_is_drafted_from_what_another_namespace_or_adapter_was_answered(native: Any) -> None:
    """A secret that one tenant's answers end in is no guess of anybody else's, and of its own ones only here."""
    asked: list[DraftQuery] = []

    def search(queries: Sequence[DraftQuery]) -> list[Draft]:
        asked.extend(queries)
        return guess(lambda _: [5])(queries)  # something is found, so that every step asks

    driver = native(search=search)
    secret = driver.run("secret", [7, 8, 9], 30, adapter="a", cache_salt="acme", sampling=GREEDY)

    def knows(**fields: Any) -> bool:
        asked.clear()
        driver.run(f"r{len(driver.outputs)}", [7, 8, 11], 4, sampling=GREEDY, **fields)
        return any(query.text[: len(secret)].tolist() == secret for query in asked)

    assert knows(adapter="a", cache_salt="acme")
    assert not knows(adapter="a", cache_salt="initech")
    assert not knows(adapter="a", cache_salt="acme\nother")
    assert not knows(adapter="b", cache_salt="acme")
    assert not knows(cache_salt="acme")


def test_an_answer_that_was_broken_off_is_not_remembered(native: Any) -> None:
    driver = native(search=search_plainly)
    driver.ask("r", [7, 8, 9], 30, adapter="a", sampling=GREEDY)
    while len(driver.answer("r")) < 5:
        driver.beat()
    driver.post(Stop("r", driver.pool.sequences["r"].start.epoch))
    driver.beat()
    assert not driver.pool.sequences
    assert not driver.pool.scheduler.drafter.answers.use(("", "a"), 0.0).tokens


def test_a_failure_while_guesses_are_checked_ends_those_that_were_ahead_alone(native: Any) -> None:
    """What may come behind a guess that was taken early cannot be taken back."""
    penalised = Sampling(ignore_eos=True, frequency_penalty=0.5)
    texts = [[7, 8, 9, *native().run("r", [7, 8, 9], 20, sampling=penalised)]]
    driver = native(search=know(texts, 0, wrong=0.0))
    sample, calls = driver.engine.executor.sample, 0

    def fail_in_the_third_round(logits: Any, draws: Any) -> Any:
        nonlocal calls
        calls = calls + 1 if len(draws) == 1 else 0  # a round of one row; first come all rows of the step
        if calls == 2:
            raise RuntimeError("broken")
        return sample(logits, draws)

    driver.engine.executor.sample = fail_in_the_third_round
    driver.ask("free", [8, 8], 30, sampling=GREEDY)
    driver.ask("ahead", [7, 8, 9], 20, sampling=penalised)
    driver.finish()
    ending = driver.ending("ahead")
    assert (ending.reason, ending.detail) == (
        EndReason.INTERNAL,
        "RuntimeError: the step failed while guesses were checked",
    )
    assert driver.answer("free") == native().run("free", [8, 8], 30, sampling=GREEDY)


# ---- which guesses pay


def test_as_many_guesses_are_taken_as_give_the_most_tokens_of_their_time() -> None:
    model = StepModel(10.0, 0.0, 0.0, 1.0, ((1, 10.0), (2, 14.0), (3, 14.5), (4, 16.5), (9, 22.0)))
    scheduler = BatchScheduler(BatchLimits(max_batch_tokens=9), model)
    one = Batch((Row("r", "", 1, samples=True),), 0)
    assert scheduler.guesses_worth(one, [0.3]) == 0, "the first one more costs four tenths of a step"
    assert scheduler.guesses_worth(one, [0.3, 0.3]) == 2, "and the second hardly anything"
    assert scheduler.guesses_worth(one, [0.9, 0.8, 0.7, 0.05]) == 3
    assert scheduler.guesses_worth(one, [1.0] * 20) == 8, "tokens of a step"
    four = Batch(tuple(Row(f"r{i}", "", 1, samples=True) for i in range(4)), 0)
    assert scheduler.guesses_worth(four, [0.4] * 4) == 0
    assert scheduler.guesses_worth(four, [0.6] * 4) == 4
    limited = BatchScheduler(BatchLimits(max_batch_tokens=9, token_time_ms=14.2), model)
    assert limited.guesses_worth(one, [0.9] * 8) == 1, "the token time"


def test_guesses_cost_what_was_measured_of_steps_of_as_many_tokens() -> None:
    model = StepModel(10.0, 0.5, 0.0, 3.0, ((1, 10.0), (2, 14.0), (5, 20.0), (6, 21.0)))
    assert [model.guesses_ms(1, n) for n in (0, 1, 2, 4)] == [0.0, 4.0, 6.0, 10.0]
    assert [model.guesses_ms(2, n) for n in (1, 3, 4)] == [2.0, 6.0, 7.0]
    assert model.guesses_ms(4, 4) == 3.0 + 2 * 3.0, "beyond those that were measured a prompt's token"
    assert StepModel(10.0, 0.5, 0.0, 1.0).guesses_ms(3, 4) == 2.0, "not measured: each costs a row"


def test_what_steps_with_guesses_take_more_is_learnt_and_forgotten() -> None:
    times = StepTimeEstimator(StepModel(10.0, 0.0, 0.0, 1.0, ((1, 10.0), (2, 11.0))))
    for _ in range(60):
        times.learn(1, 0, 0, 14.0, 1)
    assert times.guesses_ms(1, 1) == pytest.approx(4.0, abs=0.1)
    assert times.decode == 1.0
    for _ in range(10_000):
        times.learn(1, 0, 0, 10.0)
    assert times.guesses_ms(1, 1) == pytest.approx(1.0, abs=0.1)


# ---- what is remembered

ADDED = st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 40), st.floats(0.0, 60.0)), max_size=60)


@given(ADDED)
def test_texts_stay_within_their_bounds_and_end_in_the_latest_answers(added: list[tuple[str, int, float]]) -> None:
    answers, now = RecentAnswers(max_text_tokens=64, max_bytes=13_000, max_age_s=100.0), 0.0
    last: dict[str, tuple[float, list[int]]] = {}
    for number, (adapter, length, wait_s) in enumerate(added):
        now += wait_s
        answers.add(("ns", adapter), [number] * length, now)
        last[adapter] = now, [number] * length
        check_recent_answers(answers)
        text = answers.use(("ns", adapter), now).tokens
        assert len(text) <= 64
        assert text[-length - 1 :].tolist() == [*[number] * length, -1]
    for adapter, (at, _) in last.items():
        known = len(answers.use(("ns", adapter), now).tokens)
        assert not known or now - at <= 100.0
        check_recent_answers(answers)


def test_a_text_that_gives_nothing_is_searched_half_as_often_each_time_and_at_every_step_once_it_gives() -> None:
    text, dues = RecentAnswers().use(("ns", "a"), 0.0), list[int]()
    for found in (False, False, False, False, True):
        text.rest(text.due, was_found=found, max_steps=10)
        dues.append(text.due)
    assert dues == [2, 6, 14, 25, 26]


def test_a_text_longer_than_its_bound_is_cut_at_its_beginning() -> None:
    answers = RecentAnswers(max_text_tokens=64)
    answers.add(("ns", "a"), range(200), 0.0)
    assert answers.use(("ns", "a"), 0.0).tokens.tolist() == [*range(137, 200), -1]


def test_guesses_are_expected_by_how_those_of_their_kind_have_fared() -> None:
    acceptance = Acceptance()

    def draft() -> Draft:
        return weigh_alike((5, 6), SUREST, acceptance.shares)

    sure = draft()
    assert sure.gains[1] > 0.8
    prior = acceptance.shares[SUREST]
    for _ in range(200):
        acceptance.learn(sure, 0, checked=True)
    assert not draft().tokens, "less than anything is worth"
    for _ in range(300):
        acceptance.pass_over(sure)
    assert 0.9 * prior < acceptance.shares[SUREST] <= prior
    assert draft().gains[0] > 0.8, "and tried again some day"
    for _ in range(200):
        acceptance.learn(sure, 2, checked=False)
    assert draft().gains[1] > 0.95
