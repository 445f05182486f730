"""What the files beside the weights say of answers: where they end, and how they are sampled where nobody says.

An answer ends with any token that generation_config.json, config.json or the tokenizer's `eos_token` names, as in
vLLM's server; `parse_spec` reads the first two. Requests for an adapter that comes with tokenizer files of its own also
end with the `eos_token` that it was trained with. Of generation_config.json the defaults of sampling are those that
vLLM takes (`get_diff_sampling_param`); `do_sample` is not among them.
"""

from collections.abc import Callable, Mapping
from itertools import islice
from typing import Any, NamedTuple, cast

from weft.domain.model.errors import Reason, Refused
from weft.domain.request import SamplingDefaults
from weft.domain.strict_json import JsonError, JsonObject, is_int, parse_object
from weft.domain.text import quoted

TOKENIZER, TOKENIZER_CONFIG, SPECIAL_TOKENS = "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"
_EOS_FILES = (TOKENIZER_CONFIG, SPECIAL_TOKENS)  # transformers takes the one or the other, by what else is in them
MAX_TOKEN_CHARS = 1024
MAX_DECLARED = 4096  # tokens of a configuration; Llama 3 has 256
MAX_FILE_BYTES = 128 << 20  # a tokenizer of 256,000 tokens is about 35 MB
Read = Callable[[str], bytes | None]  # the content of the file of that name; None: there is none


class _Range(NamedTuple):
    """The range of a number of generation_config.json. `field`: of SamplingDefaults."""

    field: str
    least: float
    most: float
    above: bool = False  # `least` itself is outside
    whole: bool = False

    def __contains__(self, value: object) -> bool:
        if isinstance(value, bool) or not isinstance(value, int | float) or (self.whole and value % 1):
            return False
        return self.least <= value <= self.most and not (self.above and value == self.least)

    def __str__(self) -> str:
        kind = "a whole number" if self.whole else "a number"
        return (
            f"{kind} above {self.least}, at most {self.most}"
            if self.above
            else f"{kind} from {self.least} to {self.most}"
        )


_RANGES = {
    "temperature": _Range("temperature", 0, 100),
    "top_p": _Range("top_p", 0, 1, above=True),
    "top_k": _Range("top_k", -1, 2**31 - 1, whole=True),
    "min_p": _Range("min_p", 0, 1),
    "repetition_penalty": _Range("repetition_penalty", 0, 100, above=True),
    "max_new_tokens": _Range("max_tokens", 1, 2**31 - 1, whole=True),
}


def sampling_defaults(generation: JsonObject) -> tuple[SamplingDefaults, tuple[str, ...]]:
    """Read what generation_config.json sets. Returns it, and a warning for each value that cannot be used."""
    found: dict[str, Any] = {}
    warnings: list[str] = []
    for name, right in _RANGES.items():
        if (value := generation.get(name)) is None:
            continue
        if value in right:
            found[right.field] = int(value) if right.whole else float(value)
        else:
            warnings.append(f"generation_config.json: {name} is {quoted(value)}, not {right}: it is not used")
    return SamplingDefaults(**found), tuple(warnings)


def tokenizer_eos(read: Read, vocab_size: int) -> frozenset[int]:
    """The base's tokens that its tokenizer's `eos_token` names; empty if there is no such token. Raises Refused."""
    texts = [text for name in _EOS_FILES if (text := _eos_text(_object(read, name)))]
    ids = token_ids(read) if texts else {}
    return frozenset(ids[text] for text in texts if text in ids and 0 <= ids[text] < vocab_size)


def adapter_eos(
    read: Read, token_of: Callable[[str], int | None], vocab_size: int
) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """The tokens that the adapter's own `eos_token` names, and a warning for each that the base does not have.

    An id of the adapter's own configuration counts before the base's tokenizer: training may have given a token of the
    base another name. What cannot be read is a warning, too. `token_of`: the base's id of a text, if it has one.
    """
    found: dict[int, None] = {}
    warnings: list[str] = []
    declared: JsonObject = {}
    for name in _EOS_FILES:
        try:
            config = _object(read, name)
        except Refused as error:
            warnings.append(f"{error.message}: it is not used")
            continue
        declared = declared or config
        if not (text := _eos_text(config)):
            continue
        token = declared_tokens(declared).get(text)
        if token is None:
            token = token_of(text)
        if token is not None and 0 <= token < vocab_size:
            found[token] = None
            continue
        what = "no token of the base" if token is None else f"token {token}, and the base has {vocab_size} tokens"
        warnings.append(f"{name}: eos_token {quoted(text)} is {what}: it is not used")
    return tuple(found), tuple(warnings)


def strange_tokens(read: Read, token_of: Callable[[str], int | None]) -> tuple[str, ...]:
    """The adapter's own tokens that the base has not, or under another id; the one for padding is in no prompt."""
    try:
        config = _object(read, TOKENIZER_CONFIG)
    except Refused:
        return ()  # `adapter_eos` says so
    padding = config.get("pad_token")
    return tuple(text for text, token in declared_tokens(config).items() if text != padding and token_of(text) != token)


def _eos_text(config: JsonObject) -> str:
    """What `eos_token` says, a text or a token with its content; "" for nothing."""
    match config.get("eos_token"):
        case str(text) | {"content": str(text)}:
            return text[:MAX_TOKEN_CHARS]
        case _:
            return ""


def declared_tokens(config: Mapping[str, object]) -> dict[str, int]:
    """Text -> id, by `added_tokens_decoder` of a tokenizer_config.json: at most MAX_DECLARED of it."""
    added, found = config.get("added_tokens_decoder"), dict[str, int]()
    rows = cast("Mapping[str, object]", added).items() if isinstance(added, dict) else ()
    for token, entry in islice(rows, MAX_DECLARED):
        match entry:
            case {"content": str(content)} if content and token.isdecimal() and len(token) < 10:
                found[content] = int(token)
            case _:
                pass
    return found


def token_ids(read: Read) -> dict[str, int]:
    """The id of each text in tokenizer.json: of its added tokens, then of its vocabulary. Raises Refused."""
    tokenizer, found = _object(read, TOKENIZER), dict[str, int]()
    match tokenizer.get("model"):
        case {"vocab": dict(vocab)}:
            found = {text: token for text, token in cast("JsonObject", vocab).items() if is_int(token)}
        case {"vocab": [*pieces]}:
            for i, piece in reversed(list(enumerate(pieces))):
                match piece:
                    case [str(text), *_]:
                        found[text] = i
                    case _:
                        pass
        case _:
            pass
    added = tokenizer.get("added_tokens")
    for entry in reversed(cast("list[object]", added)) if isinstance(added, list) else ():
        match entry:
            case {"content": str(content), "id": int(token)}:
                found[content] = token
            case _:
                pass
    return found


def _object(read: Read, name: str) -> JsonObject:
    """Read a file as JSON; empty if there is none. Raises Refused."""
    raw = read(name)
    try:
        return {} if raw is None else parse_object(raw, max_bytes=MAX_FILE_BYTES)
    except JsonError as error:
        raise Refused(Reason.CONFIG_INVALID, f"{name}: {error}") from error
