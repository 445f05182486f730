"""The latest answers of each adapter, as one text a namespace: what its next answers are likely to repeat. Pure.

An adapter is a narrow task: its answers repeat each other. SuffixDecoding (arXiv:2411.04975, section 3) keeps one
structure for all requests; here a text belongs to one namespace (and `cache_salt`) and one adapter, so that nobody
drafts from another tenant's answers, and it is searched as it is, without a structure.
"""

from array import array
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field

from weft.domain.request import Start
from weft_runner.core.drafts.acceptance import Acceptance

END = -1  # behind each answer: no text goes on beyond it
TOKEN_BYTES, TEXT_BYTES = 4, 10 << 10  # of a text beside its tokens: what is known of its drafts
MAX_TEXT_TOKENS = 1 << 16  # of an adapter: 256 KiB, some microseconds to search
MAX_BYTES = 64 << 20  # of all texts
MAX_AGE_S = 3600.0  # since a text was used last

TextKey = tuple[str, str]


def text_key(start: Start) -> TextKey:
    """Return the key of the text that a request reads and writes: its namespace with its salt, and its adapter's
    digest.
    """
    return start.cache_salt, start.adapter


@dataclass(slots=True)
class AdapterText:
    """Answers of one adapter in one namespace, each followed by END, and the success of its drafts.

    `from_answers`: drafts from these answers; `from_own`: those from a request's own prompt and answer; `from_grammar`:
    those of what has to follow; `from_caller`: those that callers gave. `due`: the step of the next search for its
    rows, `pause` steps behind the last one.
    """

    used_at: float
    tokens: "array[int]" = field(default_factory=lambda: array("i"))
    from_answers: Acceptance = field(default_factory=Acceptance)
    from_own: Acceptance = field(default_factory=Acceptance)
    from_grammar: Acceptance = field(default_factory=Acceptance)
    from_caller: Acceptance = field(default_factory=Acceptance)
    due: int = 0
    pause: int = 0

    def rest(self, step: int, *, was_found: bool, max_steps: int) -> None:
        """Search at every step after a useful draft, otherwise half as often as before."""
        if was_found:
            self.pause, self.due = 0, step + 1
        elif self.due <= step:  # not for another row already
            self.pause = min(2 * self.pause + 1, max_steps)
            self.due = step + 1 + self.pause


class RecentAnswers:
    """Texts by namespace and adapter, least recently used first. Owner: the drafter.

    A text is cut at its beginning beyond `max_text_tokens`; texts are dropped beyond `max_bytes` in sum, and
    `max_age_s` after their last use.
    """

    def __init__(
        self, *, max_text_tokens: int = MAX_TEXT_TOKENS, max_bytes: int = MAX_BYTES, max_age_s: float = MAX_AGE_S
    ) -> None:
        self._max_text_tokens, self._max_bytes, self._max_age_s = max_text_tokens, max_bytes, max_age_s
        self._texts: OrderedDict[TextKey, AdapterText] = OrderedDict()
        self.n_bytes = 0

    def __len__(self) -> int:
        return len(self._texts)

    def use(self, key: TextKey, now: float) -> AdapterText:
        """Return the text, by default an empty text, and forget texts that are too old."""
        while self._texts and now - next(iter(self._texts.values())).used_at > self._max_age_s:
            self._drop_oldest()
        if (text := self._texts.get(key)) is None:
            text = self._texts[key] = AdapterText(now)
            self._grow(TEXT_BYTES)
        text.used_at = now
        self._texts.move_to_end(key)
        return text

    def add(self, key: TextKey, answer: Iterable[int], now: float) -> None:
        """Append a complete answer to a text."""
        tokens = self.use(key, now).tokens
        length = len(tokens)
        tokens.extend(answer)
        tokens.append(END)
        if (surplus := len(tokens) - self._max_text_tokens) > 0:
            del tokens[: min(len(tokens), max(surplus, self._max_text_tokens // 8))]  # not a token at a time
        self._grow(TOKEN_BYTES * (len(tokens) - length))

    def _grow(self, n_bytes: int) -> None:
        self.n_bytes += n_bytes
        while self.n_bytes > self._max_bytes:
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        _, text = self._texts.popitem(last=False)
        self.n_bytes -= TEXT_BYTES + TOKEN_BYTES * len(text.tokens)


def check_recent_answers(answers: RecentAnswers) -> None:
    """Check that the account of bytes is right and within its bounds."""
    texts = answers._texts.values()  # pyright: ignore[reportPrivateUsage]
    assert answers.n_bytes == sum(TEXT_BYTES + TOKEN_BYTES * len(text.tokens) for text in texts), answers.n_bytes
    assert answers.n_bytes <= answers._max_bytes, answers.n_bytes  # pyright: ignore[reportPrivateUsage]
