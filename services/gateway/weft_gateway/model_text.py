"""Text to tokens and back, for one base model: its tokenizer and its chat template.

What a user types in a chat is plain text, also where it spells a control token: such spellings are hidden while the
template renders and encoded on their own by a tokenizer that knows no control tokens. Raw completion prompts are the
caller's whole prompt and may hold control tokens.
"""

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import tokenizers

from weft_gateway.chat_template import ChatTemplate, Message, TemplateRefused, special_tokens_of, template_source
from weft_gateway.core.detokenise import decoding_of, token_bytes

# Private-use characters of plane 16 stand in for what is hidden; typed ones are hidden like control tokens.
_FIRST_MARK, _LAST_MARK = 0x100000, 0x10FFFD
_MARK = re.compile(f"([{chr(_FIRST_MARK)}-{chr(_LAST_MARK)}])")
_LOOKS_LIKE_CONTROL = re.compile(r"[<\[].+[>\]]", re.DOTALL)


class NotEncodable(ValueError):
    """This text cannot become a prompt of this model; the message says why."""


class ModelText:
    """Tokenizer and chat template of one base model. Safe to use from several threads."""

    def __init__(self, files: Mapping[str, bytes]) -> None:
        """`files`: name -> content, at least tokenizer.json.

        Raises ValueError (UnsupportedDecoder, a bad JSON), jinja2.TemplateSyntaxError.
        """
        spec: dict[str, Any] = json.loads(files["tokenizer.json"])
        self._tokenizer = _plainly(tokenizers.Tokenizer.from_str(files["tokenizer.json"].decode()))
        self._uncontrolled = _plainly(_without_control(spec))
        self._decoding = decoding_of(spec.get("decoder"))
        self.vocab_size: int = self._tokenizer.get_vocab_size(with_added_tokens=True)
        added = self._tokenizer.get_added_tokens_decoder()
        self._special = {id_: token.content for id_, token in added.items() if token.special}
        self._control = _control_pattern([t.content for t in added.values() if _is_control(t)])
        self._bytes: dict[int, bytes] = dict.fromkeys(self._special, b"")
        self._template = _template(files)

    def encode(self, text: str) -> list[int]:
        """A raw prompt, with what the tokenizer adds (a beginning-of-sequence token)."""
        return _encode(self._tokenizer, text, add_special_tokens=True)

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of tokens, for the predictor: special and unknown ones left out."""
        return b"".join(map(self.bytes_of, tokens)).decode("utf-8", "replace")

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        """A chat through the template; contents cannot become control tokens. Raises NotEncodable."""
        if self._template is None:
            raise NotEncodable("this model has no chat template; use /v1/completions")
        hidden: dict[str, str] = {}
        safe = [{**message, "content": self._hide(message["content"], hidden)} for message in messages]
        try:
            rendered = self._template.render(safe)
        except TemplateRefused as error:
            raise NotEncodable(str(error)) from error
        return self._encode_rendered(rendered, {mark: text for text, mark in hidden.items()})

    def bytes_of(self, token: int) -> bytes:
        """The bytes of a token; b"" for a special or unknown one. Cached: the vocabulary bounds it."""
        if (known := self._bytes.get(token)) is not None:
            return known
        text = self._tokenizer.id_to_token(token)
        found = b"" if text is None else token_bytes(text, self._decoding)
        if text is not None:
            self._bytes[token] = found
        return found

    def _hide(self, content: str, hidden: dict[str, str]) -> str:
        """Put a mark in place of each control token's spelling; equal spellings share a mark."""
        if len(hidden) > _LAST_MARK - _FIRST_MARK:
            raise NotEncodable("too many different control characters")
        return self._control.sub(lambda m: hidden.setdefault(m[0], chr(_FIRST_MARK + len(hidden))), content)

    def _encode_rendered(self, rendered: str, hidden: Mapping[str, str]) -> list[int]:
        ids: list[int] = []
        for piece in _MARK.split(rendered):
            if piece in hidden:
                ids += self._encode_plain(hidden[piece])
            elif piece:
                ids += _encode(self._tokenizer, piece, add_special_tokens=False)
        self._check_control(ids, rendered)
        return ids

    def _encode_plain(self, text: str) -> list[int]:
        """Tokens none of which is special: character by character where the vocabulary holds the text itself."""
        ids = _encode(self._uncontrolled, text, add_special_tokens=False)
        if self._special.keys().isdisjoint(ids):
            return ids
        return [i for char in text for i in _encode(self._uncontrolled, char, add_special_tokens=False)]

    def _check_control(self, ids: Sequence[int], rendered: str) -> None:
        """Every special token stems from the template: a normalizer may make one of look-alike characters."""
        found = Counter(self._special[i] for i in ids if i in self._special)
        if found - Counter(self._control.findall(rendered)):
            raise NotEncodable("a message holds text that the tokenizer turns into a control token")


def _encode(tokenizer: tokenizers.Tokenizer, text: str, *, add_special_tokens: bool) -> list[int]:
    try:
        return tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
    except Exception as error:  # the library raises nothing narrower
        raise NotEncodable(f"the model's tokenizer cannot encode this text: {error}") from error


def _plainly(tokenizer: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    """Whole texts, as they are: a tokenizer.json may come with training's truncation and padding."""
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _without_control(spec: Mapping[str, Any]) -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_str(json.dumps({**spec, "added_tokens": [], "post_processor": None}))


def _is_control(token: tokenizers.AddedToken) -> bool:
    return token.special or _LOOKS_LIKE_CONTROL.fullmatch(token.content) is not None


def _control_pattern(contents: Sequence[str]) -> re.Pattern[str]:
    """Any control token's spelling, the longest first, or a character that looks like one of our marks."""
    spellings = [re.escape(content) for content in sorted(filter(None, contents), key=len, reverse=True)]
    return re.compile("|".join([*spellings, _MARK.pattern[1:-1]]))


def _template(files: Mapping[str, bytes]) -> ChatTemplate | None:
    config, special = (_json(files, name) for name in ("tokenizer_config.json", "special_tokens_map.json"))
    file = files.get("chat_template.jinja")
    source = template_source(file.decode() if file is not None else None, config)
    if source is None:
        return None
    return ChatTemplate(source, special_tokens_of(config, special), lambda form: datetime.now(UTC).strftime(form))


def _json(files: Mapping[str, bytes], name: str) -> dict[str, Any]:
    value = json.loads(files.get(name, b"{}"))
    if not isinstance(value, dict):
        raise ValueError(f"{name} is not an object")
    return value
