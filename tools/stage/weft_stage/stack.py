"""A stack of our own to measure or to test: `weft up` as a process, in a data directory of its own, on a free port."""

import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from random import SystemRandom
from types import TracebackType
from typing import Any, Self

from weft_cli.client import ControllerClient
from weft_cli.errors import CommandError
from weft_operator.local.sockets import PortSource
from weft_stage.errors import StackFailed
from weft_stage.scrape import scrape, total

POLL_S = 0.02
UP = ("weft_cli", "up")
CONTROLLER = "controller"  # the process of `weft up` itself
WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
PATIENCE_S = 180.0  # for a stack that starts, stops or answers a command on a slow and busy machine


def quickstart() -> Path:
    """Return the manifests of the quickstart in this checkout."""
    return Path(__file__).parents[3] / "examples" / "quickstart"


def copy_adapter(original: Path, copy: Path, mark: str) -> None:
    """Write an adapter with the weights of another one and a digest of its own, which follows from the mark."""
    copy.mkdir(parents=True)
    os.link(original / WEIGHTS, copy / WEIGHTS)
    config = json.loads((original / CONFIG).read_text())
    (copy / CONFIG).write_text(json.dumps({**config, "revision": mark}))


class Stack:
    """`weft up -f MANIFESTS` from enter to exit. `environment` reaches every component (as `WEFT_GATEWAY__...`).

    `up`: the module that takes these flags, and what comes before them.
    """

    def __init__(
        self,
        manifests: Path,
        data_dir: Path,
        *arguments: str,
        environment: Mapping[str, str] | None = None,
        up: Sequence[str] = UP,
    ) -> None:
        self.data_dir = data_dir
        self.key = ""  # of a stack that asks for one
        self.ports = PortSource(SystemRandom())
        (self.port,) = self.ports(1)
        self._command = [sys.executable, "-m", *up, "-f", str(manifests), "--port", str(self.port)]
        self._command += ["--data-dir", str(data_dir), *arguments]
        self._environment = {**os.environ, **(environment or {}), "NO_COLOR": "1"}
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def controller(self) -> ControllerClient:
        """What `weft get` asks, without a process for each question."""
        return ControllerClient(self.data_dir)

    def __enter__(self) -> Self:
        self.data_dir.mkdir(parents=True, exist_ok=True)
        with (self.data_dir / "up.log").open("wb") as log:
            self._process = subprocess.Popen(self._command, stdout=log, stderr=log, env=self._environment)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def stop(self, timeout_s: float = PATIENCE_S) -> int:
        """Press Ctrl-C and wait for the end; killed when it does not end in time. Returns the exit code."""
        assert self._process is not None
        self._process.send_signal(signal.SIGINT)
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            raise StackFailed(f"`weft up` did not stop within {timeout_s:.0f} s:\n{self.log()}") from None

    # ------------------------------------------------------------------------------------------- what it says

    def log(self) -> str:
        return (self.data_dir / "up.log").read_text(errors="replace")

    def components(self) -> dict[str, dict[str, Any]]:
        """Return the components of `stack.json` by name; empty until it is written."""
        try:
            return json.loads((self.data_dir / "stack.json").read_text())["components"]
        except FileNotFoundError:
            return {}

    def names(self, prefix: str) -> list[str]:
        """Return the components whose name begins with `prefix`: `runner` gives all runners."""
        return sorted(name for name in self.components() if name.startswith(prefix))

    def pid(self, name: str) -> int:
        if name == CONTROLLER:
            assert self._process is not None
            return self._process.pid
        pid = self.components()[name]["pid"]
        if pid is None:
            raise StackFailed(f"{name} does not run now")
        return pid

    def address(self, key: str) -> str:
        """Return an address of `stack.json`: gateway, supervisor, scheduler, predictor, depot."""
        return json.loads((self.data_dir / "stack.json").read_text())[key]

    def metric(self, prefix: str, sample: str, **labels: str) -> float:
        """Sum a metric's samples over the components of that prefix."""
        return sum(total(scrape(self.components()[name]["probes"]), sample, **labels) for name in self.names(prefix))

    def cli(
        self, *arguments: str, check: bool = True, stdin: str | None = None, timeout_s: float = PATIENCE_S
    ) -> subprocess.CompletedProcess[str]:
        """Run the `weft` command against this stack."""
        command = [sys.executable, "-m", "weft_cli", *arguments, "--data-dir", str(self.data_dir)]
        done = subprocess.run(
            command, capture_output=True, text=True, env=self._environment, input=stdin, timeout=timeout_s, check=False
        )
        if check and done.returncode:
            raise StackFailed(f"weft {' '.join(arguments)}: exit {done.returncode}\n{done.stdout}\n{done.stderr}")
        return done

    def create_key(self, namespace: str, timeout_s: float = PATIENCE_S) -> str:
        """Make a new API key, once the supervisor is there to make it."""
        deadline = time.monotonic() + timeout_s
        while (done := self.cli("key", "create", "-n", namespace, check=False)).returncode:
            self.require_alive()
            if time.monotonic() > deadline:
                raise StackFailed(f"no key after {timeout_s:.0f} s: {done.stderr}\n{self.log()}")
            time.sleep(POLL_S)
        return next(word for word in done.stdout.split() if word.startswith("weft-"))

    # ------------------------------------------------------------------------------------------- waiting

    def wait_for_models(self, count: int | None = None, timeout_s: float = PATIENCE_S) -> list[str]:
        """Wait until every adapter is served and every pool has its replicas. Returns the models' names.

        `count`: that number of models, any of them and by any ready runner, are enough.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            models = self._served()
            if models and (len(models) >= count if count else self._all_served(models)):
                return models
            self.require_alive()
            if time.monotonic() > deadline:
                raise StackFailed(f"after {timeout_s:.0f} s only {models} are served:\n{self.log()}")
            time.sleep(POLL_S)

    def require_alive(self) -> None:
        assert self._process is not None
        if (code := self._process.poll()) is not None:
            raise StackFailed(f"`weft up` ended with {code}:\n{self.log()}")

    def _served(self) -> list[str]:
        """What `/v1/models` lists, once a runner is ready."""
        try:
            status = _json(f"{self.url}/status", self.key)
            if not any(pool["ready_runners"] for pool in status["pools"]):
                return []
            return sorted(model["id"] for model in _json(f"{self.url}/v1/models", self.key)["data"])
        except (urllib.error.URLError, ConnectionError):
            return []

    def _all_served(self, models: Sequence[str]) -> bool:
        """Return whether every pool has its replicas, every adapter is ready, and the gateway has the adapter's name.

        With a key the gateway lists only the models of one namespace.
        """
        try:
            adapters, pools = self.controller.list("loraadapters")[0], self.controller.list("servingpools")[0]
        except CommandError:  # it starts
            return False
        if any(pool.get("status", {}).get("readyReplicas", 0) < pool["spec"].get("replicas", 0) for pool in pools):
            return False
        return all(is_ready(one) and (self.key or one["status"]["modelName"] in models) for one in adapters)


def is_ready(obj: Mapping[str, Any]) -> bool:
    """Return whether the Ready condition of an object is True."""
    conditions: Sequence[Mapping[str, Any]] = obj.get("status", {}).get("conditions", [])
    return any(c["type"] == "Ready" and c["status"] == "True" for c in conditions)


def _json(url: str, key: str) -> Any:
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {key}"} if key else {})
    with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
        return json.load(answer)
