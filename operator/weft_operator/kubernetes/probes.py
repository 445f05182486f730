"""Probes of the operator: alive as long as its loop turns and its watches report; ready once it can be asked."""

from collections.abc import Callable

from weft.telemetry.probes import Probes, Ready

Trouble = Callable[[], str | None]


class OperatorProbes(Probes):
    """`trouble` says why the process should be started anew; None: it should not."""

    def __init__(self, listen: str, ready: Ready, trouble: Trouble) -> None:
        super().__init__(listen, ready)
        self._trouble = trouble

    def answer(self, path: str) -> tuple[int, str, bytes]:
        """As `Probes` answers; liveness also asks for trouble."""
        trouble = self._trouble() if path == "/healthz" else None
        if trouble is not None:
            return 503, "text/plain; charset=utf-8", trouble.encode() + b"\n"
        return super().answer(path)
