"""What tests of remote sources share: few and short pauses, a source's files read like the depot reads them."""

from pathlib import Path

from harness.waiting import PATIENCE_S
from weft.artifacts.depot_api import ResolveRequest
from weft.artifacts.errors import ArtifactError
from weft_depot.credentials import Secret
from weft_depot.main import build_sources
from weft_depot.settings import DepotSettings
from weft_depot.sources import ArtifactSource, RetryPolicy

Asked = tuple[ResolveRequest, Secret | None]  # what a source is opened with, beside a filter
QUICK = {"connect_s": PATIENCE_S, "read_s": PATIENCE_S, "tries": 3, "pause_s": 0.01, "grace_s": PATIENCE_S}


def quick_policy(**changed: float) -> RetryPolicy:
    return RetryPolicy(**{**QUICK, **changed})  # type: ignore[arg-type]


def remote_source(scheme: str, *flags: str, policy: RetryPolicy | None = None) -> ArtifactSource:
    """Make the source of a scheme as a depot with these flags does."""
    settings = DepotSettings.parse([f"--schemes={scheme}", *flags])
    return build_sources(settings, policy or quick_policy())[scheme]


def everything(_: str) -> bool:
    return True


def asked(
    uri: str, secret: Secret | None = None, *, namespace: str = "team", revision: str | None = None, endpoint: str = ""
) -> Asked:
    return ResolveRequest("adapter", uri, namespace, revision, endpoint=endpoint), secret


def read_all(source: ArtifactSource, asked: Asked) -> dict[str, bytes]:
    """Every file of a source, whole."""
    with source.open(*asked, everything) as snapshot:
        found: dict[str, bytes] = {}
        for name in snapshot.sizes:
            with snapshot.open(name) as file:
                found[name] = file.read()
        assert snapshot.unchanged()
        return found


def refusal(source: ArtifactSource, asked: Asked) -> ArtifactError:
    """What reading a source ends with, without the frames, which would keep the source and its connections."""
    try:
        found = read_all(source, asked)
    except ArtifactError as error:
        one: BaseException | None = error
        while one is not None:
            one.__traceback__, one = None, one.__context__
        return error
    raise AssertionError(f"it was read: {sorted(found)}")


def folder_bytes(folder: Path, prefix: str = "") -> dict[str, bytes]:
    return {f"{prefix}{path.name}": path.read_bytes() for path in sorted(folder.iterdir())}
