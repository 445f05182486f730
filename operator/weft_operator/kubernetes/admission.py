"""The validating webhook: the API server asks `weft_operator.core.validation` before it stores an object.

The webhook judges by the objects in memory, so an answer takes milliseconds. Every replica of the operator answers,
leader or not. The cluster's webhook configuration must name:

- the paths of `PATHS` (kopf admits every request on a different path);
- operations CREATE and UPDATE of the objects themselves, neither status nor scale;
- no side effects.
"""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, cast

import kopf

from weft.api.meta import GROUP, VERSION
from weft.process import split_address
from weft_operator.core.resources import Object
from weft_operator.core.state import DesiredState
from weft_operator.core.validation import validate

PATHS = {"loraadapters": "/loraadapter", "servingpools": "/servingpool"}
UNPROCESSABLE = 422


class AdmissionServer(kopf.WebhookServer):
    """kopf's server, with an event for when it listens: kopf starts it only once it has looked up the resources."""

    def __init__(self, address: str, tls_dir: Path) -> None:
        host, port = split_address(address)
        super().__init__(addr=host, port=port, certfile=tls_dir / "tls.crt", pkeyfile=tls_dir / "tls.key")
        self.listens = asyncio.Event()

    async def __call__(self, fn: kopf.WebhookFn) -> AsyncIterator[kopf.WebhookClientConfig]:
        """Yield a configuration each time the server has begun to listen; kopf iterates over them."""
        async for config in super().__call__(fn):
            self.listens.set()
            yield config


def register(registry: kopf.OperatorRegistry, desired: DesiredState) -> None:
    """Add the handlers. `desired` is complete before the server listens, and stays complete."""

    async def judged(*, body: kopf.Body, old: kopf.Body | None, warnings: list[str], **_: Any) -> None:
        review(_raw(body), None if old is None else _raw(old), desired, warnings)

    for plural, path in PATHS.items():
        on_request = kopf.on.validate(
            GROUP,
            VERSION,
            plural,
            id=path.removeprefix("/"),
            operations=["CREATE", "UPDATE"],
            side_effects=False,
            registry=registry,
        )
        on_request(judged)


def review(proposed: Object, previous: Object | None, desired: DesiredState, warnings: list[str]) -> None:
    """Judge a proposed object. Warnings go to `warnings`.

    Raises kopf.AdmissionError with every objection.
    """
    verdict = validate(proposed, previous, desired)
    warnings += verdict.warnings
    if verdict.objections:
        raise kopf.AdmissionError("; ".join(str(objection) for objection in verdict.objections), UNPROCESSABLE)


def _raw(body: kopf.Body) -> Object:
    return cast("Object", dict(body))
