"""`python -m weft_depot`: assembly of the parts, sockets, signals.

Exit codes: 0 after SIGTERM, 1 when housekeeping has ended by a bug or another depot acts, 2 when it cannot start (wrong
settings, port in use, data directory in use, no API server for its Lease).
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import uvicorn
import uvloop

from weft.artifacts.blobs import BlobStore
from weft.hosts import AllowedHosts, HostCheck
from weft.leadership.election import new_identity
from weft.leadership.standby import Turn, turn_of
from weft.process import EXIT_CANNOT_START, CannotStart, listen, lock_data_dir
from weft.telemetry import logs
from weft.telemetry.logs import kv
from weft.telemetry.probes import Probes
from weft.wire.quiet_server import QuietServer
from weft.wire.serving import stop_on_signals
from weft.wire.tls import load_tls
from weft_depot import metrics
from weft_depot.artifact_layout import ArtifactLimits
from weft_depot.config_maps import ConfigMaps, NoConfigMaps
from weft_depot.credentials import NoSecrets, Secrets
from weft_depot.credentials.folder import FolderSecrets
from weft_depot.resolution_cache import ResolutionCache
from weft_depot.resolve import Resolver
from weft_depot.role_auth import TlsPeerHttp
from weft_depot.server import build_app, refuse_host
from weft_depot.service import Depot
from weft_depot.settings import DepotSettings
from weft_depot.sources.file import FileSource
from weft_depot.sources.pvc import PvcSource
from weft_depot.sources.retry_policy import RetryPolicy
from weft_depot.sources.source import ArtifactSource
from weft_depot.sources.uploaded import UploadedSource
from weft_depot.uploads import SCHEME

log = logging.getLogger("weft_depot")
DRAIN_S = 3
RECHECK_S = 30.0  # a resolved remote source is not contacted again for so long: an apply of many adapters asks once
TALKATIVE = (
    "botocore",
    "kubernetes",
    "urllib3",
    "httpcore2",
    "huggingface_hub",
)  # they log headers, answers and signatures at DEBUG


def main(argv: list[str] | None = None) -> int:
    """Run until SIGTERM. Return the exit code."""
    settings = DepotSettings.parse(argv)
    logs.configure("depot", level=settings.log_level, fmt=settings.log_format)
    for name in TALKATIVE:
        logging.getLogger(name).setLevel(max(logging.INFO, logging.getLogger().level))
    try:
        # Depots of a Lease share the directory, and the Lease decides which depot acts.
        with contextlib.nullcontext() if settings.lease else lock_data_dir(settings.data_dir, "depot"):
            return uvloop.run(_run(settings))
    except CannotStart as error:
        log.error("cannot start", extra=kv(error=type(error).__name__, detail=error))
        return EXIT_CANNOT_START


def build(settings: DepotSettings, require_turn: Callable[[], None] = lambda: None) -> Depot:
    """Return a depot with its sources. Half-written blobs of a killed depot are removed.

    `require_turn()` raises LeadershipLost if another depot may act.
    """
    store = BlobStore(settings.data_dir / "blobs")
    removed = store.clean()
    if removed:
        log.info("half-written blobs removed", extra=kv(count=removed))
    policy = RetryPolicy()
    resolutions = ResolutionCache(settings.data_dir / "resolved", RECHECK_S)
    resolver = Resolver(
        build_sources(settings, policy) | {SCHEME: UploadedSource(store, resolutions)},
        store,
        resolutions,
        ArtifactLimits(),
        _secrets(settings.secrets),
        _config_maps(settings.config_maps),
    )
    return Depot(resolver, stopping=policy.stopping, require_turn=require_turn)


def build_sources(settings: DepotSettings, policy: RetryPolicy) -> dict[str, ArtifactSource]:
    """Return the allowed sources with their requirements met. A library is only loaded for an enabled scheme.

    Raises CannotStart.
    """
    sources: dict[str, ArtifactSource] = {}
    if "file" in settings.schemes and settings.file_root is not None:
        sources["file"] = FileSource(settings.file_root)
    if "pvc" in settings.schemes and settings.pvc_root is not None:
        sources["pvc"] = PvcSource(settings.pvc_root)
    if "hf" in settings.schemes:
        from weft_depot.sources.hf import HfSource
        from weft_depot.sources.hub import Hub

        sources["hf"] = HfSource(Hub(settings.hf_endpoint, policy), policy)
    if "s3" in settings.schemes:
        from weft_depot.sources.s3 import S3Source
        from weft_depot.sources.s3_client import Endpoints

        sources["s3"] = S3Source(Endpoints(settings.s3_endpoints, settings.s3_region), policy)
    if "oci" in settings.schemes:
        from weft_depot.sources.oci import OciSource

        sources["oci"] = OciSource(settings.oci_registries, policy)
    if "https" in settings.schemes and settings.https_hosts:
        from weft_depot.sources.https import HttpsSource

        sources["https"] = HttpsSource(settings.https_hosts, policy)
    return sources


def _secrets(kind: str) -> Secrets:
    """Return the source of Secrets. Raises CannotStart."""
    if kind == "none":
        return NoSecrets()
    if kind != "kubernetes":
        return FolderSecrets(Path(kind))
    with _library_for("--secrets"):
        from weft_depot.credentials.kubernetes import KubernetesSecrets, in_cluster
    return KubernetesSecrets(in_cluster("--secrets"))


def _config_maps(kind: str) -> ConfigMaps:
    """Return the source of ConfigMaps. Raises CannotStart."""
    if kind == "none":
        return NoConfigMaps()
    with _library_for("--config-maps"):
        from weft_depot.credentials.kubernetes import KubernetesConfigMaps, in_cluster
    return KubernetesConfigMaps(in_cluster("--config-maps"))


@contextlib.contextmanager
def _library_for(flag: str) -> Generator[None]:
    """Import a library in the block. Raises CannotStart if the import fails."""
    try:
        yield
    except ImportError as error:
        raise CannotStart(f"{flag} kubernetes: {error}: pip install 'weft[kubernetes]'") from error


async def _run(settings: DepotSettings) -> int:
    """Stand by if a Lease is set, then serve until a signal or until the Lease is lost. Return the exit code. Raises
    CannotStart."""
    stop, serving = stop_on_signals(), asyncio.Event()

    def not_ready() -> str | None:
        if stop.is_set():
            return "stopping"
        return None if settings.lease or serving.is_set() else "starting"

    probes = Probes(settings.probes, not_ready) if settings.probes else None
    with contextlib.closing(probes) if probes else contextlib.nullcontext():
        if probes:
            probes.start()
        async with turn_of(settings, new_identity, stop, probes, metrics.LEADER) as turn:
            if turn is None:
                return 0
            failed = await _act(settings, stop, probes, turn, serving)
            return 1 if failed or turn.lost else 0


async def _act(
    settings: DepotSettings, stop: asyncio.Event, probes: Probes | None, turn: Turn, serving: asyncio.Event
) -> bool:
    """Serve until `stop`. Return True if housekeeping has ended by a bug. Raises CannotStart."""
    failed, secured = asyncio.Event(), dict[str, Any]()

    def fail() -> None:
        failed.set()
        stop.set()

    with listen(settings.http, "--http") as listener:
        host, port = listener.getsockname()[:2]
        tls = load_tls(settings.tls_dir, "depot")
        if tls:
            secured = {"ssl_context_factory": lambda *_: tls.server_context(), "http": TlsPeerHttp}  # pyright: ignore[reportUnknownLambdaType]
        app: Any = build_app(build(settings, turn.require), probes, on_failure=fail)
        if not tls:
            app = HostCheck(app, AllowedHosts(settings.allowed_hosts), refuse_host)
        config = uvicorn.Config(
            app, log_config=None, access_log=False, timeout_graceful_shutdown=DRAIN_S, lifespan="on",
            date_header=False,  # writing it would wake an idle server each second
            **secured,
        )  # fmt: skip
        server = QuietServer(config)
        http, stopping = asyncio.create_task(server.serve([listener])), asyncio.create_task(stop.wait())
        log.info("serving", extra=kv(listen=f"{host}:{port}", data_dir=settings.data_dir, tls=tls is not None))
        serving.set()
        await asyncio.wait((http, stopping), return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        server.should_exit = True
        await http
        log.info("stopped")
    return failed.is_set()
