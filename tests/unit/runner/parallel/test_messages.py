"""Messages of ranks: plain values and kinds of this program by name, whatever a library calls its own classes."""

import json
import struct
import subprocess
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from harness.ranks import settings_of
from weft.domain.ids import Epoch
from weft.domain.machine import Kind, Peer
from weft_kernels.plan import plan_rows
from weft_runner.core import ReceiveKv
from weft_runner.core.transfer.shards import ShardOrder
from weft_runner.errors import NoPolicyFits, RunnerError
from weft_runner.model import StepInput, StepRow
from weft_runner.parallel import COMMANDS, KINDS, ChannelLost, Layers, MessageRefused, pack_message, unpack_message

MESSAGES = {kind.__name__: kind for kind in KINDS}
ROWS = StepRow(0, 2, 4, (3, 9), False), StepRow(2, 3, 0, (4,), True)
STEP = StepInput([5, 6, 7], ROWS, plan_rows([1, 1, None], {1: 8}))
PEER = Peer(Kind.RUNNER, "a/b")


def never(error: MessageRefused) -> None:
    raise AssertionError(error)


def sent(message: Any) -> Any:
    return unpack_message(pack_message(message), never)


@pytest.mark.parametrize("name", [*(COMMANDS.keys() - {"run"}), *MESSAGES])
@settings(suppress_health_check=list(HealthCheck), deadline=None, max_examples=20)
@given(data=st.data())
def test_every_message_arrives_as_it_was_sent(name, data):
    """Whatever its types allow: a field of a type that cannot be sent or read fails here."""
    if name in MESSAGES:
        message = data.draw(st.from_type(MESSAGES[name]))
    else:
        message = (name, *data.draw(st.tuples(*map(st.from_type, COMMANDS[name]))))
    received = sent(message)
    assert type(received) is type(message)
    assert pack_message(received) == pack_message(message)


def test_a_path_goes_as_its_text():
    settings = settings_of(tls_dir="/tls", depot="https://depot:1", model_cache="/cache")
    body = pack_message(("beside", settings, {"config.json": PurePosixPath("/base/config.json")}, 1))
    assert b"pathlib" not in body
    assert unpack_message(body, never) == ("beside", settings, {"config.json": Path("/base/config.json")}, 1)


@pytest.mark.parametrize("error", [RunnerError("one"), NoPolicyFits("too small", "memory", 3)])
def test_what_a_rank_is_refused_for_arrives_as_it_is(error):
    found = sent(error)
    assert (type(found), found.args, vars(found)) == (type(error), error.args, vars(error))


HOSTILE = {
    "a class": (subprocess.Popen, "subprocess.Popen"),
    "a function of ours": (settings_of, "harness.ranks.settings_of"),
    "a builtin": (eval, "builtins.eval"),
    "an array": (np.zeros(2), "numpy.ndarray"),
    "a number of a library": (np.int64(3), "numpy.int64"),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_anything_else_is_refused_at_the_end_that_sends_it(kind):
    message, name = HOSTILE[kind]
    with pytest.raises(MessageRefused, match=f"a message with a {name}, which no rank sends"):
        pack_message(("clear", message))


def changed(message: Any, *path: int, to: Any) -> bytes:
    """Return a message with another value there."""
    line, _, step = pack_message(message).partition(b"\n")
    parts = whole = json.loads(line)
    for place in path[:-1]:
        parts = parts[place]
    parts[path[-1]] = to
    return json.dumps(whole).encode() + b"\n" + step


RUN, LAYERS = ("run", STEP, Layers(0, 1, True)), Layers(0, 1, True)
KV = ("kv", ShardOrder(ReceiveKv(PEER, "r", Epoch(1, 2), 0, (3, 4)), ("a:1",)))
NUMBERS = pack_message(RUN).partition(b"\n")[2]
REFUSED = {
    "a name that no rank sends": (b'["eval", "1"]', "the name 'eval', which no rank sends"),
    "a class of ours that is no message": (b'["RunnerSettings"]', "the name 'RunnerSettings'"),
    "a name that is none": (b"[{}]", "TypeError"),
    "no JSON": (b"no message", "JSONDecodeError"),
    "nothing": (b"", "JSONDecodeError"),
    "no list": (b"{}", "ValueError"),
    "one nested too deep": (b"[" * 100_000, "RecursionError"),
    "too few values": (b'["put", 1, 2]', "shorter"),
    "too many values": (b'["clear", 1, 2]', "longer"),
    "a text for a number": (b'["clear", "1"]', "expected int, got '1'"),
    "a truth for a number": (b'["clear", true]', "expected int, got 'True'"),
    "a fraction among numbers": (b'["clear_pages", [1, 2.0]]', "expected int, got '2.0'"),
    "no list of numbers": (b'["clear_pages", "12"]', "expected a list for list, got '12'"),
    "a number for a truth": (changed(RUN, 2, 3, to=1), "expected bool, got '1'"),
    "another class than the field's": (changed(RUN, 2, 0, to="RankGrid"), "expected Layers, got 'RankGrid'"),
    "another class than its order's": (changed(KV, 1, 1, 0, to="OpenKvStream"), "expected .*SendKv"),
    "no member": (changed(KV, 1, 1, 1, 0, to="nobody"), "expected .*SendKv"),
    "no tuple of that length": (changed(KV, 1, 1, 3, to=[1]), "expected .*SendKv"),
    "no step": (pack_message(("clear", 1)).replace(b"clear", b"run"), "ValueError"),
    "a step that ends early": (pack_message(RUN)[:-4], "expected a step of 31 numbers, got 30"),
    "a step that ends late": (pack_message(RUN) + bytes(4), "expected a step of 31 numbers, got 32"),
    "part of a number": (pack_message(RUN)[:-3], "TypeError"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_anything_else_is_refused_by_who_gets_it_and_the_other_end_hears_why(kind):
    """No code runs, even where the other end is not this program."""
    body, why = REFUSED[kind]
    heard: list[MessageRefused] = []
    with pytest.raises(MessageRefused, match=f"(?s)a message .*{why}"):
        unpack_message(body, heard.append)
    (told,) = heard
    with pytest.raises(MessageRefused, match=f"(?s)a message .*{why}"):
        sent(told)


@pytest.mark.parametrize("place", range(len(NUMBERS) // 4))
@pytest.mark.parametrize("number", [-1, 2, 1 << 30])
def test_the_numbers_of_a_step_are_a_step_or_refused(place, number):
    """Whatever a number says: nothing is allocated by it, and what is read has the numbers that came."""
    line = pack_message(RUN)[: -len(NUMBERS)]
    body = line + NUMBERS[: 4 * place] + struct.pack("i", number) + NUMBERS[4 * place + 4 :]
    try:
        message = unpack_message(body, lambda _: None)
    except MessageRefused:
        return
    assert pack_message(message) == body


def test_a_refusal_is_no_less_known_where_the_other_end_is_gone():
    def gone(error: MessageRefused) -> None:
        raise ChannelLost("the other end closed")

    with pytest.raises(MessageRefused, match="which no rank sends"):
        unpack_message(b'["eval"]', gone)
