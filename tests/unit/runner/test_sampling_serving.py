"""Penalties, biases and log probabilities from the Start to the Step: wire, request pool and engine."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch

from harness.numerics import near
from weft.domain.ids import Epoch
from weft.domain.request import FinishReason, Sampling, SequenceTokens, Stop, TokenLogprob

PENALISED = Sampling(frequency_penalty=0.7, presence_penalty=0.4, logit_bias=((5, 1.0), (9, -2.0)), ignore_eos=True)
TOLD = Sampling(seed=3, temperature=1.0, top_p=0.9, top_logprobs=4, ignore_eos=True)


def logprobs_of(driver, key: str) -> list[TokenLogprob]:
    """One for each token of an answer, aligned with it in every event."""
    found = []
    for event in driver.events:
        if isinstance(event, SequenceTokens) and event.request_id == key:
            assert len(event.logprobs) == len(event.tokens)
            found.extend(event.logprobs)
    return found


def test_penalties_count_what_the_answer_has_said_and_change_what_it_says_next(drive):
    """Every answer token is what the shifted logits of that moment give: penalties over the answer, not the prompt."""
    driver = drive()
    seen: list[tuple[torch.Tensor, list[int]]] = []

    def watched(_step, logits):
        seen.append((logits.clone(), driver.answer("r")))
        return logits

    driver.change_logits(watched)
    answer = driver.run("r", [5, 5, 5, 9], 30, sampling=PENALISED)
    assert len(answer) == len(seen) == 30
    for position, (logits, said) in enumerate(seen):
        assert said == answer[:position]
        row = logits[0].double().numpy()
        for token in set(said):
            row[token] -= said.count(token) * 0.7 + 0.4
        row[5] += 1.0
        row[9] -= 2.0
        assert answer[position] == int(np.argmax(row.astype(np.float32)))
    plain = drive().run("r", [5, 5, 5, 9], 30, sampling=Sampling(ignore_eos=True))
    assert len(set(answer)) > len(set(plain)), "penalties bring variety into a small model's loops"


PENALTIES = Sampling(
    seed=11, temperature=0.8, top_p=0.95, frequency_penalty=1.1, presence_penalty=-0.3, logit_bias=((2, 2.0),),
    top_logprobs=3, ignore_eos=True,
)  # fmt: skip
CUTS = Sampling(
    seed=12, temperature=1.8, top_k=9, min_p=0.01, repetition_penalty=1.2, min_tokens=9, bad_words=((5,), (6, 7)),
    top_logprobs=3, ignore_eos=True,
)  # fmt: skip


@pytest.mark.numeric
@pytest.mark.parametrize("cut", [1, 7, 19])
@pytest.mark.parametrize("sampling", [PENALTIES, CUTS], ids=["penalties", "cuts"])
def test_an_answer_with_penalties_and_log_probabilities_is_continued_by_a_replay(drive, cut, sampling):
    alone, moved = drive(), drive()
    alone.run("r", [5, 6, 7], 20, sampling=sampling)
    moved.ask("r", [5, 6, 7], 20, sampling=sampling)
    while len(moved.answer("r")) < cut:
        moved.beat()
    moved.post(Stop("r", moved.pool.sequences["r"].start.epoch))
    emitted = tuple(moved.answer("r"))
    moved.run("r", [5, 6, 7], 20, sampling=sampling, emitted=emitted, epoch=Epoch(2, 1))
    assert moved.answer("r") == alone.answer("r")
    ours, theirs = logprobs_of(moved, "r"), logprobs_of(alone, "r")
    assert len(ours) == len(theirs) == 20
    for one, other in zip(ours, theirs, strict=True):
        near("fp32: log probabilities of two orders of steps", one.logprob, other.logprob, 1e-4)
        assert [token for token, _ in one.top] == [token for token, _ in other.top]


def test_log_probabilities_are_told_for_those_who_asked_alone(drive):
    driver = drive()
    driver.post(
        driver.request("told", [3, 4], 6, sampling=TOLD),
        driver.request("bare", [3, 4], 6, sampling=Sampling(top_logprobs=0, ignore_eos=True)),
        driver.request("silent", [3, 4], 6, sampling=Sampling(ignore_eos=True)),
    )
    driver.finish()
    assert [len(entry.top) for entry in logprobs_of(driver, "told")] == [4] * 6
    bare = logprobs_of(driver, "bare")
    assert len(bare) == 6
    assert all(entry.top == () and entry.logprob < 0.0 for entry in bare)
    assert not any(event.logprobs for event in driver.events if event.request_id == "silent")


def test_the_token_that_ends_an_answer_is_not_told_and_neither_is_its_log_probability(drive, world):
    eos = next(iter(world.spec.eos))
    driver = drive()
    driver.run("r", [3, 4], 6, sampling=Sampling(top_logprobs=0, logit_bias=((eos, 100.0),)))
    ending = driver.ending("r")
    assert isinstance(ending, SequenceTokens)
    assert (ending.finish, ending.tokens, ending.logprobs) == (FinishReason.EOS, (), ())


def test_neither_the_end_of_text_nor_a_stop_token_comes_before_min_tokens(drive, world):
    eos = next(iter(world.spec.eos))
    forced = Sampling(min_tokens=4, stop_token_ids=(9,), logit_bias=((eos, 90.0), (9, 100.0)), top_logprobs=0)
    driver = drive()
    driver.ask("stop", [3, 4], 8, sampling=forced)
    driver.ask("end", [3, 4], 8, sampling=replace(forced, stop_token_ids=()))
    driver.ask("own", [3, 4], 8, sampling=replace(forced, stop_token_ids=(), eos_token_ids=(9,)))
    driver.run("ignored", [3, 4], 8, sampling=replace(forced, logit_bias=((eos, 90.0),), ignore_eos=True))
    stopped, ended = driver.ending("stop"), driver.ending("end")
    assert (stopped.finish, stopped.tokens, len(stopped.logprobs)) == (FinishReason.STOP, (9,), 1)
    assert [token in (eos, 9) for token in driver.answer("stop")] == [False] * 4 + [True]
    assert driver.answer("end")[4:] == [9] * 4, "a token that stops nothing"
    assert ended.finish is FinishReason.LENGTH
    assert (len(driver.answer("own")), driver.ending("own").finish) == (4, FinishReason.EOS), "an adapter's end"
    assert eos not in driver.answer("ignored")[:4]
    assert driver.answer("ignored")[4:] == [eos] * 4


def test_a_sequence_that_min_tokens_alone_adjusts_is_adjusted_no_more_behind_them(drive):
    driver = drive()
    driver.ask("r", [3, 4], 8, sampling=Sampling(min_tokens=2, ignore_eos=True))
    found = []
    while not found or driver.pool.sequences:
        driver.beat()
        found += [sequence.adjustments is None for sequence in driver.pool.sequences.values()]
    assert (found[0], found[-1]) == (False, True)


def test_bad_words_never_come_and_their_beginnings_do(drive):
    answer = drive().run("r", [3, 4], 12, sampling=Sampling(ignore_eos=True))
    words = ((answer[3], answer[4]), (answer[6],))
    found = drive().run("r", [3, 4], 12, sampling=Sampling(ignore_eos=True, bad_words=words))
    assert words[0] not in pairwise(found)
    assert words[1][0] not in found
