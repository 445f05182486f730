"""Messages between ranks as bytes: plain values, and values that are made of them and of this program's own kinds.

What a library calls its classes is not ours to rely on: pathlib's had other names in Python 3.13 than before and after.
A path goes as its text. Both ends hold to that: what one may not send, the other would not take.
"""

import io
import pickle
from collections.abc import Callable
from contextlib import suppress
from dataclasses import is_dataclass
from enum import Enum
from pathlib import Path, PurePath
from typing import Any

from weft_runner.errors import RunnerError

PROTOCOL = 5  # whatever the default of a Python is: hosts may have different ones
_OURS = ("weft", "weft_runner", "weft_kernels")
_BUILTINS = (set, frozenset, range)


class ChannelLost(Exception):
    """The other end is gone, or does not take or send anything in time."""


class MessageRefused(ChannelLost):
    """A message that no rank sends, at the end that sent it or at the one that got it: the ranks are not in step."""


def pack_message(message: Any) -> bytes:
    """Raises MessageRefused."""
    body = io.BytesIO()
    _Packer(body, PROTOCOL).dump(message)
    return body.getvalue()


def unpack_message(body: bytes, answer: Callable[[MessageRefused], None]) -> Any:
    """Raises MessageRefused: `answer` has told the other end then, or it comes from there."""
    try:
        message = _unpacked(body)
    except MessageRefused as error:
        with suppress(ChannelLost):
            answer(error)
        raise
    if isinstance(message, MessageRefused):
        raise message
    return message


def _unpacked(body: bytes) -> Any:
    try:
        return _Unpacker(io.BytesIO(body)).load()
    except MessageRefused:
        raise
    except Exception as error:  # pickle names no kinds that it keeps to
        raise MessageRefused(f"a message that cannot be read: {type(error).__name__}: {error}") from error


def path_of(text: str) -> Path:
    """What a path is sent as."""
    return Path(text)


class _Packer(pickle.Pickler):
    def reducer_override(self, obj: Any, /) -> Any:
        """For all but plain values: `obj` as its parts, among them the class that they are of."""
        if isinstance(obj, PurePath):
            return path_of, (str(obj),)
        if not (_is_ours(obj) or _is_ours(type(obj))):
            named = obj if hasattr(obj, "__qualname__") else type(obj)
            raise _refused(named.__module__, named.__qualname__)
        return NotImplemented


class _Unpacker(pickle.Unpickler):
    def find_class(self, module: str, name: str, /) -> Any:
        """No function but `path_of`, and nothing is imported that is not this program's."""
        if module == "builtins" or module.partition(".")[0] in _OURS:
            found = super().find_class(module, name)
            if _is_ours(found):
                return found
        raise _refused(module, name)


def _is_ours(found: Any) -> bool:
    """Say whether it is a class of values that are sent, or `path_of`."""
    if not isinstance(found, type):
        return found is path_of
    if found in _BUILTINS:
        return True
    own = found.__module__.partition(".")[0] in _OURS
    return own and (is_dataclass(found) or issubclass(found, (tuple, Enum, RunnerError, MessageRefused)))


def _refused(module: str, name: str) -> MessageRefused:
    return MessageRefused(f"a message with a {module}.{name}, which no rank sends")
