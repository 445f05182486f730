"""The local controller's API over its unix socket. Standard library only: a command should start at once."""

import contextlib
import http.client
import json
import socket
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import quote, urlencode

from weft.files import connect_socket
from weft_cli.errors import BadInput, Changed, CommandError, NotRunning, NotThere

TIMEOUT_S = 30.0
BATCH_OBJECTS, BATCH_BYTES = 256, 1 << 19  # the controller takes a body of twice that
Object = dict[str, Any]


class ObjectApi(Protocol):
    """The objects of a stack: of the local controller, or of the Kubernetes API. Every method raises CommandError."""

    def apply(self, objects: Sequence[Object]) -> Iterator[str | CommandError]:
        """Apply objects; yields for each, in order: created, configured or unchanged, or why it is refused."""
        ...

    def delete(self, objects: Sequence[Object]) -> Iterator[str | CommandError]:
        """Delete objects, of which kind, namespace and name count; yields for each, in order: deleted, or why not."""
        ...

    def list(self, plural: str, namespace: str | None = None) -> tuple[list[Object], str]:
        """List objects; returns the version of the list, too, from which a watch may go on."""
        ...

    def get(self, plural: str, namespace: str, name: str) -> Object: ...

    def watch(
        self, plural: str, namespace: str | None, version: str, silence_s: float | None = None
    ) -> Iterator[Object]:
        """Yield changes after a version, without end, or until nothing has come for `silence_s`."""
        ...


class ControllerClient:
    """Talks to the controller of one data directory. Every method raises NotRunning or CommandError."""

    def __init__(self, data_dir: Path) -> None:
        self.data_dir = data_dir

    def apply(self, objects: Sequence[Object]) -> Iterator[str | CommandError]:
        """Apply objects; yields for each, in order: created, configured or unchanged, or why it is refused."""
        return self._apply_each("/v1/apply", objects)

    def delete(self, objects: Sequence[Object]) -> Iterator[str | CommandError]:
        """Delete objects, of which kind, namespace and name count; yields for each, in order: deleted, or why not."""
        return self._apply_each("/v1/delete", objects)

    def _apply_each(self, path: str, objects: Sequence[Object]) -> Iterator[str | CommandError]:
        for part in batches(objects):
            for answer in self._json("POST", path, {"kind": "List", "items": part})["items"]:
                error = answer.get("error")
                yield _refusal(error["code"], error["message"]) if error else answer["result"]

    def list(self, plural: str, namespace: str | None = None) -> tuple[list[Object], str]:
        """List objects; returns the version of the list, too, from which a watch may go on."""
        query = f"?{urlencode({'namespace': namespace}, errors='surrogateescape')}" if namespace else ""
        answer = self._json("GET", f"/v1/{plural}{query}")
        return answer["items"], answer["resourceVersion"]

    def get(self, plural: str, namespace: str, name: str) -> Object:
        return self._json("GET", quoted("/v1", plural, namespace, name))

    def stack(self) -> Object:
        """Read addresses and states of the components."""
        return self._json("GET", "/v1/stack")

    def watch(
        self, plural: str, namespace: str | None, version: str, silence_s: float | None = None
    ) -> Iterator[Object]:
        """Yield changes after a version, without end, or until nothing has come for `silence_s`."""
        path = f"/v1/watch?{urlencode({'resourceVersion': version})}"
        with self._answer("GET", path, timeout_s=silence_s) as response, contextlib.suppress(TimeoutError):
            while line := response.readline():
                event = json.loads(line)
                if event["type"] == "ERROR" or _is_in(event["object"], plural, namespace):
                    yield event

    def logs(self, component: str, tail: int | None, *, follow: bool) -> Iterator[bytes]:
        """Yield the last lines of a component's log (None: all of it), and how it grows."""
        query = urlencode({"follow": int(follow)} | ({} if tail is None else {"tail": tail}))
        with self._answer("GET", f"{quoted('/v1/logs', component)}?{query}", timeout_s=None) as response:
            while data := response.read1(65536):
                yield data

    def _json(self, method: str, path: str, body: Object | None = None) -> Any:
        with self._answer(method, path, body) as response:
            return json.loads(response.read())

    @contextmanager
    def _answer(
        self, method: str, path: str, body: Object | None = None, timeout_s: float | None = TIMEOUT_S
    ) -> Generator[http.client.HTTPResponse]:
        try:
            with request(self.data_dir / "weft.sock", method, path, body, timeout_s=timeout_s) as response:
                yield response
        except (FileNotFoundError, NotADirectoryError, ConnectionRefusedError) as error:
            raise not_running(self.data_dir) from error
        except (http.client.HTTPException, OSError) as error:
            message = str(error) or type(error).__name__
            raise CommandError(f"the controller of {self.data_dir} went away: {message}") from error


@contextmanager
def request(
    path_of_socket: Path,
    method: str,
    path: str,
    body: Object | None = None,
    content_type: str = "application/json",
    timeout_s: float | None = TIMEOUT_S,
) -> Generator[http.client.HTTPResponse]:
    """Make one request over a unix socket. Raises OSError, HTTPException, CommandError for a refusal."""
    connection = _UnixConnection(path_of_socket, timeout_s)
    try:
        content = None if body is None else json.dumps(body).encode()
        connection.request(method, path, content, {"Content-Type": content_type})
        response = connection.getresponse()
        if response.status >= http.client.BAD_REQUEST:
            raise _refused(response.status, response.read())
        yield response
    finally:
        connection.close()


def _is_in(obj: Object, plural: str, namespace: str | None) -> bool:
    return f"{obj['kind'].lower()}s" == plural and namespace in (None, obj["metadata"]["namespace"])


def not_running(data_dir: Path) -> NotRunning:
    return NotRunning(f"no weft is running in {data_dir}", "start one with `weft up`, or name another with --data-dir")


def quoted(root: str, *parts: str) -> str:
    """Quote typed text as a single part of the path."""
    return "/".join([root, *(quote(part, safe="", errors="surrogateescape") for part in parts)])


def batches(objects: Sequence[Object]) -> Iterator[Sequence[Object]]:
    """Cut objects into parts that fit into a request and into a moment: each is answered before the next is sent."""
    begin = size = 0
    for end, obj in enumerate(objects):
        bytes_ = len(json.dumps(obj)) + 2  # ", "
        if end > begin and (size + bytes_ > BATCH_BYTES or end - begin == BATCH_OBJECTS):
            yield objects[begin:end]
            begin, size = end, 0
        size += bytes_
    if objects:
        yield objects[begin:]


def _refused(status: int, body: bytes) -> CommandError:
    try:
        message = str(json.loads(body)["message"])
    except (ValueError, KeyError, TypeError):
        message = body.decode(errors="replace")[:500]
    return _refusal(status, message)


def _refusal(status: int, message: str) -> CommandError:
    if status in (http.client.BAD_REQUEST, http.client.UNPROCESSABLE_ENTITY):
        return BadInput(message)
    if status == http.client.CONFLICT:
        return Changed(message)
    return NotThere(message) if status == http.client.NOT_FOUND else CommandError(message)


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: Path, timeout_s: float | None) -> None:
        super().__init__("localhost", timeout=timeout_s)
        self._path = path

    def connect(self) -> None:
        self.sock: socket.socket = connect_socket(self._path, self.timeout)
