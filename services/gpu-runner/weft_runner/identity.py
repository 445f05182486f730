"""Who this runner is: a UUID that lives with its data directory, an incarnation that is new at each start.

The uuid that it tells begins with the namespace of its pool: supervisors take it from certificates of that namespace.
"""

import logging
import uuid
from dataclasses import dataclass, field
from pathlib import Path

from weft.files import write_atomically
from weft.telemetry.logs import kv

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Identity:
    """`uuid` ("NAMESPACE.UUID") outlives restarts; a new `incarnation` ends all sequences of the one before."""

    uuid: str
    incarnation: str = field(default_factory=lambda: uuid.uuid4().hex)


def read_identity(data_dir: Path, pool: str) -> Identity:
    """The data directory's UUID, drawn and written whole at the first start. A damaged one is drawn anew."""
    path = data_dir / "uuid"
    if path.exists():
        try:
            return _identity(pool, uuid.UUID(path.read_text().strip()))
        except ValueError as error:  # also what is no text
            log.error("damaged uuid thrown away: this is another runner now", extra=kv(path=path, error=error))
    drawn = uuid.uuid4()
    write_atomically(path, f"{drawn}\n".encode())
    return _identity(pool, drawn)


def _identity(pool: str, drawn: uuid.UUID) -> Identity:
    return Identity(f"{pool.partition('/')[0]}.{drawn}")
