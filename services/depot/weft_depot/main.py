"""`python -m weft_depot`: parts put together, sockets opened, signals obeyed.

Exit codes: 0 after SIGTERM, 1 when housekeeping has ended by a bug, 2 when it cannot start (wrong settings, port in
use, data directory in use).
"""

import contextlib
import logging
import signal
import threading
from pathlib import Path
from typing import Any

import uvicorn

from weft.artifacts.blobs import BlobStore
from weft.process import EXIT_CANNOT_START, CannotStart, listen, lock_data_dir
from weft.telemetry import logs
from weft.telemetry.logs import kv
from weft.telemetry.probes import Probes
from weft.wire.quiet_server import QuietServer
from weft.wire.tls import load_tls
from weft_depot.artifact_layout import ArtifactLimits
from weft_depot.core.fair_queue import ConcurrencyLimits
from weft_depot.core.operations import Operations
from weft_depot.credentials import NoSecrets, Secrets
from weft_depot.credentials.folder import FolderSecrets
from weft_depot.resolution_cache import ResolutionCache
from weft_depot.resolve import Resolver
from weft_depot.role_auth import TlsPeerHttp
from weft_depot.server import build_app
from weft_depot.service import Depot
from weft_depot.settings import DepotSettings
from weft_depot.sources import ArtifactSource
from weft_depot.sources.file import FileSource
from weft_depot.sources.pvc import PvcSource
from weft_depot.sources.retry_policy import RetryPolicy
from weft_depot.sources.uploaded import UploadedSource
from weft_depot.uploads import SCHEME

log = logging.getLogger("weft_depot")
DRAIN_S = 3
TALKATIVE = (
    "botocore",
    "kubernetes",
    "urllib3",
    "httpcore2",
    "huggingface_hub",
)  # at DEBUG: headers, answers, signatures


def main(argv: list[str] | None = None) -> int:
    """Run until SIGTERM."""
    settings = DepotSettings.parse(argv)
    logs.configure("depot", level=settings.log_level, fmt=settings.log_format)
    for name in TALKATIVE:
        logging.getLogger(name).setLevel(max(logging.INFO, logging.getLogger().level))
    try:
        return _serve(settings)
    except CannotStart as error:
        log.error("cannot start", extra=kv(error=type(error).__name__, detail=error))
        return EXIT_CANNOT_START


def build(settings: DepotSettings) -> Depot:
    """A depot with its sources. Half-written blobs of a killed one are removed."""
    store = BlobStore(settings.data_dir / "blobs")
    removed = store.clean()
    if removed:
        log.info("half-written blobs removed", extra=kv(count=removed))
    policy = RetryPolicy()
    resolutions = ResolutionCache(settings.data_dir / "resolved", settings.recheck_s)
    resolver = Resolver(
        build_sources(settings, policy) | {SCHEME: UploadedSource(store, resolutions)},
        store,
        resolutions,
        ArtifactLimits(settings.max_adapter_bytes, settings.max_model_bytes),
        _secrets(settings.secrets),
    )
    threads = settings.threads
    limits = ConcurrencyLimits(threads, per_host=max(1, threads // 2), per_owner=max(1, threads // 4))
    operations = Operations(keep_s=settings.keep_operation_s)
    return Depot(resolver, limits=limits, stopping=policy.stopping, operations=operations)


def build_sources(settings: DepotSettings, policy: RetryPolicy) -> dict[str, ArtifactSource]:
    """Those that are allowed and have what they need. A library is only loaded for a scheme that is on.

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
    """Raises CannotStart."""
    if kind == "none":
        return NoSecrets()
    if kind == "kubernetes":
        try:
            from weft_depot.credentials.kubernetes import in_cluster
        except ImportError as error:
            raise CannotStart(f"--secrets kubernetes: {error}: pip install 'weft[kubernetes]'") from error

        return in_cluster()
    return FolderSecrets(Path(kind))


def _serve(settings: DepotSettings) -> int:
    with lock_data_dir(settings.data_dir, "depot"), listen(settings.http, "--http") as listener:
        host, port = listener.getsockname()[:2]
        tls = load_tls(settings.tls_dir, "depot")
        at = settings.probes
        probes = Probes(at, lambda: "stopping" if server.should_exit else None) if at else None
        failed = threading.Event()

        def stop(*_: object) -> None:
            server.should_exit = True

        def fail() -> None:
            failed.set()
            stop()

        app, secured = build_app(build(settings), probes, on_failure=fail), dict[str, Any]()
        if tls:
            secured = {"ssl_context_factory": lambda *_: tls.server_context(), "http": TlsPeerHttp}  # pyright: ignore[reportUnknownLambdaType]
        config = uvicorn.Config(
            app, log_config=None, access_log=False, timeout_graceful_shutdown=DRAIN_S, lifespan="on", **secured
        )
        server = QuietServer(config)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, stop)  # takes what comes early, and what uvicorn raises again at its end
        log.info("serving", extra=kv(listen=f"{host}:{port}", data_dir=settings.data_dir, tls=tls is not None))
        with contextlib.ExitStack() as stack:
            if probes:
                probes.start()
                stack.callback(probes.close)
            server.run(sockets=[listener])
        log.info("stopped")
        return 1 if failed.is_set() else 0
