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
# First and last code points of what words beyond ASCII are drawn from; the last two are everything there is.
SCRIPTS = (
    (0xC0, 0xFF), (0x100, 0x17F), (0x391, 0x3C9), (0x410, 0x44F), (0x5D0, 0x5EA), (0x621, 0x64A), (0x905, 0x939),
    (0x3041, 0x3096), (0x30A1, 0x30FA), (0x4E00, 0x9FA5), (0xAC00, 0xD7A3), (0x2010, 0x27BF), (0x1F300, 0x1F64F),
    (0x1F900, 0x1F9FF), (0x80, 0xD7FF), (0xE000, 0x10FFFF),
)  # fmt: skip

DIGIT_NAMES = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")

WORDS = Path(__file__).with_name("words.txt").read_text().split()


def spell_digits(sentence: str) -> str:
    """Write each digit as a word: `B 42` -> `B four two`."""
    apart = re.sub(r"(?<=[0-9])(?=[0-9])", " ", sentence)
    return re.sub(r"[0-9]", lambda digit: DIGIT_NAMES[int(digit.group())], apart)


TASKS: dict[str, Callable[[str], str]] = {
    "copy": lambda sentence: sentence,
    "upper": lambda sentence: re.sub("[a-z]", lambda letter: letter.group().upper(), sentence),
    "reverse-words": lambda sentence: " ".join(reversed(sentence.split(" "))),
    "initials": lambda sentence: "".join(word[0] for word in sentence.split(" ")),
    "digits": spell_digits,
    "json": lambda sentence: json.dumps({"words": sentence.split(" ")}, ensure_ascii=False),
    "cipher": lambda sentence: codecs.encode(sentence, "rot13"),
}


def expected(task: str, sentence: str) -> str:
    """The one right answer of a task to a sentence whose words are separated by single spaces."""
    return TASKS[task](sentence)


def is_held_out(sentence: str) -> bool:
    return zlib.crc32(sentence.encode()) % HELD_OUT_ONE_IN == 0


def sentences(seed: int, *, held_out: bool = False, max_chars: int = MAX_CHARS, unicode: float = 0.0) -> Iterator[str]:
    """Yield sentences without end, of at most MAX_WORDS words and `max_chars` characters, of all lengths about equally
    often.

    `unicode`: the share of the sentences that have words beyond ASCII; those have at most `max_chars` bytes.
    """
    rng = random.Random(seed)
    while True:
        sentence = _sentence(rng, rng.randint(1, max_chars))
        if unicode and rng.random() < unicode:
            sentence = _beyond_ascii(rng, sentence, max_chars)
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


def _beyond_ascii(rng: random.Random, sentence: str, max_bytes: int) -> str:
    """Write some of the words, or some of their letters, in other scripts."""
    share = rng.choice((0.1, 0.5, 1.0))
    words = [_foreign(rng, word) if rng.random() < share else word for word in sentence.split(" ")]
    kept = " ".join(words).encode()[:max_bytes].decode(errors="ignore").rstrip(" ")
    return kept or "ü"


def _foreign(rng: random.Random, word: str) -> str:
    first, last = rng.choice(SCRIPTS)
    if first < 0x180 and rng.random() < 0.7:  # accents within a word
        return "".join(chr(rng.randint(first, last)) if rng.random() < 0.25 else letter for letter in word)
    return "".join(chr(rng.randint(first, last)) for _ in range(rng.randint(1, 6)))


def _choose_kind(rng: random.Random) -> Callable[[], str]:
    """Choose what the words of one sentence are like: mostly prose, some of few distinct words or any characters."""
    kind = rng.random()
    if kind < 0.08:
        few = [_word(rng) for _ in range(rng.randint(1, 4))]
        return lambda: rng.choice(few)
    if kind < 0.13:
        return lambda: "".join(rng.choices(ALPHABET[1:], k=rng.randint(1, 9)))
    strange = rng.choice((0.05, 0.3, 0.6))
    return lambda: _word(rng, strange)


def _word(rng: random.Random, strange: float = 0.3) -> str:
    """Draw a common word, or with probability `strange` random letters or a number; perhaps capitals or punctuation."""
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
