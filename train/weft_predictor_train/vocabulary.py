"""A WordPiece tokenizer made of prompts: the commonest words, and the commonest pieces of words for the others.

The library's own trainer orders pieces that are as common as each other differently in each process.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

from weft_predictor.core import MAX_CHARS

VOCAB = 8_192
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]")
MAX_LETTERS, PIECES = 500, (2, 3, 4)


def tokenizer_of(prompts: Sequence[str]) -> bytes:
    """Make the content of tokenizer.json."""
    normalizer, splitter = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    unigrams, pieces, letters = Counter[str](), Counter[str](), Counter[str]()
    for text in prompts:
        unigrams.update(unigram for unigram, _ in splitter.pre_tokenize_str(normalizer.normalize_str(text[:MAX_CHARS])))
    for unigram, count in unigrams.items():
        for i in range(len(unigram)):
            letters[unigram[i]] += count
            for n in PIECES if i else ():
                pieces["##" + unigram[i : i + n]] += count
    common = _commonest(letters, MAX_LETTERS)
    vocab = dict.fromkeys((*SPECIAL, *common, *(f"##{letter}" for letter in common)))
    vocab |= dict.fromkeys(_commonest(unigrams, (VOCAB - len(vocab)) * 3 // 4))
    vocab |= dict.fromkeys([piece for piece in _commonest(pieces, VOCAB) if piece not in vocab][: VOCAB - len(vocab)])
    tokenizer: Any = Tokenizer(models.WordPiece({unigram: i for i, unigram in enumerate(vocab)}, unk_token="[UNK]"))  # noqa: S106
    tokenizer.normalizer, tokenizer.pre_tokenizer = normalizer, splitter
    ends = [(name, tokenizer.token_to_id(name)) for name in ("[CLS]", "[SEP]")]
    tokenizer.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=ends)
    return tokenizer.to_str().encode()


def _commonest(counts: Counter[str], max_words: int) -> list[str]:
    return sorted(counts, key=lambda text: (-counts[text], text))[:max_words]
