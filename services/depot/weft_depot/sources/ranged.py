"""A remote file as a readable file: ranges of growing size, each requested again after a break.

The first range is small, so that a header costs only kilobytes. The next ranges are larger, so that a complete file
takes few requests. Bytes already read are never read again. A server that stalls, drips or lies about a length ends the
read within a bounded time.
"""

import io
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from typing import BinaryIO

from weft.artifacts.errors import Unavailable
from weft_depot.sources.retry_policy import RetryPolicy, TransientError

FIRST_RANGE_BYTES, MAX_RANGE_BYTES, GROWTH = 64 << 10, 64 << 20, 8
BUFFER_BYTES = 64 << 10

# Yields the bytes [start, end) of a file in chunks, never more. Raises TransientError if a retry may help.
Fetch = Callable[[int, int], AbstractContextManager[Iterator[bytes]]]


def open_ranged(name: str, size_bytes: int, fetch: Fetch, policy: RetryPolicy) -> BinaryIO:
    """Open a file of `size_bytes`. Reads raise Unavailable and errors of `fetch`, except TransientError."""
    return io.BufferedReader(_Ranged(name, size_bytes, fetch, policy), BUFFER_BYTES)


class _Ranged(io.RawIOBase):
    """A forward reader with one request at a time. A seek drops the current request."""

    def __init__(self, name: str, size_bytes: int, fetch: Fetch, policy: RetryPolicy) -> None:
        self._name, self._size, self._fetch, self._policy = name, size_bytes, fetch, policy
        self._deadline = policy.now() + policy.patience_s(size_bytes)
        self._window_bytes = FIRST_RANGE_BYTES
        self._at = self._end = 0  # of the stream: arrived bytes, end of the request
        self._chunk = memoryview(b"")
        self._stream: Iterator[bytes] | None = None
        self._stack = ExitStack()

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at - len(self._chunk)

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        assert whence == io.SEEK_SET, "counted from the start"
        if offset != self.tell():
            self._drop_stream()
            self._chunk, self._at = memoryview(b""), offset
            self._window_bytes = MAX_RANGE_BYTES  # a caller that seeks reads on from there
        return offset

    def readinto(self, buffer: memoryview) -> int:  # pyright: ignore[reportIncompatibleMethodOverride]
        if not self._chunk and self._at < self._size:
            self._chunk = memoryview(self._pull())
        count = min(len(buffer), len(self._chunk))
        buffer[:count] = self._chunk[:count]
        self._chunk = self._chunk[count:]
        return count

    def close(self) -> None:
        self._stack.close()
        super().close()

    def _pull(self) -> bytes:
        """Read the next bytes, with at most `tries` tries."""
        failed = 0
        while True:
            self._check_patience()
            try:
                return self._chunk_or_broken()
            except TransientError as error:
                self._drop_stream()
                failed += 1
                if failed >= self._policy.tries:
                    raise Unavailable(f"{self._name} broke at {self._at} of {self._size} bytes: {error}") from error
            self._policy.pause(failed)

    def _chunk_or_broken(self) -> bytes:
        if self._stream is None:
            self._end = min(self._at + self._window_bytes, self._size)
            self._stream = self._stack.enter_context(self._fetch(self._at, self._end))
        chunk = next(self._stream, b"")
        if not chunk:
            raise TransientError(f"ended at {self._at}, {self._end} were requested")
        self._at += len(chunk)
        assert self._at <= self._end, "a fetch gives at most the requested bytes"
        if self._at == self._end:
            self._drop_stream()
            self._window_bytes = min(self._window_bytes * GROWTH, MAX_RANGE_BYTES)
        return chunk

    def _drop_stream(self) -> None:
        self._stream = None
        self._stack.close()

    def _check_patience(self) -> None:
        if self._policy.stopping.is_set():
            raise Unavailable("the depot stops")
        if self._policy.now() > self._deadline:
            raise Unavailable(
                f"{self._name} is too slow: {self._at} of {self._size} bytes in "
                f"{self._policy.patience_s(self._size):.0f} s"
            )


def trimmed(chunks: Iterator[bytes], skip: int, size_bytes: int) -> Iterator[bytes]:
    """Drop the first `skip` bytes, and yield `size_bytes` of the rest: for a server that sends a different range."""
    for chunk in chunks:
        part = chunk[skip : skip + size_bytes]
        skip = max(0, skip - len(chunk))
        size_bytes -= len(part)
        if part:
            yield part
        if not size_bytes:
            return
