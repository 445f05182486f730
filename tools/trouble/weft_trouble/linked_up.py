"""`python -m weft_trouble.linked_up -- FLAGS`: `weft up` whose processes reach their peers through links.

`WEFT_BENCH_LINKS` in the environment has, by the source of a link, the address of the proxy through which it dials its
gRPC peers; at the port of the depot on the source's own loopback address (`depot_of`) the links lead to the depot.
Sources are components by the beginning of their names, and the controller, which is this process (its proxy is that of
its environment). `WEFT_BENCH_HOST`: a folder by which components' disks and clocks can be struck (`fault_host.py`).
"""

import functools
import json
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from weft_operator.local import backend, stack
from weft_operator.local.processes import ChildProcess, Program
from weft_operator.local.stack import DepotClient
from weft_stage.runner_up import main
from weft_trouble import fault_host

VARIABLE, HOST_VARIABLE = "WEFT_BENCH_LINKS", "WEFT_BENCH_HOST"
UP = ("weft_trouble.linked_up", "weft_runner")
CONTROLLER, RUNNER, SUPERVISOR = "controller", "runner", "supervisor"
SOURCES = (CONTROLLER, RUNNER, SUPERVISOR)


def depot_of(source: str, depot: str) -> str:
    """Return where a source finds the depot, HOST:PORT, of which others know the address `depot`."""
    return f"127.0.0.{10 + SOURCES.index(source)}:{depot.rpartition(':')[2]}"


def linked(program: Program, proxies: dict[str, str]) -> Program:
    """Return the program so that it dials through its own links."""
    source = next((source for source in proxies if program.name.startswith(source)), "")
    argv = list(program.argv)
    if source and "--depot" in argv:
        at = argv.index("--depot") + 1
        argv[at] = f"http://{depot_of(source, argv[at])}"
    proxy = {"grpc_proxy": f"http://{proxies[source]}" if source else ""}
    host = os.environ.get(HOST_VARIABLE)
    shim = fault_host.environment(Path(host), program.name) if host else {}
    return replace(program, argv=tuple(argv), env={**program.env, **proxy, **shim})


def _through_links(
    proxies: dict[str, str], make: Callable[..., ChildProcess], program: Program, *rest: Any
) -> ChildProcess:
    return make(linked(program, proxies), *rest)


if __name__ == "__main__":
    given: dict[str, str] = json.loads(os.environ[VARIABLE])
    process = functools.partial(_through_links, given, ChildProcess)
    stack.ChildProcess = process  # pyright: ignore[reportAttributeAccessIssue]
    backend.ChildProcess = process  # pyright: ignore[reportAttributeAccessIssue]
    stack.DepotClient = lambda url: DepotClient(f"http://{depot_of(CONTROLLER, url)}")  # pyright: ignore
    sys.exit(main(sys.argv[1:]))
