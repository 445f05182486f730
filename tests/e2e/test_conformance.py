"""`weft conformance` on a stack of our own: every check passes, with an update in flight."""

import json
import shlex
import sys

import pytest

from harness.quickstart import QUICKSTART
from weft_stage.stack import Stack

pytestmark = pytest.mark.slow


def test_a_stack_keeps_every_promise_of_lora_serving(stack: Stack) -> None:
    cipher = str(QUICKSTART / "adapters" / "cipher")
    push = ["push", "upper", cipher, "-n", "acme", "--data-dir", str(stack.data_dir)]
    update = shlex.join([sys.executable, "-m", "weft_cli", *push])
    models = ("acme/upper", "acme/reverse-words", "globex/digits", "initech/json")
    adapters = [word for model in models for word in ("--adapter", model)]
    done = stack.cli("conformance", stack.url, "--base", "weft-quickstart", *adapters, "--update", update, "--json")
    found = {check["name"]: (check["verdict"], check["detail"]) for check in json.loads(done.stdout)["checks"]}
    assert {verdict for verdict, _ in found.values()} == {"pass"}, found
    assert len(found) == 9
    reused = stack.metric("runner", "weft_runner_prefix_reused_tokens_total")
    assert reused, "the prefix check needs a cache: callers without a key share one"
