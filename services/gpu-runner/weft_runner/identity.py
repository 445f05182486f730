"""Who this runner is: a UUID that lives with its data directory, an incarnation that is new at each start."""

import contextlib
import fcntl
import os
import uuid
from collections.abc import Generator
from dataclasses import dataclass, field
from pathlib import Path

from weft_runner.errors import DataDirectoryBusy


@dataclass(frozen=True, slots=True)
class Identity:
    """`uuid` outlives restarts; a new `incarnation` ends all sequences of the one before."""

    uuid: str
    incarnation: str = field(default_factory=lambda: uuid.uuid4().hex)


def read_identity(data_dir: Path) -> Identity:
    """The data directory's UUID, drawn and written whole at the first start."""
    path = data_dir / "uuid"
    if not path.exists():
        temporary = data_dir / f"uuid.{os.getpid()}"
        temporary.write_text(f"{uuid.uuid4()}\n")
        temporary.replace(path)
    return Identity(str(uuid.UUID(path.read_text().strip())))


@contextlib.contextmanager
def own_directory(data_dir: Path) -> Generator[None]:
    """Hold the data directory for as long as the process lives. Raises DataDirectoryBusy."""
    data_dir.mkdir(parents=True, exist_ok=True)
    with (data_dir / "lock").open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise DataDirectoryBusy(f"{data_dir} belongs to another runner process") from error
        yield
