"""Text to tokens and back, for one base model: its tokenizer and its chat template.

A message of a chat is plain text, also where it spells a control token: such spellings are hidden while the template
renders, and a tokenizer without control tokens encodes them. The prompt of a completion is the caller's whole prompt
and may hold control tokens.
"""

import contextlib
import copy
import json
import re
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence, Set
from dataclasses import replace
from typing import Any

import tokenizers

from weft.chat_template import (
    SPECIAL_FILE,
    Chat,
    ChatTemplate,
    Message,
    RenderedTooLong,
    TemplateFailed,
    TemplateFault,
    TemplateRefused,
    adapter_template,
    special_tokens_of,
    template_of,
)
from weft.domain.model.token_bytes import decoding_of, token_bytes
from weft_gateway.forms.template_forms import TemplateForms

UNKNOWN_CONTEXT_TOKENS = 1 << 20  # while no runner has reported a pool's context: only a bound
MIN_PIECE_CHARS = 16  # a vocabulary of short pieces may still fold or drop runs of spaces
BATCH_TEXTS = 1024  # of one call: each costs memory until its ids are taken
# Private-use characters of plane 16 are the marks; those in the text are hidden like control tokens.
_FIRST_MARK, _LAST_MARK = 0x100000, 0x10FFFC
_MARK = re.compile(f"([{chr(_FIRST_MARK)}-\U0010fffd])")  # with the one that chat templates use
_CONTROL_SPELLING = re.compile(r"[<\[].+[>\]]", re.DOTALL)
_HTML = re.compile(r"</?(?:table|caption|thead|tbody|tfoot|t[rhd]|h[1-6]|blockquote|strong|em|[bius]|su[bp]|code)>")


class NotEncodable(ValueError):
    """This text cannot become a prompt of this model; the message has the reason, and `code` its name if it has one."""

    code: str | None = None


class BadTemplate(NotEncodable):
    """The model's chat template has a fault; the message has it."""

    code = "chat_template_error"


class TooLong(NotEncodable):
    """This text does not fit the context; the message begins as OpenAI's, which clients look for."""

    @classmethod
    def of_context(cls, context_tokens: int, however: str) -> "TooLong":
        return cls(f"This model's maximum context length is {context_tokens} tokens. However, {however}")


class BadTokenizer(ValueError):
    """These files are not a tokenizer. The message has the reason."""


class TokenizerPanic(ValueError):
    """The tokenizer library panicked on these files or this text: a bug of the library, or files made to find one."""


class ModelTokenizer:
    """Tokenizer and chat template of one base model. Safe to use from several threads."""

    def __init__(self, files: Mapping[str, bytes]) -> None:
        """`files`: name -> content, at least tokenizer.json.

        Raises ValueError (BadTokenizer, UnsupportedDecoder, TokenizerPanic).
        """
        spec = _json(files, "tokenizer.json")
        with _bad_files_named(), _panics_named("tokenizer.json cannot be loaded"):
            self._tokenizer = _plainly(tokenizers.Tokenizer.from_str(files["tokenizer.json"].decode()))
            without_control = json.dumps({**spec, "added_tokens": [], "post_processor": None})
            self._uncontrolled = _plainly(tokenizers.Tokenizer.from_str(without_control))
        self._longest_piece = max(map(len, self._tokenizer.get_vocab(with_added_tokens=True)), default=0)
        self._decoding = decoding_of(spec.get("decoder"))
        self.vocab_size: int = self._tokenizer.get_vocab_size(with_added_tokens=True)
        added = self._tokenizer.get_added_tokens_decoder()
        self._special = {id_: token.content for id_, token in added.items() if token.special}
        self._added = {token.content: (id_, token.special) for id_, token in added.items()}
        has_html = "<td>" in self._added  # as Gemma: tags of HTML are tokens, and text
        text = {spelling for spelling in self._added if has_html and _HTML.fullmatch(spelling)}
        marks = {spelling for spelling in self._added if _CONTROL_SPELLING.fullmatch(spelling)} - text
        self._control = SpecialTokenEscaper([*self._special.values(), *marks])
        self._bytes: dict[int, bytes] = dict.fromkeys(self._special, b"")
        self._spelled = {id_: token_bytes(text, self._decoding) for id_, text in self._special.items()}
        self._template: ChatTemplate | TemplateFault | None = None
        self.config: dict[str, Any] = _json(files, "tokenizer_config.json")
        self._special_tokens = special_tokens_of(self.config, _json(files, SPECIAL_FILE))
        self._set_template(lambda: template_of(files))

    def with_template_of(self, adapter: Mapping[str, bytes]) -> "ModelTokenizer":
        """The same tokenizer with the chat template among an adapter's files: without one it renders no chats."""
        clone = copy.copy(self)
        clone._set_template(lambda: adapter_template(adapter, self._special_tokens, self._tokenizer.token_to_id)[0])
        if clone._template is None:
            clone._template = TemplateFault("the adapter's files have no chat template")
        return clone

    def _set_template(self, read: Callable[[], ChatTemplate | None]) -> None:
        """Set the template in use, shown by the configuration. A fault affects only chats."""
        try:
            self._template = read()
        except TemplateFault as error:
            self._template = error
        template = self._template if isinstance(self._template, ChatTemplate) else None
        if template:
            self.config = {**self.config, "chat_template": template.default}
        self.forms = TemplateForms.of_template(template, self._added)

    def encode(
        self, text: str, context_tokens: int = UNKNOWN_CONTEXT_TOKENS, *, add_special_tokens: bool = True
    ) -> list[int]:
        """A raw prompt, with what the tokenizer adds (a beginning-of-sequence token). Raises NotEncodable, TooLong."""
        self._check_chars(len(text), context_tokens)
        return _encode(self._tokenizer, [text], add_special_tokens=add_special_tokens)[0]

    def sequences_of(self, texts: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """Return the tokens of each text at the beginning of a text, and after a space. Raises NotEncodable."""
        spellings = [spelling for text in texts for spelling in (text, f" {text.lstrip()}")]
        encoded = _encode(self._tokenizer, spellings, add_special_tokens=False) if texts else []
        return tuple(dict.fromkeys(tuple(ids) for ids in encoded if ids))

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of tokens, for the predictor: special and unknown ones left out."""
        return b"".join(map(self.bytes_of, tokens)).decode("utf-8", "replace")

    def spelled(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens, with the spelling of special tokens."""
        return b"".join(map(self.spelled_bytes_of, tokens)).decode("utf-8", "replace")

    def encode_chat(self, chat: Chat, context_tokens: int = UNKNOWN_CONTEXT_TOKENS) -> list[int]:
        """A chat through the template; no text of the caller becomes a control token. Raises NotEncodable, TooLong."""
        template = self._template
        if isinstance(template, TemplateFault):
            raise BadTemplate(f"this model renders no chats, use /v1/completions: {template}")
        if template is None:
            raise NotEncodable("this model has no chat template; use /v1/completions")
        parts = [chat.messages, chat.tools, chat.documents, chat.variables]
        self._check_chars(sum(map(_chars, parts)), context_tokens)
        hidden: dict[str, str] = {}
        sought = template.sought | chat.call_marks
        try:
            messages = [self._hidden_message(message, sought, hidden) for message in chat.messages]
            tools, documents, variables = (self._hidden(value, hidden) for value in parts[1:])
            safe = replace(chat, messages=messages, tools=tools, documents=documents, variables=variables)
            rendered = template.render(safe, self.max_chars(context_tokens))
        except RenderedTooLong as error:
            raise TooLong.of_context(context_tokens, f"{error}. Please reduce the length of the messages") from error
        except TemplateFailed as error:
            raise BadTemplate(str(error)) from error
        except (TemplateRefused, TooManySpecialTokens) as error:
            raise NotEncodable(str(error)) from error
        tokens = self._encode_rendered(rendered, {mark: text for text, mark in hidden.items()})
        return self._with_special(tokens) if chat.add_special_tokens else tokens

    def _with_special(self, tokens: list[int]) -> list[int]:
        """Return the tokens with the tokenizer's additional tokens around a text."""
        plain, around = (_encode(self._tokenizer, ["a"], add_special_tokens=special)[0] for special in (False, True))
        begin = next((i for i in range(len(around)) if around[i : i + len(plain)] == plain), len(around))
        return [*around[:begin], *tokens, *around[begin + len(plain) :]]

    def _hidden_message(self, message: Message, sought: Set[str], hidden: dict[str, str]) -> Message:
        """An earlier answer shows its marks: of calls, and what the template looks for, as the end of its reasoning."""
        shown: Set[str] = sought if message["role"] == "assistant" else frozenset()
        return self._hidden(message, hidden, shown)

    def _hidden(self, value: Any, hidden: dict[str, str], shown: Set[str] = frozenset()) -> Any:
        """JSON whose texts and names hold marks in place of control tokens."""
        match value:
            case str():
                return self._control.hide(value, hidden, shown)
            case dict():
                return {
                    str(self._hidden(name, hidden)): self._hidden(item, hidden, shown) for name, item in value.items()
                }
            case list() | tuple():
                return [self._hidden(item, hidden, shown) for item in value]
            case _:
                return value

    def max_chars(self, context_tokens: int) -> int:
        """Longer texts are refused before they are encoded: even tokens of the longest piece would not fit.

        A tokenizer that drops or folds characters (runs of spaces, unknown words) could make fewer tokens of a text;
        a text beyond this bound is refused for such a tokenizer, too.
        """
        return context_tokens * max(self._longest_piece, MIN_PIECE_CHARS)

    def _check_chars(self, chars: int, context_tokens: int) -> None:
        if chars > self.max_chars(context_tokens):
            text = f"your prompt of {chars} characters is longer. Please reduce its length"
            raise TooLong.of_context(context_tokens, text)

    def bytes_of(self, token: int) -> bytes:
        """The bytes of a token; b"" for a special or unknown one. Cached: the vocabulary bounds it."""
        if (cached := self._bytes.get(token)) is not None:
            return cached
        text = self._tokenizer.id_to_token(token)
        spelled = b"" if text is None else token_bytes(text, self._decoding)
        if text is not None:
            self._bytes[token] = spelled
        return spelled

    def spelled_bytes_of(self, token: int) -> bytes:
        """Return the bytes of a token; for a special token, the bytes of its spelling."""
        special = self._spelled.get(token)
        return self.bytes_of(token) if special is None else special

    def name_of(self, token: int) -> str | None:
        """Return the name of a token without text: the spelling of a special token, or the id of an unknown token."""
        if (special := self._special.get(token)) is not None:
            return special
        return None if self.bytes_of(token) else f"token_id:{token}"

    def _encode_rendered(self, rendered: str, hidden: Mapping[str, str]) -> list[int]:
        """Encode the text between two marks as it is, and each mark as the spelling that it hides."""
        pieces = _MARK.split(rendered)
        plain = {piece: self._encode_plain(hidden.get(piece, piece)) for piece in set(pieces[1::2])}
        ids: list[int] = []
        for start in range(0, len(pieces), BATCH_TEXTS):
            batch = [piece for piece in pieces[start : start + BATCH_TEXTS] if piece]
            texts = [piece for piece in batch if piece not in plain]
            encoded = dict(zip(texts, _encode(self._tokenizer, texts, add_special_tokens=False), strict=True))
            for piece in batch:
                ids += plain[piece] if piece in plain else encoded[piece]
        self._check_control(ids, rendered)
        return ids

    def _encode_plain(self, text: str) -> list[int]:
        """Return tokens without special tokens: character by character if the vocabulary has the text itself."""
        (ids,) = _encode(self._uncontrolled, [text], add_special_tokens=False)
        if self._special.keys().isdisjoint(ids):
            return ids
        return [i for char in _encode(self._uncontrolled, list(text), add_special_tokens=False) for i in char]

    def _check_control(self, ids: Sequence[int], rendered: str) -> None:
        """Every special token has to stem from the template: a normalizer may make one of similar characters."""
        counts = Counter(self._special[i] for i in ids if i in self._special)
        if counts - self._control.count(rendered):
            raise NotEncodable("a message holds text that the tokenizer turns into a control token")


class TooManySpecialTokens(ValueError):
    """The text spells more different control tokens than there are marks."""


class SpecialTokenEscaper:
    """Hides control tokens spelled in a text by marks, and counts them.

    One search for each spelling, the longest first: as many short calls. A regex of all spellings is one call that
    holds the interpreter lock, and with it the event loop, for seconds on a long text.
    """

    def __init__(self, contents: Iterable[str]) -> None:
        self._longest_first = sorted(filter(None, set(contents)), key=len, reverse=True)

    def hide(self, text: str, hidden: dict[str, str], shown: Set[str] = frozenset()) -> str:
        """Put a mark in place of each spelling. `hidden` maps spellings to marks; equal spellings share a mark.

        `shown`: spellings that stay as they are.
        """
        text = _MARK.sub(lambda match: _mark_of(match[0], hidden), text)
        for spelling in self._longest_first:
            if spelling in text and spelling not in shown:
                text = text.replace(spelling, _mark_of(spelling, hidden))
        return text

    def count(self, text: str) -> Counter[str]:
        """How often the text spells each control token; a part of a longer spelling does not count."""
        counts: Counter[str] = Counter()
        for spelling in self._longest_first:
            if times := text.count(spelling):
                counts[spelling] = times
                text = text.replace(spelling, chr(_LAST_MARK))
        return counts


def _chars(value: Any) -> int:
    """Count the characters of all texts of a JSON value."""
    match value:
        case str():
            return len(value)
        case dict():
            return sum(len(name) + _chars(item) for name, item in value.items())
        case list() | tuple():
            return sum(map(_chars, value))
        case _:
            return 8


def _mark_of(spelling: str, hidden: dict[str, str]) -> str:
    if spelling not in hidden and len(hidden) > _LAST_MARK - _FIRST_MARK:
        raise TooManySpecialTokens("too many different control characters")
    return hidden.setdefault(spelling, chr(_FIRST_MARK + len(hidden)))


def _encode(tokenizer: tokenizers.Tokenizer, texts: list[str], *, add_special_tokens: bool) -> list[list[int]]:
    """The batch call, for one text too: `encode` holds the interpreter lock while it works."""
    try:
        with _panics_named("the model's tokenizer failed on this text"):
            encodings = tokenizer.encode_batch_fast(texts, add_special_tokens=add_special_tokens)
    except TokenizerPanic:
        raise
    except Exception as error:  # the library raises nothing narrower
        raise NotEncodable(f"the model's tokenizer cannot encode this text: {error}") from error
    return [encoding.ids for encoding in encodings]


@contextlib.contextmanager
def _bad_files_named() -> Generator[None]:
    try:
        yield
    except TokenizerPanic:
        raise
    except Exception as error:  # the library raises nothing narrower
        raise BadTokenizer(f"tokenizer.json cannot be loaded: {error}") from error


@contextlib.contextmanager
def _panics_named(subject: str) -> Generator[None]:
    """The library's panics are no Exception and would end a whole task unseen; their class cannot be imported."""
    try:
        yield
    except BaseException as error:
        if type(error).__module__ != "pyo3_runtime":
            raise
        raise TokenizerPanic(f"{subject}: the tokenizer library panicked: {error}") from error


def _plainly(tokenizer: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    """Encode whole texts: a tokenizer.json may come with training's truncation and padding."""
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _json(files: Mapping[str, bytes], name: str) -> dict[str, Any]:
    try:
        value = json.loads(files.get(name, b"{}"))
    except RecursionError as error:
        raise BadTokenizer(f"{name} is nested too deeply") from error
    if not isinstance(value, dict):
        raise BadTokenizer(f"{name} is not an object")
    return value
