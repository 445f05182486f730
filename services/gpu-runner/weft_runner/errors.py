"""What can go wrong, split by what the caller can do.

RunnerError
|-- ArtifactError            what was published is wrong: correct it, retrying does not help
|   |-- ModelUnsupported     config.json asks for something this executor does not compute
|   |-- WeightsInvalid       a tensor of the base is missing or has the wrong shape
|   |-- AdapterInvalid       an adapter that does not fit the base, the pool's rank or this executor
|   `-- ArtifactUnknown      the depot does not have that digest
|-- ArtifactUnreachable      the depot does not answer: retry later
`-- StoppedAtStart           told to stop before it served: nothing is wrong
"""


class RunnerError(Exception):
    """Any named error of the runner."""


class ArtifactError(RunnerError):
    """What was published is wrong."""


class ModelUnsupported(ArtifactError):
    """The base's config.json asks for something this executor does not compute."""


class WeightsInvalid(ArtifactError):
    """A tensor of the base is missing or has the wrong shape."""


class AdapterInvalid(ArtifactError):
    """An adapter that does not fit the base, the pool's rank or this executor."""


class ArtifactUnknown(ArtifactError):
    """The depot does not have that digest."""


class ArtifactUnreachable(RunnerError):
    """The depot does not answer, or not in time."""


class StoppedAtStart(RunnerError):
    """Told to stop before it served."""
