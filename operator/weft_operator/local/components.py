"""The components of a stack: their addresses and command lines."""

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from weft_operator.local.processes import Program
from weft_operator.local.sockets import LOOPBACK

SOCKET = "weft.sock"  # of the controller, in the data directory
Ports = Callable[[int], list[int]]
RUNNER = ("weft_runner",)


@dataclass(frozen=True, slots=True)
class Options:
    """The options of `weft up`."""

    data_dir: Path
    port: int = 8080
    auth: bool = False
    file_root: Path | None = None
    executor: str | None = None
    log_level: str = "INFO"
    host: str = LOOPBACK
    allowed_hosts: tuple[str, ...] = ()  # of the gateway
    cors_origins: tuple[str, ...] = ()  # web origins allowed to call the gateway
    prefix_sharing: bool = True  # among callers without a key
    adapter_roots: tuple[Path, ...] = ()  # folders from which clients may load adapters; none: `file_root`
    runner: tuple[str, ...] = RUNNER  # the module of runners, and the arguments ahead of their flags


@dataclass(frozen=True, slots=True)
class Addresses:
    """The addresses of the components, host:port. They stay the same for the life of the stack."""

    depot: str
    predictor: str
    predictor_probes: str
    supervisor: str
    supervisor_probes: str
    scheduler: str
    scheduler_probes: str
    batch: str
    batch_probes: str
    gateway: str

    @property
    def depot_url(self) -> str:
        return f"http://{self.depot}"

    @property
    def gateway_url(self) -> str:
        return f"http://{self.gateway}"


def component_programs(options: Options, addresses: Addresses) -> list[Program]:
    """Make the command lines of all components except the runners.

    The depot comes first, because it starts slowest.
    """
    at, data = addresses, options.data_dir

    def python(name: str, probes: str, *flags: str) -> Program:
        host, _, port = probes.rpartition(":")
        common = ("--data-dir", str(data / name), "--log-level", options.log_level)
        return Program(name, (sys.executable, "-m", f"weft_{name}", *flags, *common), probe=(host, int(port)))

    root = ("--file-root", str(options.file_root)) if options.file_root else ()
    roots = options.adapter_roots or ((options.file_root,) if options.file_root else ())
    loading = ("--objects", str(data / SOCKET), "--adapter-roots", json.dumps(list(map(str, roots))))
    hosts = ("--allowed-hosts", ",".join(options.allowed_hosts)) if options.allowed_hosts else ()
    origins = ("--cors-origins", json.dumps(options.cors_origins)) if options.cors_origins else ()
    sharing = () if options.prefix_sharing else ("--no-prefix-sharing",)
    peers = ("--scheduler", at.scheduler, "--predictor", at.predictor)
    return [
        python("depot", at.depot, "--http", at.depot, *root),
        python("scheduler", at.scheduler_probes, "--listen", at.scheduler, "--probes", at.scheduler_probes),
        python("supervisor", at.supervisor_probes, "--listen", at.supervisor, "--probes", at.supervisor_probes, *peers),
        python(
            "gateway",
            at.gateway,
            *("--http", at.gateway, "--depot", at.depot_url, "--batch", at.batch, *loading, *peers),
            *("--auth" if options.auth else "--no-auth", *hosts, *origins, *sharing),
        ),
        python("predictor", at.predictor_probes, "--listen", at.predictor, "--probes", at.predictor_probes),
        python("batch", at.batch_probes, "--listen", at.batch, "--probes", at.batch_probes),
    ]


def choose_addresses(options: Options, ports: Ports) -> Addresses:
    """Choose free ports for all components except the gateway: the user chooses the gateway's port."""
    chosen = [f"{LOOPBACK}:{port}" for port in ports(9)]
    return Addresses(*chosen, gateway=f"{options.host}:{options.port}")
