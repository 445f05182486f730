"""Tokens show whether a sequence was computed exactly; times follow a runner's profile."""

from weft.domain.ids import RunnerId
from weft.domain.runner import RunnerSpec
from weft_sim.executor_model import EOS, Device, StepTimes, answer, seed_of, text_of

PROMPT, ADAPTER = (5, 9, 2, 7, 7), "sha256:1"


def test_a_device_computes_the_undisturbed_answer_in_whatever_chunks() -> None:
    seed = seed_of(77, len(PROMPT), 6)
    expected = answer(PROMPT, ADAPTER, seed, 1, 100)
    assert len(expected) == 6
    for cut in (1, 3, 5):
        device, pages = Device(4), (3, 1, 8)
        device.load(0, ADAPTER)
        if cut < 5:
            device.row(PROMPT[:cut], 0, pages, ADAPTER, seed, 1)
        tokens = [device.row(PROMPT[cut % 5 :], cut % 5, pages, ADAPTER, seed, 1)]
        while tokens[-1] != EOS:
            tokens.append(device.row(tokens[-1:], len(PROMPT) + len(tokens) - 1, pages, ADAPTER, seed, 1))
        assert tokens[:-1] == expected


def test_another_adapter_page_position_or_seed_gives_other_tokens() -> None:
    seed = seed_of(77, len(PROMPT), 0)
    expected = answer(PROMPT, ADAPTER, seed, 0, 20)
    assert answer(PROMPT, "", seed, 0, 20) != expected
    assert answer(PROMPT, ADAPTER, seed, 1, 20) != expected
    assert answer(PROMPT, ADAPTER, seed_of(78, len(PROMPT), 0), 0, 20) != expected
    device = Device(4)
    device.load(0, ADAPTER)
    first = device.row(PROMPT, 0, (0, 1), ADAPTER, seed, 0)
    assert first == expected[0]
    device.clear([1])  # the page that holds the latest position was given away
    assert device.row((first,), len(PROMPT), (0, 1), ADAPTER, seed, 0) != expected[1]


def test_each_token_has_a_text_of_its_own() -> None:
    assert text_of([]) == ""
    assert len({text_of([token]) for token in range(1, 94 * 94 + 1)}) == 94 * 94


def test_a_step_takes_what_the_profile_measured() -> None:
    spec = RunnerSpec(
        RunnerId("u", "i"), "", "", 16, 64, 8, 4, 64, 1024,
        best_batch=5, step_ms_1=10.0, step_ms_best=14.0, prefill_tokens_per_s=1000.0,
    )  # fmt: skip
    times = StepTimes.of_spec(spec)
    assert times.seconds(1, 0) == 0.010
    assert times.seconds(5, 0) == 0.014
    assert times.seconds(0, 100) == 0.109


def test_guesses_cost_a_row_each_or_what_was_measured_of_them() -> None:
    assert StepTimes(9.0, 1.0, 0.5).seconds(4, 0, guesses=6) == 0.019
    times = StepTimes(9.0, 1.0, 0.5, guess_times=((1, 9.0), (2, 11.0), (4, 13.0)))
    assert [times.seconds(1, 0, guesses=guesses) for guesses in (0, 1, 2)] == [0.010, 0.012, 0.013]


def test_a_measured_curve_stands_for_rows_and_prompt_tokens() -> None:
    times = StepTimes(0.0, 0.0, 0.0, key_ms=0.01, adapter_ms=2.0, curve=((1, 10.0), (4, 10.0), (8, 14.0)))
    assert [round(times.seconds(rows, 0) * 1e3, 9) for rows in (1, 2, 6, 8, 16)] == [10.0, 10.0, 12.0, 14.0, 22.0]
    assert times.seconds(2, 4, keys=100, adapters=3) == (12.0 + 1.0 + 6.0) / 1e3
