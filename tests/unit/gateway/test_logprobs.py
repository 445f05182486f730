"""Log probabilities leave with their text: never before it, each once, nothing behind a stop string."""

import itertools
from collections.abc import Sequence

from hypothesis import example, given
from hypothesis import strategies as st

from weft.domain.ids import Epoch, RunnerId
from weft.domain.request import Assign, FinishReason, Sampling, SequenceTokens, TokenLogprob
from weft.domain.routes import Route
from weft_gateway.core.events import Emit, PreparedRequest, TokenLogprobOut
from weft_gateway.core.stream import RequestStream

RUNNER = RunnerId("a", "1")
texts = st.text("abcé東\N{SLIGHTLY SMILING FACE}", max_size=16)
stop_lists = st.lists(st.text("abcé", min_size=1, max_size=3), max_size=3)
cut_lists = st.lists(st.integers(0, 60), max_size=24)


def pieces(answer: bytes, cuts: Sequence[int]) -> list[bytes]:
    """The answer's bytes in tokens; a cut that is given twice leaves an empty one, as a special token is."""
    marks = [0, *sorted(min(cut, len(answer)) for cut in cuts), len(answer)]
    return [answer[a:b] for a, b in itertools.pairwise(marks)]


def streamed(tokens: Sequence[bytes], stops: Sequence[str], steps: Sequence[int]) -> tuple[list[Emit], RequestStream]:
    """What a client gets; token i has the log probability -i."""
    route, sampling = Route("m", "n", "n/p", ""), Sampling(top_logprobs=0)
    request = PreparedRequest("r", "r", "n", route, (1,), "", 100, sampling, tokens.__getitem__, 0, tuple(stops))
    one = RequestStream(request, 0, hold_s=1.0, arrived=0.0, now=0.0)
    effects = one.handle(Assign("r", Epoch(1, 1), RUNNER, "a:1", 8), 0.0)
    marks = [0, *sorted(min(step, len(tokens)) for step in steps), len(tokens)]
    for a, b in itertools.pairwise(marks):
        ids = list(range(a, b))
        logprobs = [TokenLogprob(-float(i)) for i in ids]
        effects += one.handle(SequenceTokens("r", Epoch(1, 1), a, ids, logprobs=logprobs), 0.0)
    effects += one.handle(SequenceTokens("r", Epoch(1, 1), len(tokens), [], FinishReason.EOS), 0.0)
    return [effect for effect in effects if isinstance(effect, Emit)], one


def starts(tokens: Sequence[bytes]) -> list[int]:
    """For each token of valid UTF-8 the index of the character that its first byte (or the next one) is in."""
    whole, at, found = b"".join(tokens), 0, list[int]()
    for token in tokens:
        found.append(sum(byte & 0xC0 != 0x80 for byte in whole[: at + bool(token)]) - bool(token))
        at += len(token)
    return found


def logprobs_in(emits: Sequence[Emit]) -> list[TokenLogprobOut]:
    return [one for emit in emits for one in emit.logprobs]


@given(answer=texts.map(str.encode), cuts=cut_lists, steps=cut_lists)
@example(answer="é".encode(), cuts=[1], steps=[1])
@example(answer=b"ab", cuts=[1, 1], steps=[])
def test_without_a_stop_string_every_token_leaves_once_in_order_with_its_place(
    answer: bytes, cuts: list[int], steps: list[int]
) -> None:
    tokens = pieces(answer, cuts)
    emits, _ = streamed(tokens, [], steps)
    sent = logprobs_in(emits)
    assert [(one.token, one.logprob.logprob) for one in sent] == [(i, -float(i)) for i in range(len(tokens))]
    full = [i for i, token in enumerate(tokens) if token]
    assert [sent[i].start for i in full] == [starts(tokens)[i] for i in full]


@given(answer=texts.map(str.encode), cuts=cut_lists, stops=stop_lists, steps=cut_lists)
@example(answer=b"abc", cuts=[1, 2], stops=["bx", "c"], steps=[1, 2])
@example(answer="aé".encode(), cuts=[1, 2], stops=["é"], steps=[1, 2])
def test_what_leaves_is_never_ahead_of_the_text_and_ends_with_it(
    answer: bytes, cuts: list[int], stops: list[str], steps: list[int]
) -> None:
    tokens = pieces(answer, cuts)
    emits, one = streamed(tokens, stops, steps)
    text = "".join(emit.text for emit in emits)
    sent = logprobs_in(emits)
    assert [one.token for one in sent] == list(range(len(sent))), "none left out, none twice"
    assert b"".join(tokens[: len(sent)]).decode(errors="replace").startswith(text), "the tokens spell the text"
    cut = one.end is not None and one.end.reason is FinishReason.STOP
    for seen in range(1, len(emits) + (not cut)):
        so_far = logprobs_in(emits[:seen])
        released = "".join(emit.text for emit in emits[:seen])
        assert released.startswith(b"".join(tokens[: len(so_far)]).decode(errors="ignore"))
    if cut:
        places = starts(tokens)
        assert all(places[i] < len(text) for i in range(len(sent)) if tokens[i])
        assert all(places[i] >= len(text) for i in range(len(sent), len(tokens)) if tokens[i])


@given(answer=st.binary(max_size=12), cuts=cut_lists, steps=cut_lists)
@example(answer=b"\xf0a", cuts=[1], steps=[1])
def test_bytes_that_are_no_text_leave_all_the_same(answer: bytes, cuts: list[int], steps: list[int]) -> None:
    tokens = pieces(answer, cuts)
    emits, _ = streamed(tokens, [], steps)
    text = "".join(emit.text for emit in emits)
    sent = logprobs_in(emits)
    assert len(sent) == len(tokens)
    assert [one.start for one in sent] == sorted(one.start for one in sent)
    assert all(one.start <= len(text) for one in sent)


def test_a_token_behind_a_character_that_was_given_up_starts_behind_its_replacement() -> None:
    emits, _ = streamed([b"\xf0", b"a"], [], [1])
    assert [one.start for one in logprobs_in(emits)] == [0, 1]
    for begun, illegal in ((b"\xf0", b"\x80"), (b"\xe0", b"\x9f"), (b"\xf4", b"\x90")):
        emits, _ = streamed([begun, illegal], [], [1])
        assert [one.start for one in logprobs_in(emits)] == [0, 1], "a following byte, but not here"
    emits, _ = streamed([b"\xf0", b"\x9fa"], [], [1])
    assert [one.start for one in logprobs_in(emits)] == [0, 0], "the character goes on before it breaks off"
    cut, _ = streamed([b"\xf0", b"a"], ["a"], [1])
    assert [one.token for one in logprobs_in(cut)] == [0], "the stop string's own token stays"


def test_a_token_that_a_stop_string_cuts_leaves_whole() -> None:
    emits, one = streamed([b"ab", b"cEN", b"D", b"d"], ["END"], [1, 2, 3])
    assert "".join(emit.text for emit in emits) == "abc"
    assert [out.token for out in logprobs_in(emits)] == [0, 1]
    assert len(one.tokens) == 3, "billed with the stop string, as without log probabilities"


def test_a_special_token_leaves_where_it_stands_though_it_has_no_text() -> None:
    emits, _ = streamed([b"a", b"", b"b"], [], [1, 2])
    assert [(emit.text, [out.token for out in emit.logprobs]) for emit in emits] == [("a", [0]), ("", [1]), ("b", [2])]
