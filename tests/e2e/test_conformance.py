"""`weft conformance` against a whole stack: every check passes, an update in flight among them."""

import json
import shlex
import sys
from pathlib import Path

from harness.quickstart import BASE, QUICKSTART
from weft_bench.stack import Stack

ADAPTERS = QUICKSTART / "adapters"


def test_every_promise_is_kept_by_a_whole_stack(tmp_path: Path) -> None:
    with Stack(QUICKSTART, tmp_path) as stack:
        models = stack.wait_for_models()
        adapters = [model for model in models if model != BASE]
        push = [sys.executable, "-m", "weft_cli", "push", adapters[0].partition("/")[2], ADAPTERS / "upper"]
        push += ["-n", adapters[0].partition("/")[0], "--data-dir", tmp_path]
        named = [word for adapter in adapters for word in ("--adapter", adapter)]
        update = shlex.join(map(str, push)) + " >&2"
        done = stack.cli("conformance", stack.url, "--base", BASE, *named, "--json", "--update", update, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    checks = {one["name"]: one for one in json.loads(done.stdout)["checks"]}
    assert [name for name, one in checks.items() if one["verdict"] != "pass"] == [], checks
    assert len(checks) == 9
