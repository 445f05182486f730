"""What can go wrong, split by what the caller can do.

RunnerError
|-- ArtifactUnusable            what was published is wrong: correct it, retrying does not help
|   |-- ModelUnsupported     config.json asks for something this executor does not compute
|   |-- WeightsInvalid       the base's tensors are not those of its config.json, or are not finite numbers
|   |-- AdapterInvalid       an adapter that does not fit the base, the pool's rank or this executor
|   `-- ArtifactUnknown      the depot does not have that digest
|-- ExecutorUnavailable      the executor that was asked for cannot serve here: ask for another, or mend what it names
|-- ExecutorLost             a part of what computes is gone for good: this runner ends, its requests go on elsewhere
|-- OffloadError             an offload pool cannot be planned as it is asked for: change what the message names
|   |-- MachineInvalid       constants of a machine that are missing, or that no machine has
|   |-- NoPolicyFits         the budgets hold no policy: a tier is too small, by `short_bytes`
|   `-- PolicyInvalid        a policy or a plan that breaks its own laws
|-- ArtifactUnreachable      the depot does not answer: retry later
|   `-- CacheFull            the disk of this runner's cache is full: make room
|-- OutOfMemory              the machine or its container is too small: less of everything, or a larger one
|   `-- KvCacheTooSmall      the share for KV does not hold one sequence: a larger share, or a number of pages
|-- DiskUnusable             weights cannot be kept on the disk that was named: full, too small, or it fails
`-- StoppedAtStart           told to stop before it served: nothing is wrong
"""


class RunnerError(Exception):
    """Any named error of the runner."""


class ArtifactUnusable(RunnerError):
    """What was published is wrong."""


class ModelUnsupported(ArtifactUnusable):
    """The base's config.json asks for something this executor does not compute."""


class WeightsInvalid(ArtifactUnusable):
    """The base's tensors are not those of its config.json, are quantised, or are not finite numbers."""


class AdapterInvalid(ArtifactUnusable):
    """An adapter that does not fit the base, the pool's rank or this executor."""


class ArtifactUnknown(ArtifactUnusable):
    """The depot does not have that digest."""


class ExecutorUnavailable(RunnerError):
    """The executor that was asked for cannot serve this model on this machine."""


class ExecutorLost(RunnerError):
    """A part of what computes is gone, or no longer in step with the rest; trying again would compute nonsense."""


class OffloadError(RunnerError):
    """An offload pool cannot be planned as it is asked for."""


class MachineInvalid(OffloadError):
    """Constants of a machine are missing or impossible. The message names them."""


class NoPolicyFits(OffloadError):
    """The budgets hold no policy. `tier` is the one that is too small, `short_bytes` by how much."""

    def __init__(self, message: str, tier: str, short_bytes: int) -> None:
        super().__init__(message, tier, short_bytes)  # with what it is made of anew on rank 0
        self.message, self.tier, self.short_bytes = message, tier, short_bytes

    def __str__(self) -> str:
        return self.message


class PolicyInvalid(OffloadError):
    """A policy or a plan breaks its own laws. The message names the law."""


class ArtifactUnreachable(RunnerError):
    """The depot does not answer, or not in time."""


class CacheFull(ArtifactUnreachable):
    """The disk of the folder of blobs has no room for an artifact."""


class OutOfMemory(RunnerError):
    """What serving needs is more than the machine, its container or its GPU has. Told before loading, if known."""


class KvCacheTooSmall(OutOfMemory):
    """The share of the memory that is for pages does not hold one sequence of the model's context."""


class DiskUnusable(RunnerError):
    """The disk of an offloaded model is full, has no direct I/O, or fails; or its budget is too small."""


class StoppedAtStart(RunnerError):
    """Told to stop before it served."""
