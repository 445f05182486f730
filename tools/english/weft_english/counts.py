"""Count what makes texts hard to read, with the word lists."""

import re
from dataclasses import dataclass
from functools import reduce

from weft_english.texts import Texts

MIN_WORDS = 6
"""Shorter texts are not measured: a single pointing word would decide."""
MAX_SENTENCE_WORDS = 25
HEAVY_SHARE = 0.15

POINTING = re.compile(
    r"\b(that|those|these|which|what|who|whom|whose|whoever|whatever|such|beside|behind|where|others?|one|ones|alone|own)\b",
    re.IGNORECASE,
)
SECOND = re.compile(r"\b(it|its|they|this|another|same|there)\b", re.IGNORECASE)
"""A further list of words that refer to something else. It is reported, without a ceiling."""
NO_NOUN = re.compile(r"\b(?:is|are|was|were) no (?!longer\b|more\b)[a-z]+", re.IGNORECASE)
CLAUSE_AS_NOUN = re.compile(
    r"\b(?:whoever|whatever|(?:the )?ones? (?:that|which|who)|those (?:that|which|who|of|behind|beside)"
    r"|(?:of|for|to|by|with|from|than|in|on|see|and|or) what (?!is\b|are\b|to\b)\w+"
    r"|what (?:was|were|has|had|nobody|came)\b)",
    re.IGNORECASE,
)
"""A relative clause used as a subject or object: "what was asked", "those who wait"."""
FUNCTION_WORDS = frozenset(
    "one ones other others another own which what who whose that this those these such same both each every any some"
    " more most less least much many few whole of before after behind beside between by into onto until till with"
    " within without as to than then when where while how why since beyond ahead apart so only enough"
    " found known held wanted asked given taken told said kept gone meant".split()
)
"""Words that do not name a thing of the domain. A variable or parameter needs a noun."""
GENERIC_NAMES = frozenset("result data item value obj tmp".split())


@dataclass(frozen=True)
class Counts:
    """Sums over files. Shares are computed by the properties, so that sums of packages are exact."""

    docstrings: int = 0
    docstring_share: float = 0.0
    heavy: int = 0
    texts: int = 0
    text_share: float = 0.0
    second_share: float = 0.0
    long_sentences: int = 0
    no_noun: int = 0
    clauses: int = 0
    function_words: int = 0
    generic_names: int = 0
    names: int = 0
    public_docstrings: int = 0
    short_docstrings: int = 0

    def __add__(self, other: "Counts") -> "Counts":
        mine, theirs = vars(self), vars(other)
        return Counts(**{name: mine[name] + theirs[name] for name in mine})

    @property
    def docstring_mean(self) -> float:
        """The mean share of pointing words in first paragraphs of docstrings."""
        return self.docstring_share / max(1, self.docstrings)

    @property
    def text_mean(self) -> float:
        """The mean share of pointing words in all other texts."""
        return self.text_share / max(1, self.texts)

    @property
    def second_mean(self) -> float:
        """The mean share of words of the second list in all texts."""
        return self.second_share / max(1, self.texts + self.docstrings)


def share(words: re.Pattern[str], text: str) -> float:
    """Return the share of the words of `text` that the pattern matches, 0 to 1."""
    return len(words.findall(text)) / len(text.split())


def count(texts: Texts) -> Counts:
    """Count the faults in the texts and names of one file."""
    first = [text for text in texts.docstrings if len(text.split()) >= MIN_WORDS]
    rest = [text for text in texts.details + texts.messages + texts.pages if len(text.split()) >= MIN_WORDS]
    shares = [share(POINTING, text) for text in first]
    sentences = [sentence for text in first + rest for sentence in re.split(r"(?<=[.:;?!])\s+", text)]
    return Counts(
        docstrings=len(first),
        docstring_share=sum(shares),
        heavy=sum(pointing >= HEAVY_SHARE for pointing in shares),
        texts=len(rest),
        text_share=sum(share(POINTING, text) for text in rest),
        second_share=sum(share(SECOND, text) for text in first + rest),
        long_sentences=sum(len(sentence.split()) > MAX_SENTENCE_WORDS for sentence in sentences),
        no_noun=sum(len(NO_NOUN.findall(text)) for text in first + rest),
        clauses=sum(len(CLAUSE_AS_NOUN.findall(text)) for text in first + rest),
        function_words=sum(name.strip("_") in FUNCTION_WORDS for name in texts.names),
        generic_names=sum(name in GENERIC_NAMES for name in texts.names),
        names=len(texts.names),
        public_docstrings=texts.public_docstrings,
        short_docstrings=len(texts.docstrings) - len(first),
    )


def total(counts: list[Counts]) -> Counts:
    """Return the sum of the counts."""
    return reduce(Counts.__add__, counts, Counts())
