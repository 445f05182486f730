"""Tokens to text: equal to the tokenizer's own decode, whole characters only, whatever the chunks."""

import json

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models

from harness import byte_tokenizer
from weft.domain.model.token_bytes import Decoding, UnsupportedDecoder, decoding_of, token_bytes
from weft_gateway.core.answer_text import Detokeniser

BYTE_TOKENS = [f"<0x{byte:02X}>" for byte in range(256)]


def byte_level() -> tokenizers.Tokenizer:
    tokenizer = byte_tokenizer.train("hello world über 東京 \N{SLIGHTLY SMILING FACE}", ["<s>", "</s>"], 320)
    tokenizer.add_tokens(["<tool>", "two words"])
    return tokenizer


def sentence_pieces() -> tokenizers.Tokenizer:
    """Llama 2's decoder: a mark for a space, bytes where a character is not in the vocabulary."""
    words = ["▁hello", "▁", "h", "lo", "▁東京", "ü", ".", *BYTE_TOKENS]
    vocab = {word: i for i, word in enumerate(["<s>", *words])}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<s>"])
    return tokenizer


BYTE_LEVEL, SENTENCE = byte_level(), sentence_pieces()


def detokeniser(tokenizer: tokenizers.Tokenizer) -> Detokeniser:
    form = decoding_of(json.loads(tokenizer.to_str())["decoder"])
    special = {i for i, token in tokenizer.get_added_tokens_decoder().items() if token.special}

    def bytes_of(token: int) -> bytes:
        text = tokenizer.id_to_token(token)
        return b"" if token in special or text is None else token_bytes(text, form)

    return Detokeniser(bytes_of)


def decoded(tokenizer: tokenizers.Tokenizer, tokens: list[int]) -> list[str]:
    one = detokeniser(tokenizer)
    return [*map(one.push, tokens), one.flush()]


@given(st.lists(st.integers(0, BYTE_LEVEL.get_vocab_size() + 2), max_size=40))
def test_any_byte_level_tokens_decode_as_the_tokenizer_decodes_them(tokens: list[int]) -> None:
    assert "".join(decoded(BYTE_LEVEL, tokens)) == BYTE_LEVEL.decode(tokens, skip_special_tokens=True)


@given(st.text(max_size=40))
def test_no_piece_of_a_valid_text_holds_a_broken_character(text: str) -> None:
    tokens = BYTE_LEVEL.encode(text, add_special_tokens=False).ids
    if BYTE_LEVEL.decode(tokens) == text:  # a lone control token's spelling is another text
        pieces = decoded(BYTE_LEVEL, tokens)
        assert "".join(pieces) == text
        assert all("\N{REPLACEMENT CHARACTER}" not in piece for piece in pieces) or "\N{REPLACEMENT CHARACTER}" in text


@given(st.lists(st.sampled_from(["▁hello", "▁", "h", "lo", "▁東京", ".", "ü"]), max_size=20), st.text(max_size=8))
def test_sentence_pieces_decode_as_the_continuation_of_a_prompt(words: list[str], rare: str) -> None:
    prompt = [SENTENCE.token_to_id(".")]
    tokens = [SENTENCE.token_to_id(word) for word in words]
    tokens += [SENTENCE.token_to_id(f"<0x{byte:02X}>") for byte in rare.encode()]
    whole, before = SENTENCE.decode(prompt + tokens), SENTENCE.decode(prompt)
    assert "".join(decoded(SENTENCE, tokens)) == whole.removeprefix(before)


@pytest.mark.parametrize(
    ("data", "pieces"),
    [
        ("é東\N{SLIGHTLY SMILING FACE}".encode(), ["", "é", "", "", "東", "", "", "", "\N{SLIGHTLY SMILING FACE}", ""]),
        (b"\xf0\x9f", ["", "", "\N{REPLACEMENT CHARACTER}"]),
        (b"\x80" * 50, ["\N{REPLACEMENT CHARACTER}"] * 50 + [""]),
    ],
    ids=["its last byte", "an unfinished one", "none"],
)
def test_a_character_waits_for_its_last_byte_and_what_is_none_holds_nothing_up(data: bytes, pieces: list[str]) -> None:
    assert decoded(SENTENCE, [SENTENCE.token_to_id(f"<0x{byte:02X}>") for byte in data]) == pieces


def test_special_and_unknown_tokens_have_no_text() -> None:
    assert decoded(SENTENCE, [0, 10_000, SENTENCE.token_to_id("h")]) == ["", "", "h", ""]


@pytest.mark.parametrize(
    ("decoder", "form"),
    [
        (None, Decoding(separator=" ")),
        (decoders.ByteLevel(), Decoding(byte_level=True)),
        (decoders.Metaspace(), Decoding(replaced=(("▁", " "),))),
        (decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()]), Decoding(byte_fallback=True)),
    ],
)
def test_known_decoders_are_read(decoder: object, form: Decoding) -> None:
    tokenizer = tokenizers.Tokenizer(models.BPE())
    if decoder is not None:
        tokenizer.decoder = decoder
    assert decoding_of(json.loads(tokenizer.to_str())["decoder"]) == form


def test_an_unknown_decoder_is_refused_by_its_name() -> None:
    with pytest.raises(UnsupportedDecoder, match="CTC"):
        decoding_of({"type": "CTC"})
