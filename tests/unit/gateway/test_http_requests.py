"""Long lists beside other requests."""

import asyncio

from weft_gateway.openai import TURN, in_turns


async def test_a_long_list_is_whole_and_leaves_other_requests_their_turns() -> None:
    turns = 0

    async def others() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    task = asyncio.create_task(others())
    entries = [entry async for entry in in_turns(range(4 * TURN + 1))]
    task.cancel()
    assert (entries, turns) == (list(range(4 * TURN + 1)), 4)
