"""Results of the adapter pool's work for the engine, and which errors are permanent."""

from collections.abc import Callable
from dataclasses import dataclass

from weft.domain.request import EndReason
from weft_runner.core.events import Fetched, FetchFailed, Loaded, LoadFailed
from weft_runner.errors import AdapterInvalid, ArtifactUnknown, ArtifactUnusable, RunnerError
from weft_runner.model.adapter_store import DeviceAdapter


@dataclass(frozen=True, slots=True, eq=False)
class InSlot:
    """An adapter is ready to be put into its slot; then it is `loaded`."""

    loaded: Loaded
    slot: int
    adapter: DeviceAdapter


FromAdapters = InSlot | LoadFailed | Fetched | FetchFailed
Report = Callable[[FromAdapters], None]


def is_permanent(error: Exception) -> bool:
    """By its digest an artifact is what it is: one that is wrong stays wrong. One that the depot lacks may come."""
    return isinstance(error, AdapterInvalid)


def failure(error: Exception) -> tuple[EndReason, str]:
    """The reason for the waiting requests: permanent where the artifact is wrong, else they may be tried again."""
    match error:
        case ArtifactUnknown():
            return EndReason.UNKNOWN_ADAPTER, str(error)
        case ArtifactUnusable():
            return EndReason.LOAD_FAILED, str(error)
        case RunnerError():
            return EndReason.INTERNAL, str(error)
        case _:
            return EndReason.INTERNAL, f"{type(error).__name__}: {error}"
