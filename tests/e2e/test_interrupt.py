"""Ctrl-C at the terminal of a stack whose answers are far from their end."""

import os
import select
import time
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from threading import Event

import openai
import pytest

from harness.waiting import PATIENCE_S, wait_until
from weft_stage.stack import Stack, quickstart

pytestmark = pytest.mark.slow

STREAMS, CHOICES, TOKENS = 4, 64, 900  # 230,000 tokens: more than any machine computes before the signal


def cut_off(client: openai.OpenAI, begun: Event) -> openai.APIError:
    """What the client of a long answer gets."""
    try:
        stream = client.completions.create(
            model="acme/upper", prompt="hello", n=CHOICES, max_tokens=TOKENS, stream=True,
            extra_body={"ignore_eos": True},
        )  # fmt: skip
        for _ in stream:
            begun.set()
    except openai.APIError as error:
        return error
    raise AssertionError("the answer came to its end")


def test_ctrl_c_cuts_streams_with_an_error_and_leaves_no_process(tmp_path: Path) -> None:
    """The time is printed and decides nothing; an end that hangs fails."""
    with Stack(quickstart(), tmp_path) as stack, ThreadPoolExecutor(STREAMS) as pool:
        stack.wait_for_models()
        client = openai.OpenAI(base_url=f"{stack.url}/v1", api_key="none", timeout=PATIENCE_S, max_retries=0)
        begun = Event()
        streams = [pool.submit(cut_off, client, begun) for _ in range(STREAMS)]
        assert begun.wait(PATIENCE_S)
        wait_until(lambda: stack.metric("gateway", "weft_gateway_in_flight") > (STREAMS - 1) * CHOICES, "all are there")
        pids = [component["pid"] for component in stack.components().values()]
        watches = [os.pidfd_open(pid) for pid in pids]
        signalled = time.monotonic()
        assert stack.stop() == 0
        print(f"{STREAMS} streams of {CHOICES} choices: Ctrl-C to the end {time.monotonic() - signalled:.2f} s")
        assert not wait(streams, PATIENCE_S).not_done
        errors = [stream.result() for stream in streams]
        assert {error.code for error in errors} == {"shutting_down"}, [(error, error.__cause__) for error in errors]
        assert all(select.select([watch], [], [], PATIENCE_S)[0] for watch in watches), "a process is left"
        for watch in watches:
            os.close(watch)
