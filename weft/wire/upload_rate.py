"""The least rate of what comes from afar: a sender that drips holds a place, and is not waited for."""

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable

GRACE_S = 60.0  # that a sender may be behind the rate
MIN_BYTES_S = 64 << 10


class UploadTooSlow(Exception):
    """A body comes more slowly than `MIN_BYTES_S`."""

    def __init__(self, received_bytes: int) -> None:
        super().__init__(
            f"expected at least {MIN_BYTES_S >> 10} KiB a second beyond {GRACE_S:g} s, got {received_bytes} bytes "
            "and then too few; send it over a faster connection"
        )


async def at_least_rate(body: AsyncIterator[bytes], now: Callable[[], float] = time.monotonic) -> AsyncGenerator[bytes]:
    """Yield the chunks of a body. Only the time counts that is spent waiting for its sender, in seconds of `now`.

    Raises UploadTooSlow once the sender is `GRACE_S` behind `MIN_BYTES_S`, and what `body` raises.
    """
    patience_s, received_bytes = GRACE_S, 0
    while True:
        began, deadline = now(), asyncio.timeout(patience_s)
        try:
            async with deadline:
                chunk = await anext(body, None)
        except TimeoutError as error:
            if not deadline.expired():
                raise
            raise UploadTooSlow(received_bytes) from error
        if chunk is None:
            return
        received_bytes += len(chunk)
        patience_s = min(GRACE_S, patience_s - (now() - began) + len(chunk) / MIN_BYTES_S)
        if patience_s <= 0:
            raise UploadTooSlow(received_bytes)
        yield chunk
