"""Grammars and allowed tokens from the Start to the Step: machine, compiling threads, masks and engine."""

import json
import os
import random
import re
import threading
from dataclasses import replace
from functools import partial
from math import inf
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from llguidance import LLMatcher

from harness.draft_search import guess, know
from harness.quickstart import QUICKSTART, tokenizer
from harness.runner_machine import RecordedGrammar, start_of
from harness.small_runner import LaggingThreads, World, executor_of
from harness.waiting import PATIENCE_S
from weft.domain.ids import Epoch
from weft.domain.machine import TICK, Closed, Connected, Kind, Peer, Received, Send
from weft.domain.request import Ended, EndReason, FinishReason, NoCapacity, Sampling, SequenceTokens, SessionHello, Stop
from weft_runner.core import Runner, SampledToken, Sequence, StepModel
from weft_runner.core.events import CompileGrammar, GrammarCompiled, RunStep, StepDone, StepResults, StepSlot
from weft_runner.core.token_mask import token_mask
from weft_runner.model import GrammarRefused, Grammars, GrammarThreads, grammar

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": "^[a-z]{1,6}$"},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
JSON = LLMatcher.grammar_from_json_schema(SCHEMA, defaults={"whitespace_flexible": False})
PHONE = LLMatcher.grammar_from_regex(r"\+[0-9]{2} [0-9]{3,5}")
EOS = 1
WAIT_S = 10.0  # for a grammar that compiles, and for a mask
VOCAB: int = json.loads((QUICKSTART / "model" / "config.json").read_text())["vocab_size"]


# ---- the machine: a Start waits for its grammar, and nothing else does

G = Peer(Kind.GATEWAY, "g/1")


@pytest.fixture
def machine(drive) -> Runner:
    runner = Runner(replace(drive().limits, max_sequences=2))
    runner.handle(Connected(G, SessionHello("g", "")), 0.0)
    return runner


def constrained(key: str, epoch: int = 1, **fields: Any) -> Any:
    return start_of(key, epoch, [3, 4], 4, sampling=Sampling(grammar="start: /a/"), **fields)


def begin_two(machine: Runner, state: RecordedGrammar) -> None:
    """Begin `r` with that grammar, and `free` without one."""
    machine.handle(Received(G, constrained("r")), 0.0)
    machine.handle(GrammarCompiled(G, "r", Epoch(1, 1), state), 0.0)
    machine.handle(Received(G, start_of("free", 1, [3], 40)), 0.0)


def said(effects: list[Any]) -> list[Any]:
    return [effect.message for effect in effects if isinstance(effect, Send) and effect.peer == G]


def test_a_request_is_admitted_once_its_grammar_is_compiled_and_others_do_not_wait(machine):
    effects = machine.handle(Received(G, constrained("r", emitted=(5,))), 0.0)
    assert CompileGrammar(G, "r", Epoch(1, 1), "start: /a/", (5,)) in effects
    machine.handle(Received(G, start_of("free", 1, [3], 4)), 0.0)
    assert list(machine.pool.sequences) == ["free"]
    state = RecordedGrammar()
    machine.handle(GrammarCompiled(G, "r", Epoch(1, 1), state), 0.1)
    mask = machine.pool.sequences["r"].mask
    assert mask is not None
    assert mask.grammar is state
    machine.check()


def test_a_grammar_that_does_not_compile_ends_its_request_by_name(machine):
    machine.handle(Received(G, constrained("r")), 0.0)
    effects = machine.handle(GrammarCompiled(G, "r", Epoch(1, 1), None, "it is wrong"), 0.1)
    assert said(effects) == [Ended("r", Epoch(1, 1), EndReason.GRAMMAR, "it is wrong")]


@pytest.mark.parametrize("end", [Received(G, Stop("r", Epoch(1, 1))), Closed(G)])
def test_a_request_that_is_stopped_while_its_grammar_compiles_never_starts(machine, end):
    machine.handle(Received(G, constrained("r")), 0.0)
    machine.handle(end, 0.0)
    machine.handle(GrammarCompiled(G, "r", Epoch(1, 1), RecordedGrammar()), 0.1)
    assert not machine.pool.sequences
    assert not machine.grammars.waiting


def test_the_state_of_an_earlier_epoch_is_not_taken_for_a_later_one(machine):
    machine.handle(Received(G, constrained("r", 1)), 0.0)
    machine.handle(Received(G, constrained("r", 2, emitted=(7,))), 0.0)
    machine.handle(GrammarCompiled(G, "r", Epoch(1, 1), RecordedGrammar()), 0.1)
    assert not machine.pool.sequences
    machine.handle(GrammarCompiled(G, "r", Epoch(1, 2), RecordedGrammar()), 0.2)
    assert machine.pool.sequences["r"].start.epoch == Epoch(1, 2)


def test_who_waits_is_bounded_in_number_and_in_time(machine):
    for key in "ab":
        machine.handle(Received(G, constrained(key)), 0.0)
    (refused,) = said(machine.handle(Received(G, constrained("c")), 0.0))
    assert isinstance(refused, NoCapacity)
    deadline = machine.next_deadline()
    assert deadline is not None
    assert deadline <= WAIT_S
    ended = [one for one in said(machine.handle(TICK, WAIT_S)) if isinstance(one, Ended)]
    assert [(one.request_id, one.reason) for one in ended] == [("a", EndReason.GRAMMAR), ("b", EndReason.GRAMMAR)]


def test_tokens_that_came_with_kv_of_another_runner_advance_the_grammar():
    state = RecordedGrammar()
    start = constrained("r")
    sequence = Sequence(start, G, "g", admitted=1, now=0.0, max_context_tokens=50, mask=token_mask((), state, 50))
    sequence.await_kv()
    sequence.take_kv(2, [9], 0)
    assert state.tokens == [9]


@pytest.mark.parametrize("comes", [True, False])
def test_a_row_whose_mask_does_not_come_in_time_ends_by_name_and_no_other(machine, comes):
    state, slot = RecordedGrammar(), StepSlot()
    begin_two(machine, state)
    state.ready = False
    machine.handle(slot, 1.0)
    machine.handle(slot, 5.0)
    due = machine.next_deadline()
    assert due is not None
    assert due <= 1.0 + WAIT_S
    assert machine.pool.timers.get(("mask", "r")) == 1.0 + WAIT_S, "since it waits"
    machine.handle(TICK, WAIT_S)
    assert len(machine.pool.sequences) == 2
    state.ready = comes
    ended = said(machine.handle(TICK, 1.0 + WAIT_S))
    detail = "the mask behind a token was not there within 10 s"
    assert ended == ([] if comes else [Ended("r", Epoch(1, 1), EndReason.GRAMMAR, detail)])
    assert list(machine.pool.sequences) == ["r", "free"][not comes :]
    assert not machine.pool.masks.late
    machine.check()


def test_a_row_whose_mask_is_not_ready_sits_out_and_runs_once_it_is(machine):
    state = RecordedGrammar()
    begin_two(machine, state)

    def step(depth: int = 1, **done: Any) -> set[str]:
        """Run a step; each of its rows gets a token."""
        (run,) = [effect for effect in machine.handle(StepSlot(depth, depth), 0.0) if isinstance(effect, RunStep)]
        keys = [row.key for row in run.batch.rows]
        tokens = {key: SampledToken(5) for key in keys if key not in done.get("late", ())}
        machine.handle(StepDone(run, StepResults(tokens, {}, **done), 1.0), 0.0)
        return set(keys)

    while "r" not in step():
        pass
    assert step() == {"r", "free"}
    assert step(late=("r",)) == {"r", "free"}
    state.ready = False
    assert [step(), step(), step()] == 3 * [{"free"}]
    machine.handle(Received(G, Stop("free", Epoch(1, 1))), 0.0)
    machine.handle(StepSlot(), 0.0)
    assert not machine.pool.runnable
    state.ready = True
    assert [step(), step(2, late=("r",)), step()] == 3 * [{"r"}], "of four tokens it has four, whatever was late"
    assert state.tokens == 4 * [5]
    machine.check()


def test_a_row_whose_masks_take_long_is_in_every_second_step_and_the_others_in_each(machine):
    state = RecordedGrammar()
    state.quick = False
    begin_two(machine, state)
    rows, behind = list[set[str]](), None
    for _ in range(6):
        assert behind is None or not machine.may_repeat(behind)
        (step,) = [one for one in machine.handle(StepSlot(previous=behind), 0.0) if isinstance(one, RunStep)]
        if behind is not None:
            tokens = {row.key: SampledToken(5) for row in behind.batch.rows}
            machine.handle(StepDone(behind, StepResults(tokens, {}), 1.0), 0.0)
        behind = step
        rows.append({row.key for row in step.batch.rows})
    prompts = [{"r"}, {"free"}]
    assert rows == [*prompts, {"r", "free"}, {"free"}, {"r", "free"}, {"free"}]


# ---- threads beside the steps


def test_a_long_job_goes_on_at_a_lower_priority_and_delays_no_other():
    threads, lower = GrammarThreads(1), min(os.getpriority(os.PRIO_PROCESS, os.getpid()) + 10, 19)
    went_on, ended, priorities = threading.Event(), threading.Event(), list[int]()

    def priority() -> None:
        priorities.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))

    def long() -> None:
        assert went_on.wait(PATIENCE_S)
        priority()
        ended.set()

    try:
        threads.put(long, long=False)
        threads.put(went_on.set, long=False)
        assert ended.wait(PATIENCE_S)
        ended.clear()
        threads.put(lambda: (priority(), ended.set()), long=True)
        assert ended.wait(PATIENCE_S)
    finally:
        threads.close()
    assert priorities == [lower, lower]


# ---- compiling: named errors, masks as they should be


def grammars(vocab: int = VOCAB, path: Path | None = QUICKSTART / "model" / "tokenizer.json") -> Grammars:
    return Grammars(path, vocab, frozenset({EOS}))


def allowed(state: Any, vocab: int = VOCAB) -> set[int]:
    words = np.zeros(-(-vocab // 32), np.uint32)
    state.late = True
    while state.late:
        state.fill([(state, 0)], words.ctypes.data, words.nbytes, lambda: False)
    return set(np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")).tolist())


def ids(text: str) -> list[int]:
    return tokenizer().encode(text, add_special_tokens=False).ids


def test_the_end_is_allowed_exactly_where_the_grammar_accepts_and_special_tokens_never_are():
    begun = grammars().begin(LLMatcher.grammar_from_regex("ab?"), ())
    assert allowed(begun) == set(ids("a"))
    begun.add(*ids("a"))
    assert allowed(begun) == {EOS, *ids("b")}
    begun.add(*ids("b"))
    assert allowed(begun) == {EOS}


def test_where_the_end_is_allowed_an_adapters_own_is_too_unless_it_is_ignored(machine):
    begun = grammars().begin(LLMatcher.grammar_from_regex("ab?"), (), (0, 2))
    assert allowed(begun) == set(ids("a"))
    begun.add(*ids("a"))
    assert allowed(begun) == {EOS, 0, 2, *ids("b")}
    for key, ignore_eos, ends in (("told", False, (2,)), ("ignored", True, ())):
        sampling = Sampling(grammar="start: /a/", eos_token_ids=(2,), ignore_eos=ignore_eos)
        effects = machine.handle(Received(G, start_of(key, 1, [3], 4, sampling=sampling)), 0.0)
        assert [effect.ends for effect in effects if isinstance(effect, CompileGrammar)] == [ends]


def test_the_bytes_of_a_character_that_has_no_token_are_allowed_one_by_one():
    begun = grammars().begin(LLMatcher.grammar_from_regex("(é|日)"), ())
    assert allowed(begun) == {ids("é")[0], ids("日")[0]}
    begun.add(*ids("日"))
    assert allowed(begun) == {EOS}


def test_tokens_beyond_the_tokenizer_are_masked_out():
    anything = grammars(VOCAB + 90).begin(LLMatcher.grammar_from_regex("(?s:.*)"), ())
    assert max(allowed(anything, VOCAB + 90)) < VOCAB


def test_a_state_made_behind_emitted_tokens_is_the_one_that_took_them_one_by_one():
    text = ids('{"name":"bob","age":1')
    one_by_one, compiled = grammars().begin(JSON, ()), grammars()
    for cut, token in enumerate(text):
        assert allowed(compiled.begin(JSON, text[:cut])) == allowed(one_by_one)
        one_by_one.add(token)


@pytest.mark.parametrize(
    ("grammar", "why"),
    [
        ("start: nothing", "does not compile"),
        (LLMatcher.grammar_from_json_schema({"not": {}}), "Unimplemented keys"),
        (LLMatcher.grammar_from_regex("a(?=b)"), "look-ahead"),
    ],
)
def test_what_does_not_compile_is_refused_by_name(grammar: str, why: str):
    with pytest.raises(GrammarRefused, match=why):
        grammars().begin(grammar, ())


def test_a_mask_that_takes_too_long_is_a_fault_of_its_grammar(monkeypatch):
    compiled = grammars()
    begun = compiled.begin(PHONE, ())
    monkeypatch.setattr(grammar, "MAX_MASK_S", 0.0)
    begun.add(*ids("+"))
    assert allowed(begun) == set()
    assert "more than 0 ms of processor time" in begun.fault
    with pytest.raises(GrammarRefused, match="of processor time"):
        compiled.begin(PHONE, ())


def test_a_grammar_that_others_displace_is_emptied_and_its_answers_go_on(monkeypatch):
    monkeypatch.setattr(grammar, "MAX_COMPILED", 1)
    compiled = grammars()
    begun, (displaced,) = compiled.begin(PHONE, ()), compiled._compiled.values()
    for text in ("a", "b"):
        compiled.begin(LLMatcher.grammar_from_regex(text), ())
    assert displaced.is_error()
    begun.add(*ids("+"))
    assert allowed(begun) == allowed(compiled.begin(PHONE, ids("+"))) == set(ids("0123456789"))


def test_a_mask_that_was_missed_is_told_once_it_is_there():
    compiled, lagging, woken = grammars(), LaggingThreads([1]), list[bool]()
    compiled.threads, compiled.wake = lagging, lambda: woken.append(True)  # type: ignore[assignment]
    begun = compiled.begin(PHONE, ())
    begun.add(*ids("+"))
    assert begun.ready, "it is expected by the end of a step"
    words = np.full(-(-VOCAB // 32), 7, np.uint32)
    begun.fill([(begun, 0)], words.ctypes.data, words.nbytes, lambda: False)
    assert (begun.late, begun.ready, words.any()) == (True, False, False)
    lagging.beat(1)
    assert (woken, begun.ready) == ([True], True)


def test_an_answer_that_is_not_of_its_grammar_is_refused():
    with pytest.raises(GrammarRefused, match="the answer so far"):
        grammars().begin(PHONE, ids("x"))


@pytest.mark.parametrize(
    ("path", "eos", "why"),
    [
        (None, {EOS}, "no tokenizer.json"),
        (QUICKSTART / "model" / "tokenizer.json", set(), "no end of sequence"),
        (QUICKSTART / "model" / "config.json", {EOS}, "cannot be used"),
    ],
)
def test_a_model_that_grammars_cannot_mask_refuses_them_by_name(path: Path | None, eos: set[int], why: str):
    with pytest.raises(GrammarRefused, match=why):
        Grammars(path, VOCAB, frozenset(eos)).begin(PHONE, ())


# ---- the engine

PROMPT = "the quick brown fox"


@pytest.fixture(params=["reference", "cpu"])
def quick(request, tmp_path, make_driver):
    """Drivers over the quickstart's model, on an executor."""
    return quickstart_drivers(tmp_path, make_driver, request.param)


def quickstart_drivers(tmp_path: Path, make_driver: Any, kind: str) -> Any:
    base = tmp_path / "world" / "base"
    base.mkdir(parents=True)
    for path in (QUICKSTART / "model").iterdir():
        (base / path.name).symlink_to(path)
    tokens = json.loads((base / "tokenizer.json").read_text())
    del tokens["model"]["vocab"]["<0xC3>"]  # a byte without a token
    (base / "tokenizer.json").unlink()
    (base / "tokenizer.json").write_text(json.dumps(tokens))
    world = World(tmp_path / "world", json.loads((QUICKSTART / "model" / "config.json").read_text()))
    make = partial(executor_of, kind=kind, dtype="fp32")
    limits = {"page_tokens": 16, "total_pages": 256}
    return lambda **more: make_driver(world, make_executor=make, **{**limits, **more})


def prompt() -> list[int]:
    return [0, *ids(PROMPT), 2]


def text_of(driver: Any, key: str) -> str:
    return "".join(tokenizer().id_to_token(token) for token in driver.answer(key))


def run(driver: Any, **requests: Sampling) -> dict[str, str]:
    driver.post(*(driver.request(key, prompt(), 120, sampling=sampling) for key, sampling in requests.items()))
    driver.finish()
    return {key: text_of(driver, key) for key in requests}


def finish_lagging(driver: Any, lagging: LaggingThreads) -> None:
    """Beat until nothing is left, the threads of its grammars with it."""
    while driver.pool.sequences or driver.engine.runner.grammars.waiting:
        lagging.beat(1)
        driver.post(TICK)
        driver.beat()


def assert_of_schema(text: str) -> None:
    value = json.loads(text)
    assert sorted(value) == ["age", "name", "tags"]
    assert re.fullmatch("[a-z]{1,6}", value["name"])
    assert 0 <= value["age"] <= 120
    assert set(value["tags"]) <= {"a", "b"}
    assert len(value["tags"]) <= 3


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_answers_are_of_their_grammars_and_rows_without_one_say_what_they_say_alone(quick, temperature):
    free = {f"free{i}": Sampling(seed=i, temperature=temperature) for i in range(3)}
    texts = run(
        quick(), **free,
        **{f"json{i}": Sampling(seed=i, temperature=temperature, grammar=JSON) for i in range(3)},
        **{f"phone{i}": Sampling(seed=i, temperature=temperature, grammar=PHONE) for i in range(3)},
        digits=Sampling(temperature=temperature, allowed_token_ids=tuple(ids("0123456789")), ignore_eos=True),
    )  # fmt: skip
    alone = run(quick(), **free)
    for key, text in texts.items():
        if key.startswith("json"):
            assert_of_schema(text)
        elif key.startswith("phone"):
            assert re.fullmatch(r"\+[0-9]{2} [0-9]{3,5}", text)
        elif key == "digits":
            assert re.fullmatch(r"[0-9]{120}", text)
        else:
            assert text == alone[key]


def test_allowed_tokens_and_a_grammar_hold_together(quick):
    few = (*ids("+123 "), EOS)
    (text,) = run(quick(), r=Sampling(seed=1, temperature=1.0, grammar=PHONE, allowed_token_ids=few)).values()
    assert re.fullmatch(r"\+[123]{2} [123]{3,5}", text)


def test_rows_whose_masks_come_late_say_what_they_say_in_time_and_delay_no_other(quick, monkeypatch):
    monkeypatch.setattr("weft_runner.core.awaited_grammars.WAIT_S", inf)  # however slow the machine is
    constrained = {f"json{i}": Sampling(seed=i, temperature=1.0, grammar=JSON, top_logprobs=1) for i in range(3)}
    free = {"free": Sampling(seed=1, temperature=1.0, ignore_eos=True), "scored": Sampling(prompt_logprobs=1)}
    in_time = run(quick(), **constrained, **free)
    for seed in range(3):
        driver, lagging = quick(), LaggingThreads(random.Random(seed).choices((1, 2, 3), k=50))
        driver.engine._grammars._grammars.threads = lagging
        requests = {**constrained, **free}
        driver.post(*(driver.request(key, prompt(), 120, sampling=requests[key]) for key in requests))
        driver.beat()
        lagging.beat(3)  # they are compiled
        while not isinstance(driver.ending("free"), SequenceTokens) or driver.ending("free").finish is None:
            driver.beat()
        late = [key for output in driver.outputs if output.done is not None for key in output.done.results.late]
        assert sorted(late) == [*constrained], "each had its first mask, and sat out after one step without another"
        finish_lagging(driver, lagging)
        assert {key: text_of(driver, key) for key in requests} == in_time


@pytest.mark.parametrize("lags", [(0,), (0, 0, 1)], ids=["in time", "some late"])
def test_answers_of_a_grammar_with_drafts_are_those_without_them(tmp_path, make_driver, lags):
    """A mask is made of each guess that was right; what is behind one that comes late is left to the next step."""
    quick = quickstart_drivers(tmp_path, make_driver, "cpu")
    requests = {f"json{i}": Sampling(seed=i, temperature=1.0, grammar=JSON, top_logprobs=1) for i in range(3)}
    requests |= {f"phone{i}": Sampling(seed=i, temperature=1.0, grammar=PHONE, frequency_penalty=0.5) for i in range(3)}
    requests["free"] = Sampling(seed=1, temperature=0.5)
    plain = quick()
    expected = run(plain, **requests)
    drafting = quick(search=know([[*prompt(), *plain.answer(key)] for key in requests], 0))
    drafting.pool.scheduler.guesses_worth = lambda _, gains: len(gains)
    lagging = drafting.engine._grammars._grammars.threads = LaggingThreads(lags)
    drafting.post(*(drafting.request(key, prompt(), 120, sampling=sampling) for key, sampling in requests.items()))
    drafting.beat()
    finish_lagging(drafting, lagging)
    assert {key: text_of(drafting, key) for key in requests} == expected
    assert drafting.pool.scheduler.drafter.figures.accepted > 50


def test_what_a_form_leaves_no_choice_about_is_drafted(tmp_path, make_driver):
    """Keys and punctuation of JSON: nothing is known of the text but its grammar.

    What has to follow a token that was drawn is known some time later, and a step that takes long waits for it.
    """
    quick, sampling = quickstart_drivers(tmp_path, make_driver, "cpu"), Sampling(seed=1, temperature=1.0, grammar=JSON)
    plain, drafting = quick(), quick(search=guess(lambda _: []))
    scheduler, grammars = drafting.pool.scheduler, drafting.engine._grammars._grammars
    scheduler.guesses_worth, scheduler.step_time.model = lambda _, gains: len(gains), StepModel(1e5, 0.0, 0.0, 1.0)
    grammars.finds_forced = grammars.steps_wait = True
    assert run(drafting, r=sampling) == run(plain, r=sampling)
    matcher, left, steps = LLMatcher(grammars.prepare(), JSON), [*plain.answer("r"), EOS], 0
    while left:
        ahead = matcher.compute_ff_tokens() if steps else []  # the first step is the prompt's
        n_right = next((at for at, token in enumerate(ahead) if token != left[at]), len(ahead))
        assert matcher.consume_tokens(left[: n_right + 1])
        left, steps = left[n_right + 1 :], steps + 1
    assert len(drafting.batches) == steps < len(plain.batches) - 10


@pytest.mark.parametrize("cut", [1, 9, 20])
def test_an_answer_that_moves_goes_on_as_if_it_had_not(quick, cut):
    sampling = Sampling(seed=7, temperature=1.0, grammar=JSON)
    (alone,) = run(quick(), r=sampling).values()
    source, target = quick(), quick()
    source.ask("r", prompt(), 120, sampling=sampling)
    while len(source.answer("r")) < cut:
        source.beat()
    emitted = tuple(source.answer("r"))
    rest = target.run("r", prompt(), 120, sampling=sampling, emitted=emitted, epoch=Epoch(2, 1))
    assert "".join(map(tokenizer().id_to_token, [*emitted, *rest])) == alone
    assert_of_schema(alone)


@pytest.mark.parametrize("lags", [(0,), (0, 0, 3)], ids=["in time", "some late"])
def test_answers_that_are_swapped_out_and_back_are_those_of_undisturbed_ones(quick, monkeypatch, lags):
    """All are admitted before pages are short: one whose grammar is compiled only then is refused, to come again."""
    monkeypatch.setattr("weft_runner.core.swap.swaps.RATE", 0.0)  # copies are the cheaper way,
    monkeypatch.setattr("weft_runner.core.awaited_grammars.WAIT_S", inf)  # however slow the machine is
    counted = LLMatcher.grammar_from_regex("([a-f] ){40}end")
    requests = {f"r{i}": Sampling(seed=i, temperature=1.0, grammar=counted) for i in range(6)}
    undisturbed = run(quick(), **requests)
    driver, lagging = quick(total_pages=24, swap_page_bytes=1), LaggingThreads(lags)
    driver.engine._grammars._grammars.threads = lagging
    for key, sampling in requests.items():
        driver.ask(key, prompt(), 120, sampling=sampling, reservation_tokens=3, cache_salt="t")
    driver.beat()
    finish_lagging(driver, lagging)
    late = [output for output in driver.outputs if output.done is not None and output.done.results.late]
    assert bool(late) is any(lags)
    assert driver.pool.swap.in_bytes > 0
    assert not [one for one in map(driver.ending, requests) if not isinstance(one, SequenceTokens)]
    assert {key: text_of(driver, key) for key in requests} == undisturbed
    assert all(re.fullmatch("([a-f] ){40}end", text) for text in undisturbed.values())


def test_a_grammar_that_no_token_continues_ends_its_request_alone_by_name(quick):
    driver = quick()
    dead = LLMatcher.grammar_from_regex("a(é|ü)")  # both begin with the byte that has no token
    texts = run(driver, dead=Sampling(grammar=dead), free=Sampling())
    ending = driver.ending("dead")
    assert isinstance(ending, Ended)
    assert ending.reason is EndReason.GRAMMAR
    assert "cannot go on" in ending.detail
    assert texts["free"] == run(quick(), free=Sampling())["free"]
    assert isinstance(driver.ending("free"), SequenceTokens)


def test_a_model_without_a_tokenizer_refuses_grammars_and_serves_the_rest(drive):
    driver = drive()
    driver.post(
        driver.request("r", [3], sampling=Sampling(grammar=PHONE)),
        driver.request("free", [3], 5, sampling=Sampling(ignore_eos=True)),
    )
    driver.finish()
    ending = driver.ending("r")
    assert (ending.reason, ending.detail) == (
        EndReason.GRAMMAR, "the model has no tokenizer.json, which grammars need",
    )  # fmt: skip
    assert driver.ending("free").finish is FinishReason.LENGTH
