"""Identity of a runner: a UUID that lives with its data directory, an incarnation that is new at each start.

The uuid begins with the namespace of its pool: supervisors accept it from certificates of that namespace.
"""

import logging
import uuid
from pathlib import Path

from weft.domain.ids import RunnerId
from weft.files import write_atomically
from weft.telemetry.logs import kv

log = logging.getLogger(__name__)


def read_identity(data_dir: Path, pool: str) -> RunnerId:
    """The data directory's UUID, drawn and written whole at the first start. A damaged one is drawn again."""
    path = data_dir / "uuid"
    drawn: uuid.UUID | None = None
    if path.exists():
        try:
            drawn = uuid.UUID(path.read_text().strip())
        except ValueError as error:  # also what is no text
            log.error("damaged uuid thrown away: this is another runner now", extra=kv(path=path, error=error))
    if drawn is None:
        drawn = uuid.uuid4()
        write_atomically(path, f"{drawn}\n".encode())
    return RunnerId(f"{pool.partition('/')[0]}.{drawn}", uuid.uuid4().hex)
