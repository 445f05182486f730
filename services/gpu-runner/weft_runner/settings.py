"""Flags of the runner. Nothing heavy is imported: a wrong flag answers before torch is imported."""

import argparse
import os
import re
import socket
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from weft.process import split_address
from weft_kernels.cpu.threads import cpu_quota
from weft_runner.core.adapter_slots import MOST_SLOTS

EXECUTORS = ("auto", "cuda", "cpu", "reference")
SPLIT_EXECUTORS = ("cuda", "reference")  # the torch executors, which can compute a part of a model
DTYPES = ("bf16", "fp32", "int8")
ATTENTIONS = ("triton", "flashinfer")
CPU_PAGE = 16  # tokens: the native kernels lay keys out in blocks of so many
_NAME = re.compile(r"[A-Za-z0-9._-]{0,253}")
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}", re.ASCII)
_EXAMPLE = """example:
  python -m weft_runner --listen 127.0.0.1:7400 --probes 127.0.0.1:7401 --supervisor 127.0.0.1:7420 \\
      --depot http://127.0.0.1:7430 --data-dir /var/lib/weft/runner-0 --pool default/demo --base-digest sha256:...
"""


@dataclass(frozen=True, slots=True)
class Settings:
    """The flags of a runner."""

    listen: str
    advertise: str
    name: str
    probes: str
    supervisor: str
    depot: str
    data_dir: Path
    pool: str
    model_name: str
    base_digest: str
    executor: str
    tensor_parallel: int
    pipeline_parallel: int
    dtype: str
    attention: str
    page_tokens: int
    kv_pages: int
    max_sequences: int
    max_adapters: int
    max_rank: int
    max_batch_tokens: int
    max_prefills: int
    token_time_ms: int
    profile: bool
    threads: int
    starvation: int
    host_mib: int
    base_wait_s: float
    log_level: str
    log_format: str
    tls_dir: Path | None = None


def parse_settings(argv: list[str] | None = None) -> Settings:
    """Flags -> Settings. Leaves with exit code 2 and every wrong value listed."""
    parser = _parser()
    values = parser.parse_args(argv)
    if faults := _faults(values):
        parser.error("; ".join(faults))
    fields = vars(values)
    fields["advertise"] = fields["advertise"] or fields["listen"]
    fields["name"] = fields["name"] or socket.gethostname()
    fields["model_name"] = fields["model_name"] or fields["pool"]
    fields["profile"] = values.profile == "on"
    return Settings(**fields)


def to_json(settings: Settings) -> dict[str, Any]:
    """As JSON can hold them, for another process of this runner."""
    return {name: str(value) if isinstance(value, Path) else value for name, value in asdict(settings).items()}


def from_json(values: Mapping[str, Any]) -> Settings:
    """From what `to_json` made."""
    paths: dict[str, Any] = {name: Path(values[name]) for name in ("data_dir", "tls_dir") if values[name] is not None}
    return Settings(**{**values, **paths})


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="weft_runner",
        description="Runs one base model and its LoRA adapters: batches, KV pages, adapters, tokens.",
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    _add_addresses(parser)
    _add_computing(parser)
    _add_sizes(parser)
    parser.add_argument("--log-level", default="INFO", choices=("DEBUG", "INFO", "WARNING", "ERROR"))
    parser.add_argument("--log-format", default="text", choices=("text", "json"))
    return parser


def _add_addresses(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--listen", required=True, metavar="H:P", help="gRPC for gateways")
    add("--advertise", default="", metavar="H:P", help="address that gateways connect to (default: --listen)")
    add("--name", default="", metavar="NAME", help="what people call it, such as its pod (default: the host's name)")
    add("--probes", required=True, metavar="H:P", help="/healthz /readyz /metrics")
    add("--supervisor", required=True, metavar="H:P", help="where to report to")
    add("--tls-dir", type=Path, metavar="DIR", help="tls.crt, tls.key, ca.crt: mutual TLS (unset: plain text)")
    add("--depot", required=True, metavar="URL", help="where weights come from, by digest")
    add("--data-dir", required=True, type=Path, metavar="DIR", help="uuid and cached blobs; one process owns it")
    add("--pool", required=True, metavar="NS/NAME", help="the ServingPool this runner belongs to")
    add("--model-name", default="", metavar="NAME", help="the base's name in metrics of vLLM's (default: --pool)")
    add("--base-digest", required=True, metavar="DIGEST", help="the base model's digest")
    add("--base-wait-s", type=float, default=120.0, metavar="S", help="how long to wait for the depot at start (120)")


def _add_computing(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--executor",
        default="auto",
        choices=EXECUTORS,
        help="what computes: cuda (a GPU), cpu (native), reference (torch, fp32); auto: the first that can (auto)",
    )
    add(
        "--tensor-parallel",
        type=int,
        default=1,
        metavar="N",
        help="split the model over N processes of this host, a GPU each; not with --executor cpu (1)",
    )
    add(
        "--pipeline-parallel",
        type=int,
        default=1,
        metavar="N",
        help="cut the layers into stages, N processes of this host, a GPU each; not with --executor cpu (1)",
    )
    add(
        "--dtype",
        default="bf16",
        choices=DTYPES,
        help="numbers of the cuda and cpu executors; int8: of the base's weights only, on cpu (bf16)",
    )
    add(
        "--attention",
        default=os.environ.get("WEFT_ATTENTION", ATTENTIONS[0]),
        choices=ATTENTIONS,
        help="what attends in steps with prompts on a GPU; flashinfer: if installed ($WEFT_ATTENTION, or triton)",
    )
    add("--threads", type=int, default=0, help="CPU threads of the model (0: chosen from its size and the quota)")
    add(
        "--token-time-ms",
        type=int,
        default=100,
        help="within it running sequences should get their next token: prompts are chunked to keep it (100)",
    )
    add("--profile", default="on", choices=("on", "off"), help="time the model at start, for about a second (on)")


def _add_sizes(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--page-tokens", type=int, default=16, help="tokens of a KV page (16)")
    add("--kv-pages", type=int, default=1024, help="KV pages in all (1024)")
    add("--max-sequences", type=int, default=32, help="sequences admitted at a time (32)")
    add("--max-adapters", type=int, default=8, help="adapters on the device at a time (8)")
    add("--max-rank", type=int, default=64, help="largest rank of an adapter (64)")
    add("--max-batch-tokens", type=int, default=512, help="tokens of an iteration; longer prompts are chunked (512)")
    add("--max-prefills", type=int, default=1, help="prompts that an iteration works on (1)")
    add(
        "--starvation", type=int, default=16, help="times a waiting adapter is passed before a slot is kept for it (16)"
    )
    add("--host-mib", type=int, default=1024, help="host memory for adapters that left the device (1024)")


def _faults(values: argparse.Namespace) -> list[str]:
    faults = [f"--{name} {fault}" for name, text in _addresses(values) if (fault := _address_fault(text))]
    for name, low, high in _BOUNDS:
        value = getattr(values, name)
        if not low <= value <= high:
            faults.append(f"--{name.replace('_', '-')} {value} is outside {low}..{high}")
    if values.threads > (quota := cpu_quota()):
        faults.append(
            f"--threads {values.threads} is above the {quota} CPUs that this process may use (affinity, cgroups): "
            "all threads would wait for the one without a CPU; give it more CPUs, or fewer --threads (0: chosen)"
        )
    if values.max_batch_tokens < values.max_sequences:
        faults.append("--max-batch-tokens is below --max-sequences: every running sequence needs a token an iteration")
    if values.executor == "cpu" and values.page_tokens % CPU_PAGE:
        faults.append(f"--page-tokens {values.page_tokens} is no multiple of {CPU_PAGE}, which --executor cpu needs")
    for flag, parts in (("tensor", values.tensor_parallel), ("pipeline", values.pipeline_parallel)):
        if parts > 1 and values.executor == "cpu":
            faults.append(
                f"--{flag}-parallel {parts} with --executor cpu, which computes whole models: leave it at 1, or take "
                f"--executor {', '.join(SPLIT_EXECUTORS)} or auto"
            )
    if values.attention not in ATTENTIONS:
        faults.append(f"$WEFT_ATTENTION {values.attention[:100]!r} is none of {', '.join(ATTENTIONS)}")
    elif values.attention != ATTENTIONS[0] and values.executor not in ("auto", "cuda"):
        faults.append(
            f"--attention {values.attention} with --executor {values.executor}, which has an attention of its own: "
            "leave it out, or take --executor cuda"
        )
    if values.tensor_parallel > 1 and values.pipeline_parallel > 1:
        faults.append(
            f"--tensor-parallel {values.tensor_parallel} and --pipeline-parallel {values.pipeline_parallel}: "
            "one of the two; leave the other at 1"
        )
    if not _DIGEST.fullmatch(values.base_digest):
        faults.append(f"--base-digest {values.base_digest[:100]!r} is not sha256: and 64 hex digits")
    if not _NAME.fullmatch(values.name):
        faults.append(f"--name {values.name[:100]!r} is not up to 253 letters, digits, dots, dashes and underscores")
    if values.pool.count("/") != 1 or values.pool.startswith("/") or values.pool.endswith("/"):
        faults.append(f"--pool {values.pool!r} is not NAMESPACE/NAME")
    if not values.depot.startswith(("http://", "https://")):
        faults.append(f"--depot {values.depot!r} is not a URL such as http://HOST:PORT")
    elif values.tls_dir and not values.depot.startswith("https://"):
        faults.append(f"--depot {values.depot!r}: with --tls-dir the depot is spoken to over https://")
    return faults


_BOUNDS = (
    ("page_tokens", 1, 256),
    ("kv_pages", 1, 1 << 20),
    ("max_sequences", 1, 1024),
    ("max_adapters", 1, MOST_SLOTS),
    ("max_rank", 1, 256),
    ("max_batch_tokens", 1, 1 << 20),
    ("max_prefills", 1, 1024),
    ("token_time_ms", 1, 60_000),
    ("tensor_parallel", 1, 64),
    ("pipeline_parallel", 1, 64),
    ("threads", 0, 1024),  # and no more than the quota
    ("starvation", 1, 1 << 20),
    ("host_mib", 1, 1 << 24),
)


def _addresses(values: argparse.Namespace) -> list[tuple[str, str]]:
    named = [(name, getattr(values, name)) for name in ("listen", "probes", "supervisor")]
    return [*named, ("advertise", values.advertise)] if values.advertise else named


def _address_fault(text: str) -> str | None:
    try:
        split_address(text)
    except ValueError as error:
        return str(error)
    return None
