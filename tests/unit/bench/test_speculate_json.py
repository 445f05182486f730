"""What a grammar forces, counted on a tokenizer of few merges."""

from pathlib import Path

import pytest
from llguidance import LLMatcher, LLTokenizer
from tokenizers import Tokenizer

from weft_bench.speculate_json import forced_share, tokenizer
from weft_stage.errors import EngineRefused

HERE = [Path(__file__)]


def test_the_tokens_that_a_grammar_leaves_no_choice_about_are_counted() -> None:
    text = tokenizer(300, HERE)
    made = Tokenizer.from_str(text)
    fixed, free = (made.encode(part).ids for part in ('{"name":', "7"))
    assert len(fixed) > 1, "several tokens are forced, one after the other"
    beginning = LLMatcher(LLTokenizer(text, n_vocab=300, eos_token=2), LLMatcher.grammar_from_regex(r'\{"name":[0-9]'))
    share = len(fixed) / (len(fixed) + len(free))
    assert forced_share(beginning, [[*fixed, *free]] * 2) == pytest.approx(share)


def test_texts_of_too_few_words_are_told() -> None:
    with pytest.raises(EngineRefused, match="expected 49152 tokens"):
        tokenizer(49_152, HERE)
