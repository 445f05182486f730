"""The stack that commands talk to, on this machine or in a cluster (`cluster.py`). Commands know nothing more of it."""

from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Protocol, Self

from weft_cli.client import ControllerClient, ObjectApi

if TYPE_CHECKING:
    from weft_cli.runners import SupervisorClient


class StackClient(Protocol):
    """A stack of either kind. Nothing is asked before a method is called. Every method raises CommandError."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    @property
    def api(self) -> ObjectApi:
        """Pools and adapters."""
        ...

    def namespace(self, name: str | None) -> str:
        """Return the namespace of objects without a namespace on the command line."""
        ...

    def supervisor(self, address: str | None, tls_dir: Path | None) -> "SupervisorClient":
        """Return the supervisor at this address, or else the stack's supervisor."""
        ...

    def gateway_url(self) -> str:
        """The stack's gateway."""
        ...

    def show_status(self) -> None:
        """Show every component. Raises CommandError if a component is not ready."""
        ...

    def show_logs(self, component: str | None, tail: int | None, *, follow: bool) -> None:
        """Show the last lines of a component (None: all that is kept); the components when none is named."""
        ...


class LocalStack:
    """The stack that `weft up` or `weft serve` runs with this data directory."""

    def __init__(self, data_dir: Path) -> None:
        self._controller = ControllerClient(data_dir)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close nothing: nothing stays open."""

    @property
    def api(self) -> ObjectApi:
        return self._controller

    def namespace(self, name: str | None) -> str:
        return name or "default"

    def supervisor(self, address: str | None, tls_dir: Path | None) -> "SupervisorClient":
        from weft_cli.runners import SupervisorClient, certificate_from

        return SupervisorClient((address or self._controller.stack()["supervisor"],), certificate_from(tls_dir))

    def gateway_url(self) -> str:
        return str(self._controller.stack()["gateway"])

    def show_status(self) -> None:
        from weft_cli.logs import status

        status(self._controller)

    def show_logs(self, component: str | None, tail: int | None, *, follow: bool) -> None:
        from weft_cli.logs import logs

        logs(self._controller, component, tail, follow=follow)
