"""Who this runner is: a UUID that lives with its data directory, an incarnation that is new at each start."""

import uuid
from dataclasses import dataclass, field
from pathlib import Path

from weft.files import write_atomically


@dataclass(frozen=True, slots=True)
class Identity:
    """`uuid` outlives restarts; a new `incarnation` ends all sequences of the one before."""

    uuid: str
    incarnation: str = field(default_factory=lambda: uuid.uuid4().hex)


def read_identity(data_dir: Path) -> Identity:
    """The data directory's UUID, drawn and written whole at the first start."""
    path = data_dir / "uuid"
    if not path.exists():
        write_atomically(path, f"{uuid.uuid4()}\n".encode())
    return Identity(str(uuid.UUID(path.read_text().strip())))
