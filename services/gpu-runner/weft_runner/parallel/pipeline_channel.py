"""The stages of a pipeline in a row: hidden rows pass from each to the next, logits from the last one to stage 0.

Only tensors pass here. Their command was sent before, over the sockets (ORCA, section 4.1: the control plane does not
wait for the data plane), so that a stage can begin to receive while it computes what comes earlier.
"""

from collections import deque
from typing import Protocol

from weft.domain.model.spec import ModelSpec
from weft_runner.model.executor import Rows


class PendingTensor(Protocol):
    """A tensor on its way."""

    def wait(self) -> Rows:
        """Return it once it is there. Raises RuntimeError: the other stage is gone, or too late to send or take it."""
        ...


class Peers(Protocol):
    """The stages, by rank. `send` and `receive` return at once; several tensors between two stages arrive in order."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    @property
    def tensor_rank(self) -> int:
        """The number of this place in its stage, and in all the others."""
        ...

    @property
    def sent_bytes(self) -> int: ...

    def send(self, x: Rows, receiver: int) -> PendingTensor: ...

    def receive(self, shape: tuple[int, ...], source: int) -> PendingTensor: ...


class PipelineChannel:
    """One stage's place in it."""

    def __init__(self, peers: Peers, model: ModelSpec, n_kept: int | None = None) -> None:
        """`n_kept`: results that may be unreceived after `send_next`; None: one for each stage."""
        self._peers, self._model, self._n_kept = peers, model, peers.size if n_kept is None else n_kept
        self._sending: deque[PendingTensor] = deque()  # the oldest first; kept until the other has it

    @property
    def stages(self) -> int:
        return self._peers.size

    @property
    def begins(self) -> bool:
        """Say whether no stage is before this one."""
        return self._peers.rank == 0

    @property
    def sent_bytes(self) -> int:
        """The number of bytes sent by this stage."""
        return self._peers.sent_bytes

    def hidden(self, tokens: int) -> PendingTensor:
        """Begin to receive a step's hidden rows [T, H] from the stage before. In the order of the steps."""
        return self._peers.receive((tokens, self._model.hidden_size), self._peers.rank - 1)

    def logits(self, rows: int, width: int) -> PendingTensor:
        """Begin to receive a step's logits, of the width `pooling.row_width`, on stage 0.

        Steps without a row that samples have none.
        """
        assert rows, "steps without sampled rows have no logits"
        return self._peers.receive((rows, width), self._peers.size - 1)

    def send_next(self, x: Rows) -> None:
        """Send this stage's result of a step to the next stage. Waits only while more than `kept` are unreceived.

        One of the last stage's tensor ranks has the logits. Raises RuntimeError as `PendingTensor.wait` does.
        """
        ends = self._peers.rank == self._peers.size - 1
        if len(x) and not (ends and self._peers.tensor_rank):
            self._sending.append(self._peers.send(x, (self._peers.rank + 1) % self._peers.size))
        while len(self._sending) > self._n_kept:
            self._sending.popleft().wait()

    def close(self) -> None:
        """Drop tensors that no stage has received: they hold on to the connections."""
        self._sending.clear()
