"""The sequences of a runner that are parked, as its reports and the Assigns that they do not have yet say."""

from collections import Counter
from collections.abc import Iterable, Mapping

from weft.domain.ids import Epoch
from weft.domain.runner import Parking, SequenceState


class ParkedSequences:
    """Parked sequences, owned by the runner's accounts. `sequences`: the sequences of its last report, by id."""

    def __init__(self) -> None:
        self.ids: dict[str, None] = {}  # reported sequences that are parked, or will be with an Assign
        self._expected: Counter[str] = Counter()  # by Assigns that no report has yet
        self.changed: set[str] = set()  # sequences that were parked, or are no more, since `take_changed`

    def may_park(self, sequences: Mapping[str, SequenceState], request_id: str, epoch: Epoch) -> bool:
        """Return whether the sequence is reported under this epoch, and may still be parked."""
        sequence = sequences.get(request_id)
        runs = sequence is not None and sequence.epoch == epoch and sequence.parking is Parking.NONE
        return runs and request_id not in self.ids

    def expect(self, sequences: Mapping[str, SequenceState], request_ids: Iterable[str], step: int) -> None:
        """Count parked sequences: 1 for a new Assign, -1 after a report includes it."""
        for request_id in request_ids:
            self._expected[request_id] += step
            if not self._expected[request_id]:
                del self._expected[request_id]
            self.count(sequences, (request_id,))

    def count(self, sequences: Mapping[str, SequenceState], request_ids: Iterable[str]) -> None:
        """Count the sequences of changed reports."""
        for request_id in request_ids:
            sequence, parked = sequences.get(request_id), request_id in self.ids
            parks = sequence is not None and (sequence.parking is Parking.PARKED or request_id in self._expected)
            if parks is not parked:
                self.changed.add(request_id)
                if parks:
                    self.ids[request_id] = None
                else:
                    del self.ids[request_id]

    def take_changed(self) -> set[str]:
        """Return `changed`, and begin it anew."""
        changed, self.changed = self.changed, set()
        return changed
