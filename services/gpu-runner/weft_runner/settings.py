"""Flags of the runner: one table, of which the parser, the dataclass and most checks are made.

Nothing heavy is imported: a wrong flag answers before torch is imported.
"""

import argparse
import os
import re
import socket
from collections.abc import Iterator
from dataclasses import MISSING, Field, dataclass, field, fields
from pathlib import Path
from typing import Any

from weft.process import split_address
from weft_kernels.cpu.threads import cpu_quota
from weft_runner.core.adapter_slots import MOST_SLOTS
from weft_runner.core.batch import Batching
from weft_runner.offload.policy import MOST_BYTES

MAX_RANKS = 64  # processes of a runner
KV_PAGES, MAX_SEQUENCES, MAX_BATCH_TOKENS, MAX_PREFILLS, HOST_MIB = 1024, 32, 512, 4, 1024
CPU_PAGE = 16  # tokens: the native kernels lay keys out in blocks of so many
_NAME = re.compile(r"[A-Za-z0-9._-]{0,253}")
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}", re.ASCII)
_EXAMPLE = """example:
  python -m weft_runner --listen 127.0.0.1:7400 --probes 127.0.0.1:7401 --supervisor 127.0.0.1:7420 \\
      --depot http://127.0.0.1:7430 --data-dir /var/lib/weft/runner-0 --pool default/demo --base-digest sha256:...
"""


def _flag(text: str = "", default: Any = MISSING, **metadata: Any) -> Any:
    """A field: `--name`, required without a default. Its help ends with the default, unless it has brackets there.

    `bounds`: of a number, both allowed. `address`: HOST:PORT. `env`: a variable that has the default. What is left is
    argparse's own.
    """
    if text and default not in (MISSING, None) and not text.endswith(")"):
        text += f" ({'on' if default is True else default:{'g' if isinstance(default, float) else ''}})"
    return field(default=default, metadata={"help": text, **metadata})


def _number(text: str, default: int, low: int, high: int, **metadata: Any) -> Any:
    return _flag(text, default, bounds=(low, high), **metadata)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerSettings:
    """The flags of a runner."""

    listen: str = _flag("gRPC for gateways", metavar="H:P", address=True)
    advertise: str = _flag("address that gateways connect to (default: --listen)", "", metavar="H:P", address=True)
    kv_listen: str = _flag(
        "where other runners of the pool send KV, on the host of --advertise (unset: nowhere)", "", metavar="H:P",
        address=True,
    )  # fmt: skip
    kv_claim_ms: int = _number("KV that no runner has claimed meanwhile is dropped", 10_000, 1, 600_000)
    name: str = _flag("what people call it, such as its pod (default: the host's name)", "", metavar="NAME")
    probes: str = _flag("/healthz /readyz /metrics", metavar="H:P", address=True)
    supervisor: str = _flag("where to report to", metavar="H:P", address=True)
    tls_dir: Path | None = _flag("tls.crt, tls.key, ca.crt: mutual TLS (unset: plain text)", None, metavar="DIR")  # noqa: RUF009
    depot: str = _flag("where weights come from, by digest", metavar="URL")
    data_dir: Path = _flag("uuid and cached blobs; one process owns it", metavar="DIR")  # noqa: RUF009
    model_cache: Path | None = _flag(  # noqa: RUF009
        "blobs, shared with other runners of this machine (unset: in --data-dir)", None, metavar="DIR"
    )
    pool: str = _flag("the ServingPool this runner belongs to", metavar="NS/NAME")
    model_name: str = _flag("the base's name in metrics of vLLM's (default: --pool)", "", metavar="NAME")
    base_digest: str = _flag("the base model's digest", metavar="DIGEST")
    base_wait_s: float = _flag("how long to wait for the depot at start", 120.0, metavar="S")
    executor: str = _flag(
        "what computes: cuda (a GPU), cpu (native), reference (torch, fp32); auto: the first that can",
        "auto",
        choices=("auto", "cuda", "cpu", "reference"),
    )
    tensor_parallel: int = _number(
        "split the model over N processes of this host, on GPUs one each",
        1,
        1,
        MAX_RANKS,
        metavar="N",
    )
    pipeline_parallel: int = _number(
        "cut the layers into stages, each of --tensor-parallel processes",
        1,
        1,
        MAX_RANKS,
        metavar="N",
    )
    ranks_listen: str = _flag(
        "where rank 0 takes the runner's other ranks, a host each (unset: they are children of this process)", "",
        metavar="H:P", address=True,
    )  # fmt: skip
    host_index: int = _number("which of a runner's several hosts this is", 0, 0, MAX_RANKS - 1, metavar="N")
    ranks_per_host: int = _number(
        "ranks on each of several hosts, in order: this process is the first and starts the others", 1, 1, MAX_RANKS,
        metavar="N",
    )  # fmt: skip
    leader: str = _flag(
        "--ranks-listen of rank 0, for the other hosts (the first one ignores it)", "", metavar="H:P", address=True
    )
    dtype: str = _flag(
        "numbers of the cuda and cpu executors; of the base's weights only: int4, int8 (on cpu) ($WEFT_DTYPE, or bf16)",
        "bf16",
        choices=("bf16", "fp32", "int8", "int4"),
        env="WEFT_DTYPE",
    )
    kv_dtype: str = _flag(
        "numbers of keys and values on cpu: int4 in groups of 64 (32 where heads are no multiple of it), or as --dtype",
        "auto",
        choices=("auto", "int4"),
    )
    sparse_attention: float = _flag(
        "share of its keys that a token attends to on cpu, the best ones and no fewer than 16 (0: all)", 0.0,
        metavar="SHARE",
    )  # fmt: skip
    attention: str = _flag(
        "what attends in steps with prompts on a GPU; flashinfer: if installed ($WEFT_ATTENTION, or triton)",
        "triton",
        choices=("triton", "flashinfer"),
        env="WEFT_ATTENTION",
    )
    threads: int = _number("CPU threads of the model (0: chosen from its size and the quota)", 0, 0, 1024)
    token_time_ms: int = _number(
        "within it running sequences should get their next token (0: no objective; prompts are chunked to 100, and "
        "lines of batches join up to twice a step of one row)", 0, 0, 60_000,
    )  # fmt: skip
    profile: bool = _flag("time the model at start, for about a second", default=True)
    page_tokens: int = _number("tokens of a KV page", 16, 1, 256)
    kv_pages: int = _number(
        "KV pages in all (1024; 0: by --kv-memory-fraction, or by --offload-policy auto)", KV_PAGES, 0, 1 << 20
    )
    kv_memory_fraction: float = _flag(
        "with --kv-pages 0: how much of all the memory of the GPU, or of the container, this process may take, weights "
        "and KV together; a process without a container's limit has 1024 pages",
        0.9,
        metavar="F",
    )
    max_sequences: int = _number(
        "sequences admitted at a time (32; 0: by --offload-policy auto, else by the memory of a GPU)",
        MAX_SEQUENCES,
        0,
        1024,
    )
    max_adapters: int = _number("adapters on the device at a time (0: as many as pages hold)", 0, 0, MOST_SLOTS)
    max_rank: int = _number("largest rank of an adapter", 64, 1, 256)
    max_batch_tokens: int = _number(
        "tokens of an iteration; longer prompts are chunked (512; 0: as --max-sequences)", MAX_BATCH_TOKENS, 0, 1 << 20
    )  # fmt: skip
    max_prefills: int = _number(
        "prompts that an iteration works on (4; 0: on a GPU as many as its tokens allow)", MAX_PREFILLS, 0, 1024
    )
    batching: str = _flag(
        "what an iteration runs: prompts beside running sequences; prompts alone and first; one batch of requests to "
        "its end before the next begins (the last two are for comparison)",
        "mixed",
        choices=tuple(of.value for of in Batching),
    )
    role: str = _flag(
        "the phase that its hardware is for, in a pool that computes prompts and tokens apart",
        "any",
        choices=("any", "prompt", "token"),
    )
    host_mib: int = _number(
        "host memory for adapters that left the device, KV of preempted sequences and of earlier prompts (0: 1024, and "
        "beside a GPU a quarter of the container's, or of this GPU's part of the machine's)",
        0,
        0,
        1 << 24,
    )
    offload_device_bytes: int = _number(
        "bytes for weights, KV, adapters and steps, of the GPU if that computes, a rank: weights that do not fit "
        "come from disk while layers compute (0: all are in memory)",
        0,
        0,
        1 << 50,
        metavar="N",
    )
    offload_host_bytes: int = _number(
        "bytes of host memory beside them, a rank: for weights and KV that are copied to the GPU as layers compute, "
        "and for weights from disk on their way; the cpu executor has one memory, and more of it", 0, 0, 1 << 50,
        metavar="N",
    )  # fmt: skip
    offload_kv_disk_pages: int = _number(
        "of --kv-pages, whose KV is on the disk and passes through memory while layers compute", 0, 0, 1 << 20,
        metavar="N",
    )  # fmt: skip
    offload_kv_host_pages: int = _number(
        "of --kv-pages, whose KV is in host memory and passes through the GPU while layers compute", 0, 0, 1 << 20,
        metavar="N",
    )  # fmt: skip
    offload_disk_bytes: int = _number(
        "most bytes of a rank's weights and KV on disk", MOST_BYTES, 1, MOST_BYTES, metavar="N"
    )
    offload_disk_path: Path | None = _flag(  # noqa: RUF009
        "where these lie, with direct I/O; runners of a node may share it (unset: in --data-dir)", None, metavar="DIR"
    )
    offload_policy: str = _flag(
        "greedy: as many weights stay as fit; auto: measure this machine, find the policy, and take the limits from it "
        "that are 0",
        "greedy",
        choices=("greedy", "auto"),
    )
    offload_batch_tokens: int = _number(
        "tokens that an offloaded layer computes at a time", 256, 1, 1 << 20, metavar="N"
    )
    offload_plan: Path | None = _flag(  # noqa: RUF009
        "a plan as JSON: which weights stay, and tokens of a device batch (unset: as many as fit stay)", None,
        metavar="FILE",
    )  # fmt: skip
    offload_weights_share: float = _flag(
        "of the weights, that stay at most, from 0 to 1 (1: as many as fit)", 1.0, metavar="SHARE"
    )
    log_level: str = _flag("", "INFO", choices=("DEBUG", "INFO", "WARNING", "ERROR"))
    log_format: str = _flag("", "text", choices=("text", "json"))

    @property
    def blobs(self) -> Path:
        """The folder of what came from the depot."""
        return self.model_cache or self.data_dir / "blobs"

    @property
    def ranks(self) -> int:
        """Processes of the runner."""
        return self.tensor_parallel * self.pipeline_parallel

    @property
    def hosts(self) -> int:
        return self.ranks // len(self.ranks_here)

    @property
    def ranks_here(self) -> range:
        """Those of this host. Of several hosts the first one is this process."""
        if not (self.ranks_listen or self.leader):
            return range(self.ranks)
        first = self.host_index * self.ranks_per_host
        return range(first, first + self.ranks_per_host)


def parse_settings(argv: list[str] | None = None) -> RunnerSettings:
    """Flags -> settings. Leaves with exit code 2 and every wrong value listed."""
    parser = argparse.ArgumentParser(
        prog="weft_runner",
        description="Runs one base model and its LoRA adapters: batches, KV pages, adapters, tokens.",
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    for one in fields(RunnerSettings):
        _add(parser, one)
    values = parser.parse_args(argv)
    if faults := list(_faults(values)):
        parser.error("; ".join(faults))
    values.advertise = values.advertise or values.listen
    values.name = values.name or socket.gethostname()
    values.model_name = values.model_name or values.pool
    values.profile = values.profile in ("on", True)
    return RunnerSettings(**vars(values))


def _add(parser: argparse.ArgumentParser, one: Field[Any]) -> None:
    """One row of the table to argparse."""
    options = {name: value for name, value in one.metadata.items() if name not in ("bounds", "address", "env")}
    if one.type in (int, float):
        options["type"] = one.type
    elif one.type in (Path, Path | None):
        options["type"] = Path
    elif one.type is bool:
        options["choices"] = ("on", "off")
    if one.default is MISSING:
        options["required"] = True
    else:
        options["default"] = os.environ.get(one.metadata.get("env", ""), one.default)
    parser.add_argument(f"--{one.name.replace('_', '-')}", **options)


def _faults(values: argparse.Namespace) -> Iterator[str]:
    """Everything that is wrong with them: row by row, then together."""
    for one in fields(RunnerSettings):
        value, flag = getattr(values, one.name), f"--{one.name.replace('_', '-')}"
        if one.metadata.get("address") and value:
            try:
                split_address(value)
            except ValueError as error:
                yield f"{flag} {error}"
        if (bounds := one.metadata.get("bounds")) and not bounds[0] <= value <= bounds[1]:
            yield f"{flag} {value} is outside {bounds[0]}..{bounds[1]}"
        if (env := one.metadata.get("env")) and value not in one.metadata["choices"]:
            yield f"${env} {value[:100]!r} is none of {', '.join(one.metadata['choices'])}"
    if values.threads > (quota := cpu_quota()):
        yield (
            f"--threads {values.threads} is above the {quota} CPUs that this process may use (affinity, cgroups): "
            "all threads would wait for the one without a CPU; give it more CPUs, or fewer --threads (0: chosen)"
        )
    limits = {
        "max-sequences": values.max_sequences, "max-batch-tokens": values.max_batch_tokens, "kv-pages": values.kv_pages,
    }  # fmt: skip
    if not 0.0 < values.kv_memory_fraction <= 1.0:
        yield f"--kv-memory-fraction {values.kv_memory_fraction:g} is not above 0 and at most 1"
    if values.offload_policy == "auto":
        if not values.offload_device_bytes or values.offload_plan:
            yield "--offload-policy auto is for --offload-device-bytes without --offload-plan: it finds one"
    elif values.offload_device_bytes and (unset := [f"--{name}" for name, limit in limits.items() if not limit]):
        yield f"{', '.join(unset)} 0 is for --offload-policy auto, which chooses"
    if 0 < values.max_batch_tokens < values.max_sequences:
        yield "--max-batch-tokens is below --max-sequences: every running sequence needs a token an iteration"
    if values.executor == "cpu" and values.page_tokens % CPU_PAGE:
        yield f"--page-tokens {values.page_tokens} is no multiple of {CPU_PAGE}, which --executor cpu needs"
    yield from _rank_faults(values)
    yield from _executor_faults(values)
    if not _DIGEST.fullmatch(values.base_digest):
        yield f"--base-digest {values.base_digest[:100]!r} is not sha256: and 64 hex digits"
    if not _NAME.fullmatch(values.name):
        yield f"--name {values.name[:100]!r} is not up to 253 letters, digits, dots, dashes and underscores"
    if values.pool.count("/") != 1 or values.pool.startswith("/") or values.pool.endswith("/"):
        yield f"--pool {values.pool!r} is not NAMESPACE/NAME"
    if not values.depot.startswith(("http://", "https://")):
        yield f"--depot {values.depot!r} is not a URL such as http://HOST:PORT"
    elif values.tls_dir and not values.depot.startswith("https://"):
        yield f"--depot {values.depot!r}: with --tls-dir the depot is spoken to over https://"


def _rank_faults(values: argparse.Namespace) -> Iterator[str]:
    if (ranks := values.tensor_parallel * values.pipeline_parallel) > MAX_RANKS:
        yield f"--tensor-parallel times --pipeline-parallel is {ranks}, above {MAX_RANKS} processes of a runner"
    hosts, index = ranks // values.ranks_per_host, values.host_index
    if ranks % values.ranks_per_host:
        yield f"--ranks-per-host {values.ranks_per_host} does not divide the {ranks} ranks of a runner"
    if index >= max(hosts, 1) or (index and not values.leader):
        yield f"--host-index {index} with --leader {values.leader!r}: hosts 1 to {hosts - 1} name rank 0's address"
    if (values.ranks_listen or values.leader) and ranks == 1:
        yield "--ranks-listen and --leader are for a runner of several ranks"
    if values.ranks_per_host > 1 and not (values.ranks_listen or values.leader):
        yield "--ranks-per-host is for ranks of several hosts: say where by --ranks-listen and --leader"
    if values.leader and not index and not values.ranks_listen:
        yield "--leader without --ranks-listen is for hosts from 1 on: say which by --host-index"


def _executor_faults(values: argparse.Namespace) -> Iterator[str]:
    """What an executor does not do, and what offloading needs."""
    if values.offload_device_bytes and (values.executor == "reference" or values.tensor_parallel > 1):
        yield (
            "--offload-device-bytes is for --executor cpu and cuda without --tensor-parallel: "
            "split the model by --pipeline-parallel, whose stages have a budget each"
        )
    if values.executor not in ("auto", "cpu"):
        if values.kv_dtype == "int4":
            yield f"--kv-dtype int4 is for --executor cpu: --executor {values.executor} has no such KV"
        if values.sparse_attention:
            yield f"--sparse-attention is for --executor cpu: --executor {values.executor} attends to all keys"
    if not 0.0 <= values.sparse_attention <= 1.0:
        yield f"--sparse-attention {values.sparse_attention:g} is outside 0..1"
    if values.offload_plan and (not values.offload_device_bytes or values.pipeline_parallel > 1):
        yield "--offload-plan is for --offload-device-bytes and one rank: it says where the weights of one are"
    elsewhere = {"disk": values.offload_kv_disk_pages, "host": values.offload_kv_host_pages}
    if (any(elsewhere.values()) or values.offload_host_bytes) and not values.offload_device_bytes:
        yield "--offload-kv-disk-pages, --offload-kv-host-pages and --offload-host-bytes are for --offload-device-bytes"
    if elsewhere["disk"] and values.executor == "cuda":
        yield "--offload-kv-disk-pages is for --executor cpu: --executor cuda has KV on the GPU and on its host"
    if elsewhere["host"] and values.executor != "cuda":
        yield "--offload-kv-host-pages is for --executor cuda: the cpu executor has one memory"
    if elsewhere["host"] and values.attention == "flashinfer":
        yield "--offload-kv-host-pages with --attention flashinfer, which reads KV on the GPU alone"
    for place, pages in elsewhere.items():
        if pages > values.kv_pages:
            yield f"--offload-kv-{place}-pages {pages} are more than --kv-pages {values.kv_pages}"
    if not 0.0 <= values.offload_weights_share <= 1.0:
        yield f"--offload-weights-share {values.offload_weights_share:g} is outside 0..1"
    if values.attention == "flashinfer" and values.executor not in ("auto", "cuda"):
        yield (
            f"--attention {values.attention} with --executor {values.executor}, which has an attention of its own: "
            "leave it out, or take --executor cuda"
        )
