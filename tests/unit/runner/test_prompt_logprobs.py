"""Log probabilities of a prompt: each position once while it is prefilled, whatever happens to the sequence."""

from dataclasses import replace

import pytest

from harness.numerics import near
from weft.domain.ids import Epoch
from weft.domain.request import Ended, FinishReason, PromptLogprobs, Sampling, SequenceTokens, Stop
from weft_runner.core import BatchLimits
from weft_runner.core.batch import MAX_LOGIT_ROWS, Candidate, form_batch
from weft_runner.core.request_pool import check_pool

SCORED = Sampling(prompt_logprobs=2, ignore_eos=True)
PROMPT = [(7 * i) % 60 for i in range(90)]


def parts_of(driver, key="r"):
    return [event for event in driver.events if isinstance(event, PromptLogprobs) and event.request_id == key]


def positions(parts):
    return [part.first + i for part in parts for i in range(len(part.logprobs))]


def test_every_position_behind_the_first_has_one_before_the_first_token(drive):
    driver = drive()
    driver.run("r", PROMPT, 2, sampling=SCORED)
    assert positions(parts_of(driver)) == list(range(1, 90))
    assert max(len(part.logprobs) for part in parts_of(driver)) <= MAX_LOGIT_ROWS
    kinds = [type(event) for event in driver.events]
    assert kinds.index(SequenceTokens) == len(parts_of(driver))
    assert all(len(one.top) == 2 for part in parts_of(driver) for one in part.logprobs)


@pytest.mark.numeric
def test_a_prompts_log_probabilities_are_those_of_the_same_text_as_an_answer(drive):
    answered, scored = drive(), drive()
    answer = answered.run("r", PROMPT[:5], 8, sampling=Sampling(top_logprobs=2, ignore_eos=True))
    scored.run("r", [*PROMPT[:5], *answer], 0, sampling=SCORED)
    expected = [one for event in answered.events for one in event.logprobs]
    found = [one for part in parts_of(scored) for one in part.logprobs][4:]
    scores, others = ([one.logprob for one in each] for each in (found, expected))
    near("fp32: log probabilities of two orders of steps", scores, others, 1e-4)
    assert [[t for t, _ in one.top] for one in found] == [[t for t, _ in one.top] for one in expected]


@pytest.mark.parametrize("prompt", [PROMPT, PROMPT[:1], PROMPT[:2]], ids=len)
def test_without_an_answer_a_request_ends_behind_its_prompt(drive, prompt):
    driver = drive()
    driver.run("r", prompt, 0, sampling=SCORED)
    check_pool(driver.pool)
    assert positions(parts_of(driver)) == list(range(1, len(prompt)))
    ending = driver.ending("r")
    assert (ending.finish, ending.tokens, driver.answer("r")) == (FinishReason.LENGTH, (), [])


def test_no_page_of_an_earlier_prompt_is_read_for_it(drive):
    driver = drive()
    for key in ("first", "second"):
        driver.run(key, PROMPT, 1, sampling=replace(SCORED, prompt_logprobs=None), cache_salt="ns")
    assert driver.pool.reuse.tokens > 0
    reused = driver.pool.reuse.tokens
    driver.run("r", PROMPT, 1, sampling=SCORED, cache_salt="ns")
    assert positions(parts_of(driver)) == list(range(1, 90))
    assert driver.pool.reuse.tokens == reused


def test_a_sequence_that_starts_again_has_all_of_them_again(drive):
    driver = drive()
    driver.post(first := driver.request("r", PROMPT, 2, sampling=SCORED))
    while not parts_of(driver):
        driver.beat()
    driver.post(Stop("r", first.epoch))
    driver.beat()
    before = len(parts_of(driver))
    driver.run("r", PROMPT, 2, sampling=SCORED, epoch=Epoch(2, 1))
    assert positions(parts_of(driver)[before:]) == list(range(1, 90))


def test_a_prompt_whose_logits_are_not_finite_ends_with_that_reason_alone(drive):

    def spoiled(_step, logits):
        logits = logits.clone()
        if len(logits) > 3:
            logits[3, 0] = float("nan")
        return logits

    driver = drive()
    driver.change_logits(spoiled)
    driver.ask("beside", [3, 4], 6, sampling=Sampling(ignore_eos=True))
    driver.run("r", PROMPT, 2, sampling=SCORED)
    ending = driver.ending("r")
    assert isinstance(ending, Ended)
    assert "not finite" in ending.detail
    assert parts_of(driver) == []
    assert len(driver.answer("beside")) == 6


def test_rows_of_logits_of_an_iteration_are_bounded_over_all_its_prompts():
    scored = [Candidate(f"s{i}", "", 20, scores=True) for i in range(3)]
    plain = Candidate("p", "", 300)
    batch = form_batch([plain, *scored], [], BatchLimits(max_prefills=9, max_batch_tokens=512))
    assert [(row.key, row.n_tokens) for row in batch.rows] == [("p", 300), ("s0", 20), ("s1", MAX_LOGIT_ROWS - 20)]


def test_logits_of_a_step_are_of_the_scored_tokens_and_the_one_that_samples(drive):
    seen = []

    def watched(step, logits):
        seen.append((step.arrays.sampled.tolist(), len(logits)))
        return logits

    driver = drive()
    driver.change_logits(watched)
    driver.run("r", PROMPT[:5], 2, sampling=SCORED)
    assert seen == [([0, 1, 2, 3, 4], 5), ([0], 1)]
