"""Whole answers of a stack, to be compared."""

import json
from typing import Any

import httpx2

from harness.waiting import PATIENCE_S
from weft_stage.stack import Stack


async def choices_of(stack: Stack, body: dict[str, Any]) -> list[Any]:
    """The choices of a completion, by index."""
    headers = {"authorization": f"Bearer {stack.key}"} if stack.key else {}
    async with httpx2.AsyncClient(trust_env=False, headers=headers) as client:
        answer = await client.post(f"{stack.url}/v1/completions", json=body, timeout=PATIENCE_S)
    assert answer.status_code == 200, answer.text
    return sorted(json.loads(answer.text)["choices"], key=lambda choice: choice["index"])
