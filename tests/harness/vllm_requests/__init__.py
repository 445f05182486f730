"""vLLM's tests of its servers, as requests to ours: which are answered alike, which are not and why.

Counted is what a server of text models with LoRA adapters can be asked: `OUT_OF_SCOPE` says what is left out.
Each line of a list (`*.jsonl`) is a request: `test`, `to` (an endpoint of `shared.json`, whose body it changes, or a
method and path), `body`, `headers`, and `asserts`, by functions of the module of the list's name. `differs` is why
Weft's reply is another one, and `instead` what it is. `"$name"` stands for a value of `shared.json`.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from harness.json_lines import cases, filled
from harness.vllm_requests import chats, checks, completions, others, pooling
from harness.vllm_requests.checks import Check, Expected

HERE = Path(__file__).parent
SHARED: dict[str, Any] = json.loads((HERE / "shared.json").read_text())
VALUES: dict[str, Any] = SHARED["values"]
ENDPOINTS: dict[str, Any] = filled(SHARED["endpoints"], VALUES)
# Of vLLM's repository, under `tests/`: the commit at which each file was read.
COMMITS: dict[str, str] = SHARED["commits"]
OUT_OF_SCOPE: dict[str, str] = SHARED["out of scope"]


def _listed(module: ModuleType) -> Iterator[Check]:
    """Read the checks of a module's list."""
    for check in cases(HERE / f"{module.__name__.rpartition('.')[2]}.jsonl", VALUES):
        endpoint = ENDPOINTS.get(check["to"], {"to": check["to"], "body": {}})
        method, path = endpoint["to"].split()
        body = check["raw"].encode() if "raw" in check else {**endpoint["body"], **check.get("body", {})}
        asserts, instead = ([_expected(module, x) for x in check.get(key, ())] for key in ("asserts", "instead"))
        headers, differs = check.get("headers", {}), check.get("differs", "")
        yield Check(check["test"], method, path, body if method == "POST" else None, asserts, headers, differs, instead)


def _expected(module: ModuleType, expectation: Any) -> Expected:
    """Return an object of paths as it is, a function for its name."""
    if isinstance(expectation, dict):
        return expectation
    name, *arguments = [expectation] if isinstance(expectation, str) else expectation
    return getattr(module, name, None) or getattr(checks, name), *arguments


CHECKS: tuple[Check, ...] = tuple(
    check for module in (completions, chats, pooling, others) for check in _listed(module)
)
DIFFERENT = tuple(check for check in CHECKS if check.differs)


def counts() -> str:
    """Say how many are alike."""
    alike = len(CHECKS) - len(DIFFERENT)
    return f"{alike} of {len(CHECKS)} requests are answered as vLLM's tests assert ({alike / len(CHECKS):.1%})"


def table() -> str:
    """Return those that are not alike, by their reasons, in Markdown."""
    by_reason: dict[str, list[str]] = {}
    for check in DIFFERENT:
        by_reason.setdefault(check.differs, []).append(check.test.partition("::")[2])
    rows = [f"| {', '.join(f'`{name}`' for name in names)} | {reason} |" for reason, names in by_reason.items()]
    return "\n".join(["| vLLM's test | why Weft's answer is another |", "|---|---|", *rows])


def left_out() -> str:
    """Return what is not counted, in Markdown."""
    rows = [f"| {what} | {why} |" for what, why in OUT_OF_SCOPE.items()]
    return "\n".join(["| not counted | why |", "|---|---|", *rows])
