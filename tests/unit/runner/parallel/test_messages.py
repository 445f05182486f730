"""Messages of ranks: plain values and kinds of this program, whatever a Python or a library calls its own classes."""

import pickle
import subprocess
import typing
from collections import abc
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from enum import Enum
from pathlib import Path, PurePosixPath
from types import UnionType
from typing import Any

import numpy as np
import pytest

from harness.ranks import settings_of
from weft.domain.kv_transfer import KvComplete
from weft.domain.machine import Send
from weft_runner.core import ShardComplete, ShardLost, ShardOrder
from weft_runner.errors import NoPolicyFits, RunnerError
from weft_runner.executors import ModelSource
from weft_runner.model import RankGrid, StepInput
from weft_runner.parallel import (
    BuiltShard,
    ChannelLost,
    Layers,
    MessageRefused,
    RankReady,
    RankStopping,
    pack_message,
    unpack_message,
)
from weft_runner.settings import RunnerSettings

PLAIN = (int, float, bool, str, bytes, type(None), Path)
CONTAINERS = (tuple, list, dict, set, frozenset, abc.Mapping, abc.Sequence, typing.Union, UnionType)
SOURCE = typing.get_type_hints(ModelSource)
# What `parallel.commands` says is sent, and what START is made of.
SENT = (
    RunnerSettings, SOURCE["spec"], SOURCE["policy"], SOURCE["runner"], SOURCE["files"], RankGrid, StepInput, Layers,
    ShardOrder, KvComplete, BuiltShard, RankStopping, RankReady, ShardComplete, ShardLost,
)  # fmt: skip


def never(error: MessageRefused) -> None:
    raise AssertionError(error)


def foreign_kinds(kind: Any, where: str, seen: set[Any]) -> Iterator[str]:
    """What a value of this kind may hold that is neither plain nor ours."""
    origin = typing.get_origin(kind)
    if kind in PLAIN or kind in seen or origin is typing.Literal:
        return
    seen.add(kind)
    if origin in CONTAINERS:
        for part in typing.get_args(kind):
            if part is not ...:
                yield from foreign_kinds(part, where, seen)
    elif is_dataclass(kind) or hasattr(kind, "_fields"):
        hints = typing.get_type_hints(kind)
        names = kind._fields if hasattr(kind, "_fields") else [one.name for one in fields(kind) if one.init]
        for name in names:
            if (kind, name) != (Send, "message"):  # KvComplete alone
                yield from foreign_kinds(hints[name], f"{where}.{name}", seen)
    elif not (isinstance(kind, type) and issubclass(kind, Enum) and kind.__module__.startswith("weft")):
        yield f"{where}: {kind}"


@pytest.mark.parametrize("kind", SENT, ids=str)
def test_every_message_is_of_plain_values_and_kinds_of_this_program(kind):
    assert list(foreign_kinds(kind, getattr(kind, "__name__", str(kind)), set())) == []


def test_a_path_goes_as_its_text():
    settings = settings_of(tls_dir="/tls", depot="https://depot:1", model_cache="/cache")
    message = {"settings": settings, "files": {"config.json": Path("/base/config.json")}, "rank": 1}
    body = pack_message(message)
    assert b"pathlib" not in body
    assert unpack_message(body, never) == message
    assert unpack_message(pack_message(PurePosixPath("a/b")), never) == Path("a/b")


@pytest.mark.parametrize("error", [RunnerError("one"), NoPolicyFits("too small", "memory", 3)])
def test_what_a_rank_is_refused_for_arrives_as_it_is(error):
    found = unpack_message(pack_message(error), never)
    assert (type(found), found.args, vars(found)) == (type(error), error.args, vars(error))


def test_plain_values_arrive_as_they_are():
    message = {"a": (1, 2.5, None, True), "b": [b"x", {1, 2}, frozenset({3})], "c": range(3), RankStopping(): "d"}
    assert unpack_message(pack_message(message), never) == message


class Hostile:
    def __reduce__(self) -> Any:
        return subprocess.Popen, ("true",)


HOSTILE = {
    "an object of elsewhere": (Hostile(), Hostile.__module__ + ".Hostile", "subprocess.Popen"),
    "a class": (subprocess.Popen, "subprocess.Popen", "subprocess.Popen"),
    "a function of ours": (settings_of, "harness.ranks.settings_of", "harness.ranks.settings_of"),
    "a builtin": (eval, "builtins.eval", "builtins.eval"),
    "an array": (np.zeros(2), "numpy.ndarray", "numpy"),
    "a number of a library": (np.int64(3), "numpy.int64", "numpy"),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_anything_else_is_refused_at_the_end_that_sends_it(kind):
    message, name, _ = HOSTILE[kind]
    with pytest.raises(MessageRefused, match=f"a message with a {name}, which no rank sends"):
        pack_message([message])


@pytest.mark.parametrize("kind", HOSTILE)
def test_anything_else_is_refused_by_who_gets_it_and_the_other_end_hears_why(kind):
    """No code runs, even where the other end is not this program."""
    message, _, name = HOSTILE[kind]
    heard: list[MessageRefused] = []
    with pytest.raises(MessageRefused, match=f"a message with a {name}.*, which no rank sends"):
        unpack_message(pickle.dumps(message), heard.append)
    (told,) = heard
    with pytest.raises(MessageRefused, match=f"a message with a {name}.*, which no rank sends"):
        unpack_message(pack_message(told), never)


@pytest.mark.parametrize("body", [b"", b"no message", pack_message(Layers(0, 1, True))[:-3]])
def test_what_is_no_message_is_refused_by_name(body):
    with pytest.raises(MessageRefused, match="a message that cannot be read"):
        unpack_message(body, lambda _: None)


def test_a_refusal_is_no_less_known_where_the_other_end_is_gone():
    def gone(error: MessageRefused) -> None:
        raise ChannelLost("the other end closed")

    with pytest.raises(MessageRefused, match=r"subprocess\.Popen"):
        unpack_message(pickle.dumps(subprocess.Popen), gone)
