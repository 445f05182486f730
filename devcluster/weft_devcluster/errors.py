"""What a test cluster can say. The tree:

ClusterError
|- ToolMissing     a tool or a right of this machine is not there: the message says what to install or run
|- BuildFailed     a tool could not be built: the compiler's words
|- StartFailed     a process ended, or did not answer in time: the end of its log
`- Refused         the API server refused, or kubectl did: their words
"""


class ClusterError(RuntimeError):
    """Something of the test cluster is not as it has to be; never a fault of the code under test by itself."""


class ToolMissing(ClusterError):
    """What is needed is not on this machine. Tests that meet it say so and are skipped."""


class BuildFailed(ClusterError):
    """A compiler or an installer failed; never a reason to skip."""


class StartFailed(ClusterError):
    """A process of the cluster is not there when it should be."""


class Refused(ClusterError):
    """The API server, or kubectl, refused. `said` is what it said, `status` the server's (0: kubectl's own)."""

    def __init__(self, request: str, said: str, status: int = 0) -> None:
        super().__init__(f"{request}: {said.strip()}")
        self.said, self.status = said, status
