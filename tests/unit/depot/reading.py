"""What tests of remote sources share: few and short pauses, a source's files read like the depot reads them."""

from pathlib import Path

from harness.waiting import PATIENCE_S
from weft.artifacts.errors import ArtifactError
from weft_depot.sources import ArtifactSource, Location
from weft_depot.sources.retry_policy import RetryPolicy

QUICK = {"connect_s": PATIENCE_S, "read_s": PATIENCE_S, "tries": 3, "pause_s": 0.01, "grace_s": PATIENCE_S}


def quick_policy(**changed: float) -> RetryPolicy:
    return RetryPolicy(**{**QUICK, **changed})  # type: ignore[arg-type]


def everything(_: str) -> bool:
    return True


def read_all(source: ArtifactSource, location: Location) -> dict[str, bytes]:
    """Every file of a location, whole."""
    with source.open(location, everything) as snapshot:
        found: dict[str, bytes] = {}
        for name in snapshot.sizes:
            with snapshot.open(name) as file:
                found[name] = file.read()
        assert snapshot.unchanged()
        return found


def refusal(source: ArtifactSource, location: Location) -> ArtifactError:
    """What reading a location ends with."""
    try:
        found = read_all(source, location)
    except ArtifactError as error:
        return error
    raise AssertionError(f"it was read: {sorted(found)}")


def folder_bytes(folder: Path, prefix: str = "") -> dict[str, bytes]:
    return {f"{prefix}{path.name}": path.read_bytes() for path in sorted(folder.iterdir())}
