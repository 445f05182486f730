"""The native sampler against its numpy statement: the same tokens and log probabilities on every level, exactly."""

import math
from collections.abc import Iterable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.native_library import native_library
from weft.domain.request import Sampling
from weft_kernels.cpu import LEVELS, CallRefused, Library, sampling
from weft_runner.core import SampledToken
from weft_runner.core.sampling import logit_adjustments
from weft_runner.core.token_mask import token_mask
from weft_runner.model import NativeSampler, SamplingArgs, sample

EXAMPLES = settings.default.max_examples  # `make test-long` has more
NUMBERS = list(LEVELS)


@pytest.fixture(scope="module")
def library() -> Library:
    return native_library()


@pytest.fixture(scope="module")
def choosers(library: Library) -> dict[str, NativeSampler]:
    """One for each level that this CPU has."""
    return {level: NativeSampler(sampling.Sampler(library.native, NUMBERS.index(level))) for level in library.levels}


def told(choices: list[SampledToken | None]) -> list[str]:
    """Return choices as text: floats to the last bit, and a NaN would show."""
    return [repr(choice) for choice in choices]


def assert_same(choosers: dict[str, NativeSampler], logits: np.ndarray, draws: list[SamplingArgs]) -> None:
    expected = told(sample(logits, draws))
    for level, chooser in choosers.items():
        assert told(chooser.sample(logits, draws)) == expected, level


def draw_of(
    sampling: Sampling, position: int = 0, answer: tuple[int, ...] = (), allowed: Iterable[int] = (), vocab: int = 0
) -> SamplingArgs:
    shifts = logit_adjustments(sampling, answer, (3, 1, 4, 1, 5), eos=(2,))
    return SamplingArgs(sampling, position, shifts, token_mask(allowed, None, vocab))


# ---- the same as numpy, whatever the row

ROWS = {
    "normal": lambda x: x,
    "narrow": lambda x: x * 1e-3,
    "wide": lambda x: x * 1e3,
    "beyond": lambda x: x * 1e37,
    "many ties": lambda x: np.round(x),
    "all equal": lambda x: x * 0 + 1.5,
    "zeros of both signs": lambda x: np.copysign(0.0, x),
    "denormals": lambda x: x * 1e-41,
    "half impossible": lambda x: np.where(x < 0, -np.inf, x),
    "one possible": lambda x: np.where(x < x.max(axis=1, keepdims=True), -np.inf, x),
    "one likely": lambda x: np.where(x < x.max(axis=1, keepdims=True), x, x + 50),
    "exponential tail": lambda x: -np.abs(x) * 20,
}
samplings = st.builds(
    Sampling,
    seed=st.integers(0, 2**64 - 1),
    choice=st.integers(0, 2**32 - 1),
    temperature=st.sampled_from([0.0, 1e-6, 0.01, 0.3, 0.7, 1.0, 1.5, 20.0, 1e3]) | st.floats(1e-45, 3e38),
    top_p=st.sampled_from([1e-9, 0.5, 0.9, 1.0 - 2**-53, 1.0]) | st.floats(0.0, 1.0),
    frequency_penalty=st.sampled_from([0.0, 0.5, -2.0]) | st.floats(-2, 2),
    presence_penalty=st.sampled_from([0.0, 1.0]) | st.floats(-2, 2),
    logit_bias=st.dictionaries(
        st.integers(0, 300), st.sampled_from([-100.0, 100.0]) | st.floats(-3e38, 3e38), max_size=6
    ).map(lambda bias: tuple(bias.items())),
    top_logprobs=st.none() | st.integers(0, sampling.MAX_TOP),
    min_p=st.just(0.0) | st.sampled_from([1e-30, 0.05, 1.0]) | st.floats(0, 1, width=32),
    top_k=st.just(0) | st.integers(1, 6) | st.integers(1, 2**32 - 1),
    repetition_penalty=st.just(1.0) | st.sampled_from([0.5, 1.3]) | st.floats(1e-3, 1e3),
    min_tokens=st.sampled_from([0, 0, 5, 30]),
    stop_token_ids=st.lists(st.integers(0, 300), max_size=4).map(tuple),
    bad_words=st.lists(st.lists(st.integers(0, 300), min_size=1, max_size=2).map(tuple), max_size=3).map(tuple),
)


def test_a_step_that_samples_no_row_has_no_tokens(choosers: dict[str, NativeSampler]) -> None:
    """A first prompt longer than a step leaves logits without rows, which numpy gives no stride."""
    assert all(sampler.sample(np.empty((0, 64), np.float32), []) == [] for sampler in choosers.values())


@pytest.mark.parametrize("kind", ROWS)
@given(
    data=st.lists(
        st.tuples(samplings, st.integers(0, 1 << 20), st.lists(st.integers(0, 300), max_size=20)),
        min_size=1,
        max_size=4,
    ),
    vocab=st.integers(1, 300) | st.sampled_from([1, 127, 128, 129, 256, 1000, 5000]),
    seed=st.integers(0, 2**32 - 1),
)
@settings(max_examples=EXAMPLES // 5)
def test_every_level_chooses_what_numpy_chooses(choosers, kind, data, vocab, seed):
    random = np.random.default_rng(seed)
    rows = ROWS[kind](random.normal(size=(len(data), vocab)) * 3).astype(np.float32)
    draws = [draw_of(sampling, position, tuple(answer)) for sampling, position, answer in data]
    assert_same(choosers, rows, draws)


@given(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=40), samplings, st.integers(0, 9999))
@settings(max_examples=2 * EXAMPLES)
def test_any_bits_in_the_logits_give_what_numpy_gives(choosers, bits, sampling, position):
    """NaNs of both signs and with any payload, infinities, denormals: a choice or none, and the same one."""
    logits = np.array(bits, np.uint32).view(np.float32)[None]
    assert_same(choosers, logits, [draw_of(sampling, position, (0, 0, len(bits) - 1))])


@pytest.mark.parametrize("kind", ROWS)
@given(
    data=st.lists(st.tuples(samplings, st.floats(0, 1), st.booleans()), min_size=1, max_size=4),
    vocab=st.integers(1, 300) | st.sampled_from([31, 32, 33, 128, 5000]),
    seed=st.integers(0, 2**32 - 1),
)
@settings(max_examples=EXAMPLES // 5)
def test_masked_rows_choose_among_their_tokens_as_numpy_does_and_the_others_as_before(
    choosers, kind, data, vocab, seed
):
    random = np.random.default_rng(seed)
    rows = ROWS[kind](random.normal(size=(len(data), vocab)) * 3).astype(np.float32)
    share = [set(np.flatnonzero(random.random(vocab) < part).tolist()) if masked else () for _, part, masked in data]
    draws = [draw_of(d[0], 0, (), tokens, vocab) for d, tokens in zip(data, share, strict=True)]
    assert_same(choosers, rows, draws)
    for row, (draw, tokens, chosen) in enumerate(zip(draws, share, sample(rows, draws), strict=True)):
        if tokens and chosen is not None:
            assert chosen.token in tokens
        if not tokens:
            assert told([chosen]) == told(sample(rows[row : row + 1], [draw]))


def test_a_row_whose_mask_is_empty_or_leaves_what_is_impossible_has_no_token(choosers):
    logits = np.array([[1.0, 2.0, -math.inf]], np.float32)
    for allowed, token in (((2,), None), ((0, 2), 0), ((0, 1, 2), 1)):
        draw = draw_of(Sampling(), allowed=allowed, vocab=3)
        assert_same(choosers, logits, [draw])
        (chosen,) = sample(logits, [draw])
        assert (chosen and chosen.token) == token
    nothing = token_mask((0,), None, 3)
    nothing.allowed[0] = 0
    assert_same(choosers, logits, [SamplingArgs(Sampling(), 0, None, nothing)])
    assert sample(logits, [SamplingArgs(Sampling(), 0, None, nothing)]) == [None]


@pytest.mark.parametrize(("vocab", "spread"), [(32_000, 4.0), (49_152, 0.0), (151_936, 1.0), (200_000, 4.0)])
def test_whole_vocabularies_give_what_numpy_gives(choosers, vocab, spread):
    logits = np.random.default_rng(vocab).normal(size=(8, vocab)).astype(np.float32) * np.float32(spread)
    logits[0, 77] += 12
    draws = [
        draw_of(
            Sampling(seed=vocab + i, temperature=t, top_p=p, top_logprobs=n, presence_penalty=pp, top_k=k, min_p=m), i
        )
        for i, (t, p, n, pp, k, m) in enumerate(
            [
                (1.0, 0.9, 20, 0.0, 0, 0.0),
                (0.7, 1.0, None, 1.0, 0, 0.0),
                (1.3, 0.999, 5, 0.0, 0, 0.0),
                (0.0, 1.0, 20, 0.0, 0, 0.0),
                (2.0, 0.9, None, 0.0, 50, 0.0),
                (1.0, 1.0, None, 1.0, vocab // 2, 0.0),
                (1.5, 0.5, None, 0.0, 0, 0.05),
                (1.5, 0.9, None, 0.0, 7, 1e-4),
            ]
        )
    ]
    assert_same(choosers, logits, draws)


@pytest.mark.parametrize("kind", ROWS)
@given(
    given=st.lists(st.integers(0, 299), min_size=1, max_size=5),
    n_top=st.integers(0, sampling.MAX_TOP),
    seed=st.integers(0, 2**32 - 1),
)
@settings(max_examples=EXAMPLES // 10)
def test_given_tokens_have_the_log_probabilities_that_numpy_gives(choosers, kind, given, n_top, seed):
    """Among them a row that is drawn, and one without a finite maximum, which has none."""
    rows = ROWS[kind](np.random.default_rng(seed).normal(size=(len(given) + 2, 300)) * 3).astype(np.float32)
    rows[-1, 7] = np.nan
    sampling = Sampling(seed=seed, temperature=1.0, prompt_logprobs=n_top)
    draws = [SamplingArgs(sampling, at, given=token) for at, token in enumerate(given)]
    draws += [SamplingArgs(sampling, 9), SamplingArgs(sampling, 9, given=3)]
    assert_same(choosers, rows, draws)
    found = choosers["portable"].sample(rows, draws)
    assert [one and one.token for one in found[: len(given)]] == given
    assert found[-1] is None


# ---- isolation


@given(st.lists(samplings, min_size=2, max_size=8), st.integers(0, 2**32 - 1))
@settings(max_examples=EXAMPLES // 2)
def test_a_row_chooses_the_same_whatever_its_batch_mates_and_its_place(choosers, chosen, seed):
    """The workspace is shared by rows one after another: nothing of one shows in the next, spoiled rows included."""
    random = np.random.default_rng(seed)
    logits = random.normal(size=(len(chosen), 400)).astype(np.float32) * 5
    logits[int(random.integers(len(chosen))), 3] = float(random.choice([math.nan, math.inf, 0.0]))
    draws = [draw_of(sampling, int(random.integers(10_000)), (1, 2, 2)) for sampling in chosen]
    order = random.permutation(len(draws)).tolist()
    for chooser in choosers.values():
        alone = [told(chooser.sample(logits[i : i + 1], [draw]))[0] for i, draw in enumerate(draws)]
        assert told(chooser.sample(logits, draws)) == alone
        assert told(chooser.sample(logits[order], [draws[i] for i in order])) == [alone[i] for i in order]


def test_what_lies_between_and_behind_the_rows_is_not_read(choosers):
    """Rows of 130 logits with a stride of 160: the rest is NaN, which any read would turn into no choice."""
    whole = np.full((5, 160), math.nan, np.float32)
    whole[:, :130] = np.random.default_rng(1).normal(size=(5, 130))
    draws = [draw_of(Sampling(seed=i, temperature=float(i), top_logprobs=20)) for i in range(5)]
    for chooser in choosers.values():
        assert told(chooser.sample(whole[:, :130], draws)) == told(sample(whole[:, :130].copy(), draws))


def test_the_workspace_is_all_that_is_written_and_what_it_held_does_not_matter(library):
    native, vocab = library.native, 1000
    size = native.weft_sample_workspace_bytes(vocab)
    logits = np.random.default_rng(0).normal(size=(3, vocab)).astype(np.float32)
    draws = np.zeros(3, sampling.SAMPLING_ARGS)
    draws["temperature"], draws["top_p"], draws["n_top"], draws["seed"] = 1.0, 0.95, 20, (1, 2, 3)
    results = []
    for filling in (0, 255):
        memory = np.full(size + 128, filling, np.uint8)
        start = -memory.ctypes.data % 64 + 64
        memory[:start], memory[start + size :] = 7, 7
        out = np.zeros(4, sampling.SAMPLED)
        assert not native.weft_sample(
            library.level_number, logits.ctypes.data, vocab, vocab, 3, draws.ctypes.data, out.ctypes.data,
            memory.ctypes.data + start, size,
        )  # fmt: skip
        assert (memory[:start] == 7).all()
        assert (memory[start + size :] == 7).all()
        assert not out[3:].tobytes().strip(b"\0")
        results.append(out.tobytes())
    assert results[0] == results[1]


def test_inputs_stay_as_they_are(choosers):
    logits = np.random.default_rng(0).normal(size=(3, 200)).astype(np.float32)
    before = logits.copy()
    draws = [draw_of(Sampling(temperature=1.0, presence_penalty=1.0, top_logprobs=0), i, (1, 2, 3)) for i in range(3)]
    for chooser in choosers.values():
        chooser.sample(logits, draws)
    assert np.array_equal(logits, before)


# ---- refusals


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n_top", sampling.MAX_TOP + 1),
        ("n_shifted", -1),
        ("top_k", -1),
        ("given", 11),
        ("temperature", -1.0),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("min_p", 1.5),
    ],
)
def test_a_draw_that_makes_no_sense_is_refused_before_anything_is_read(library, field, value):
    sampler = sampling.Sampler(library.native, library.level_number)
    draws = np.zeros(2, sampling.SAMPLING_ARGS)
    draws[field][1] = value
    with pytest.raises(CallRefused, match="out of bounds"):
        sampler.sample(0, 10, 10, 2, draws)


@pytest.mark.parametrize(("stride", "vocab", "rows"), [(9, 10, 1), (10, 0, 1), (10, -5, 1), (10, 10, -1)])
def test_sizes_that_make_no_sense_are_refused(library, stride, vocab, rows):
    with pytest.raises(CallRefused, match="out of bounds"):
        sampling.Sampler(library.native, library.level_number).sample(0, stride, vocab, rows)


def test_a_small_workspace_and_an_unknown_level_are_refused(library):
    native = library.native
    sampling.Sampler(native, 0)
    size = native.weft_sample_workspace_bytes(100)
    assert native.weft_sample(0, 0, 100, 100, 1, None, 0, 0, size - 1) == -3
    for level in (-1, len(NUMBERS)):
        with pytest.raises(CallRefused, match="level"):
            sampling.Sampler(native, level).sample(0, 10, 10, 1)
