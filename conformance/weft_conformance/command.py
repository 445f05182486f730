"""`weft conformance URL`: runs the checks and prints a line for each."""

import asyncio
import json
from collections.abc import Sequence

import httpx2

from weft_cli.gateway import CONNECT_S, link_errors
from weft_cli.output import say
from weft_conformance.checks import TIMEOUT_S
from weft_conformance.checks import run as run_checks
from weft_conformance.judging import Result, Verdict, document, model_of

NAME_CHARS = 14
VERDICT_CHARS = 14


def run(
    url: str, key: str | None, base: str | None, adapters: Sequence[str], update: str | None, *, as_json: bool
) -> int:
    """Run the checks. Returns exit code 0 when none fails. Raises CommandError."""
    chosen = [model_of(one) for one in adapters]
    headers = {"authorization": f"Bearer {key}"} if key else {}
    timeout = httpx2.Timeout(TIMEOUT_S, connect=CONNECT_S)

    async def checked() -> list[Result]:
        # A connection a request: servers close idle ones at moments of their own (llama.cpp's after 100 requests).
        limits = httpx2.Limits(max_connections=None, max_keepalive_connections=0)
        async with httpx2.AsyncClient(
            base_url=url, headers=headers, timeout=timeout, limits=limits, trust_env=False
        ) as client:
            models, results = await run_checks(
                client, model_of(base) if base else None, chosen, update, _quiet if as_json else _line
            )
        if as_json:
            say(json.dumps(document(url, models, results), indent=2))
        return results

    with link_errors(url):
        results = asyncio.run(checked())
    return int(any(one.verdict is Verdict.FAIL for one in results))


def _line(one: Result) -> None:
    say(f"{one.name:<{NAME_CHARS}} {one.verdict:<{VERDICT_CHARS}} {one.detail}")


def _quiet(_one: Result) -> None:
    """Report nothing: a document is printed at the end."""
