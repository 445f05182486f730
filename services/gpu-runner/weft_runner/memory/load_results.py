"""Results of the adapter pool's work for the engine: an adapter is loaded, or on disk, or cannot be brought and why."""

from collections.abc import Callable
from dataclasses import dataclass

from weft_runner.core.events import EndReason
from weft_runner.errors import AdapterInvalid, ArtifactError, ArtifactUnknown, RunnerError
from weft_runner.model.adapter_store import DeviceAdapter


@dataclass(frozen=True, slots=True, eq=False)
class Loaded:
    """Ready to be put into a slot. `host_bytes`: of its host copy (None: it has none); `seconds`: what loading took."""

    digest: str
    slot: int
    adapter: DeviceAdapter
    host_bytes: int | None
    seconds: float


@dataclass(frozen=True, slots=True)
class LoadFailed:
    """`permanent`: the artifact is wrong, so that trying again does not help."""

    digest: str
    reason: EndReason
    detail: str
    permanent: bool


@dataclass(frozen=True, slots=True)
class Fetched:
    """On disk; `n_bytes`: what it takes on the device, exactly (None: the store does not live in pages).

    `host_bytes`: of its copy in host memory (None: none was asked for).
    """

    digest: str
    n_bytes: int | None
    host_bytes: int | None


@dataclass(frozen=True, slots=True)
class FetchFailed:
    """As LoadFailed."""

    digest: str
    reason: EndReason
    detail: str
    permanent: bool


@dataclass(frozen=True, slots=True)
class FoundOnDisk:
    digests: frozenset[str]


FromAdapters = Loaded | LoadFailed | Fetched | FetchFailed | FoundOnDisk
Report = Callable[[FromAdapters], None]


def is_permanent(error: Exception) -> bool:
    """By its digest an artifact is what it is: one that is wrong stays wrong. One that the depot lacks may come."""
    return isinstance(error, AdapterInvalid)


def failure(error: Exception) -> tuple[EndReason, str]:
    """The reason for the waiting requests: permanent where the artifact is wrong, else they may be tried again."""
    match error:
        case ArtifactUnknown():
            return EndReason.UNKNOWN_ADAPTER, str(error)
        case ArtifactError():
            return EndReason.LOAD_FAILED, str(error)
        case RunnerError():
            return EndReason.INTERNAL, str(error)
        case _:
            return EndReason.INTERNAL, f"{type(error).__name__}: {error}"
