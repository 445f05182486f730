"""kubectl as a child: it knows contexts, credential plugins and proxies, and ends with the command that started it.

`kubectl proxy` gives the Kubernetes API on a unix socket in a folder that only this user may enter, `kubectl
port-forward` a pod's or a Service's port on 127.0.0.1.
"""

import contextlib
import queue
import re
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from weft_cli.errors import CommandError

START_S = 60.0  # credential plugins may ask a server first
END_S = 5.0
INSTALL_HINT = "commands on a cluster need kubectl on the PATH: https://kubernetes.io/docs/tasks/tools/"


class Kubectl:
    """kubectl for one context. Every method raises CommandError with kubectl's message."""

    def __init__(self, context: str | None, kubeconfig: Path | None) -> None:
        path = shutil.which("kubectl")
        if path is None:
            raise CommandError("kubectl is not installed", INSTALL_HINT)
        flags = ([f"--context={context}"] if context else []) + ([f"--kubeconfig={kubeconfig}"] if kubeconfig else [])
        self._command = [*_tied(), path, *flags]

    def run(self, *arguments: str) -> str:
        """Run a command and return its output."""
        done = subprocess.run([*self._command, *arguments], capture_output=True, text=True, check=False)  # noqa: S603
        if done.returncode:
            raise CommandError(_reason(done.stderr) or f"kubectl {arguments[0]}: exit code {done.returncode}")
        return done.stdout

    def show(self, *arguments: str) -> int:
        """Run a command with its output shown here. Return its exit code."""
        return subprocess.run([*self._command, *arguments], check=False).returncode  # noqa: S603

    @contextmanager
    def proxy(self) -> Generator[Path]:
        """Open the Kubernetes API on a unix socket."""
        with tempfile.TemporaryDirectory(prefix="weft-") as folder:
            socket = Path(folder) / "api.sock"
            with self._started(["proxy", f"--unix-socket={socket}"], "Starting to serve on"):
                yield socket

    @contextmanager
    def forward(self, namespace: str, target: str, port: str | int) -> Generator[str]:
        """Forward a port of `pod/NAME` or `svc/NAME` to `HOST:PORT` of this machine."""
        arguments = ["port-forward", f"--namespace={namespace}", "--address=127.0.0.1", target, f":{port}"]
        with self._started(arguments, r"Forwarding from (127\.0\.0\.1:\d+)") as match:
            yield match[1]

    @contextmanager
    def _started(self, arguments: Sequence[str], ready: str) -> Generator[re.Match[str]]:
        """Start a child, and wait for a matching line. The child ends with the caller's block.

        It has a process group of its own: Ctrl-C is for this command, which may go on after it.
        """
        with tempfile.TemporaryFile("w+") as errors:
            command, output = [*self._command, *arguments], subprocess.PIPE
            child = subprocess.Popen(  # noqa: S603
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=errors, text=True, process_group=0
            )
            try:
                assert child.stdout is not None
                yield self._first_match(child.stdout, errors, ready, arguments[0])
            finally:
                _end(child)

    def _first_match(self, stdout: IO[str], errors: IO[str], ready: str, subject: str) -> re.Match[str]:
        lines = queue.SimpleQueue[str]()
        threading.Thread(target=_read, args=(stdout, lines), daemon=True).start()
        try:
            first = lines.get(timeout=START_S)
        except queue.Empty:
            raise CommandError(f"kubectl {subject} has not started within {START_S:g} s") from None
        if match := re.search(ready, first):
            return match
        errors.seek(0)
        raise CommandError(f"kubectl {subject}: {_reason(errors.read()) or first.strip() or 'it ended'}")


def _read(stdout: IO[str], lines: "queue.SimpleQueue[str]") -> None:
    """Hand the first line to the waiting caller, "" at the end. Drop later lines, so that the pipe never fills."""
    with contextlib.suppress(ValueError):  # closed behind the child
        lines.put(stdout.readline())
        for _ in stdout:
            pass


def _end(child: "subprocess.Popen[str]") -> None:
    child.terminate()
    try:
        child.wait(END_S)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()


def _tied() -> list[str]:
    """Make a command line whose process ends with this process, even after a kill, on Linux."""
    setpriv = shutil.which("setpriv")
    return [setpriv, "--pdeathsig", "KILL", "--"] if setpriv else []


def _reason(stderr: str) -> str:
    """Find the last thing that kubectl says; lines before it are retries in the log."""
    lines = [line for line in stderr.strip().splitlines() if line]
    return lines[-1].removeprefix("error: ") if lines else ""
