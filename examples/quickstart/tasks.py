"""The quickstart's tasks: what each adapter must answer, and sentences to ask about.

Every task is a pure function of one sentence, so that a person sees at once, and a test asserts exactly, which adapter
answered. Sentences come from a seed. Training and held-out sentences cannot meet: a checksum of the text decides which
side a sentence is on, whatever the seed.
"""

import codecs
import json
import random
import re
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

ALPHABET = [chr(code) for code in range(32, 127)] + ["\n"]
MAX_CHARS = 160
MAX_WORDS = 32
HELD_OUT_ONE_IN = 16

DIGIT_NAMES = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")

WORDS = Path(__file__).with_name("words.txt").read_text().split()


def spell_digits(sentence: str) -> str:
    """Each digit as a word: `B 42` -> `B four two`."""
    apart = re.sub(r"(?<=\d)(?=\d)", " ", sentence)
    return re.sub(r"\d", lambda digit: DIGIT_NAMES[int(digit.group())], apart)


TASKS: dict[str, Callable[[str], str]] = {
    "copy": lambda sentence: sentence,
    "upper": lambda sentence: sentence.upper(),
    "reverse-words": lambda sentence: " ".join(reversed(sentence.split(" "))),
    "initials": lambda sentence: "".join(word[0] for word in sentence.split(" ")),
    "digits": spell_digits,
    "json": lambda sentence: json.dumps({"words": sentence.split(" ")}),
    "cipher": lambda sentence: codecs.encode(sentence, "rot13"),
}


def expected(task: str, sentence: str) -> str:
    """The one right answer of a task to a sentence whose words are separated by single spaces."""
    return TASKS[task](sentence)


def is_held_out(sentence: str) -> bool:
    return zlib.crc32(sentence.encode()) % HELD_OUT_ONE_IN == 0


def sentences(seed: int, *, held_out: bool = False, max_chars: int = MAX_CHARS) -> Iterator[str]:
    """Endless sentences of at most MAX_WORDS words and `max_chars` characters, of all lengths about equally often."""
    rng = random.Random(seed)
    while True:
        sentence = _sentence(rng, rng.randint(1, max_chars))
        if is_held_out(sentence) == held_out:
            yield sentence


def _sentence(rng: random.Random, n_chars: int) -> str:
    word = _choose_kind(rng)
    words = [word()]
    while len(words) < MAX_WORDS and len(" ".join(words)) < n_chars:
        words.append(word())
    if rng.random() < 0.3:
        words[0] = words[0].capitalize()
        words[-1] += rng.choice(".!?")
    return " ".join(words)[:n_chars].rstrip(" ")


def _choose_kind(rng: random.Random) -> Callable[[], str]:
    """What the words of one sentence are like: mostly prose, some with few distinct words, some with any characters."""
    kind = rng.random()
    if kind < 0.08:
        few = [_word(rng) for _ in range(rng.randint(1, 4))]
        return lambda: rng.choice(few)
    if kind < 0.13:
        return lambda: "".join(rng.choices(ALPHABET[1:], k=rng.randint(1, 9)))
    strange = rng.choice((0.05, 0.3, 0.6))
    return lambda: _word(rng, strange)


def _word(rng: random.Random, strange: float = 0.3) -> str:
    """A common word, or with probability `strange` random letters or a number; sometimes capitals or punctuation."""
    if rng.random() >= strange:
        word = rng.choice(WORDS)
    elif rng.random() < 0.65:
        word = "".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=rng.randint(1, 10)))
    else:
        word = str(rng.randint(0, 10 ** rng.randint(1, 5)))
    shape = rng.random()
    if shape < 0.08:
        word = word.capitalize()
    elif shape < 0.11:
        word = word.upper()
    if rng.random() < 0.06:
        word = rng.choice(("{},", "{};", "{}:", "({})", '"{}"', "{}'s", "{}-{}")).replace("{}", word)
    return word
