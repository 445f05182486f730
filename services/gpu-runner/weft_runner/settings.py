"""Flags of the runner: one table, of which the parser, the dataclass and most checks are made.

A row reads as those of the services do (`weft.settings`), in argparse: the runner's image has no pydantic, and nothing
heavy is imported, so that a wrong flag answers before torch is. No row is a variable of the environment but where it
names one: a pool's owner writes those, and may not say where a runner reports to.
"""

import argparse
import os
import re
import socket
from collections.abc import Callable, Iterator
from dataclasses import MISSING, Field, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from weft.process import split_address
from weft_kernels.cpu.threads import cpu_quota
from weft_runner.core.adapters.slots import MAX_SLOTS
from weft_runner.core.batch import Batching
from weft_runner.offload.policy import MAX_TIER_BYTES

MAX_RANKS = 64  # processes of a runner
KV_PAGES, MAX_SEQUENCES, MAX_BATCH_TOKENS, MAX_PREFILLS, HOST_MIB = 1024, 32, 512, 4, 1024
CPU_PAGE = 16  # tokens of a block of keys in the layout of the native kernels
PAGE_TOKENS = 16  # of a KV page: what every executor computes, and the least that an answer's end leaves unused
DEVICE_BATCH_TOKENS = 256  # that an offloaded layer computes at a time, where no plan says it
MAX_MEMORY_BYTES = 1 << 50  # of a rank
_BUDGETS = {"device": (1, MAX_MEMORY_BYTES), "host": (0, MAX_MEMORY_BYTES), "disk": (1, MAX_TIER_BYTES)}
_EXAMPLE = """example:
  python -m weft_runner --listen 127.0.0.1:7400 --probes 127.0.0.1:7401 --supervisor 127.0.0.1:7420 \\
      --depot http://127.0.0.1:7430 --data-dir /var/lib/weft/runner-0 --pool default/demo --base-digest sha256:...
"""


@dataclass(frozen=True, slots=True)
class RunnerHost:
    """One of a runner's hosts, counted from 0."""

    index: int
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadMemory:
    """Budgets of a rank for a model that is larger than its memory. `device_bytes` 0: all weights are in memory."""

    device_bytes: int = 0
    host_bytes: int = 0
    disk_bytes: int = MAX_TIER_BYTES
    path: Path | None = None  # with direct I/O; None: in the data directory


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadByHand:
    """A policy in place of the one that the runner finds: as many weights stay as fit, or as this says."""

    kv_disk_pages: int = 0
    kv_host_pages: int = 0
    batch_tokens: int = DEVICE_BATCH_TOKENS
    plan: Path | None = None  # which weights stay, as JSON (`offload/plan.py`)
    weights_share: float = 1.0  # that stay at most


def _flag(description: str, default: Any = MISSING, **metadata: Any) -> Any:
    """Make a field of `--name`, required without a default. Its help ends with the default, or with its own brackets.

    `ge`, `le`: bounds of a number. `check`: raises ValueError for a wrong value. `env`: a variable that has the
    default. What is left is argparse's own.
    """
    if description and default not in (MISSING, None) and not description.endswith(")"):
        description += f" ({default:{'g' if isinstance(default, float) else ''}})"
    return field(default=default, metadata={"help": description, **metadata})


def _address(description: str, default: Any = MISSING) -> Any:
    """Make a field of an address."""
    return _flag(description, default, metavar="H:P", check=split_address)


def _form(pattern: str, words: str, shown: int | None = 100) -> Callable[[str], None]:
    """Make a check of a whole text, which a message names in `words`. `shown`: characters of a wrong one there."""

    def check(value: str) -> None:
        if not re.fullmatch(pattern, value):
            raise ValueError(f"{value[:shown]!r} is not {words}")

    return check


_POOL = _form("[^/]+/[^/]+", "NAMESPACE/NAME", shown=None)
_NAME = _form("[A-Za-z0-9._-]{0,253}", "up to 253 letters, digits, dots, dashes and underscores")
_DIGEST = _form("sha256:[0-9a-f]{64}", "sha256: and 64 hex digits")
_URL = _form("(?s:https?://.*)", "a URL such as http://HOST:PORT", shown=None)


def _host(text: str) -> RunnerHost:
    index, _, count = text.partition("/")
    if not (index.isdecimal() and count.isdecimal() and int(index) < int(count) <= MAX_RANKS):
        raise argparse.ArgumentTypeError(f"{text[:100]!r} is not INDEX/HOSTS, such as 0/2 and 1/2")
    return RunnerHost(int(index), int(count))


def _offload(text: str) -> OffloadMemory:
    budgets, path = dict[str, int](), None
    for part in re.split(",(?=[a-z]+=)", text):
        name, _, value = part.partition("=")
        low, maximum = _BUDGETS.get(name, (0, -1))
        if name == "path" and value:
            path = Path(value)
        elif value.isdecimal() and low <= int(value) <= maximum:
            budgets[f"{name}_bytes"] = int(value)
        else:
            raise argparse.ArgumentTypeError(f"{part[:100]!r} is not device=, host= or disk= with bytes, or path=DIR")
    if "device_bytes" not in budgets:
        raise argparse.ArgumentTypeError(f"{text[:100]!r} has no device=BYTES")
    return OffloadMemory(path=path, **budgets)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerSettings:
    """The flags of a runner, and behind them what only benchmarks and tests choose."""

    listen: str = _address("gRPC for gateways")
    advertise: str = _address("address that gateways connect to (default: --listen)", "")
    kv_listen: str = _address(
        "where other runners of the pool send KV, on the host of --advertise (unset: nowhere)", ""
    )
    name: str = _flag(
        "what people call it, such as its pod (default: the host's name)", "", metavar="NAME", check=_NAME
    )
    probes: str = _address("/healthz /readyz /metrics")
    supervisor: str = _address("where to report to")
    tls_dir: Path | None = _flag("tls.crt, tls.key, ca.crt: mutual TLS (unset: plain text)", None, metavar="DIR")
    depot: str = _flag("where weights come from, by digest", metavar="URL", check=_URL)
    data_dir: Path = _flag("uuid and cached blobs; one process owns it", metavar="DIR")
    model_cache: Path | None = _flag(
        "blobs, shared with other runners of this machine (unset: in --data-dir)", None, metavar="DIR"
    )
    pool: str = _flag("the ServingPool this runner belongs to", metavar="NS/NAME", check=_POOL)
    model_name: str = _flag("the base's name in metrics of vLLM's (default: --pool)", "", metavar="NAME")
    base_digest: str = _flag("the base model's digest", metavar="DIGEST", check=_DIGEST)
    executor: str = _flag(
        "what computes: cuda (a GPU), cpu (native), reference (torch, fp32); auto: the first that can",
        "auto", choices=("auto", "cuda", "cpu", "reference"),
    )  # fmt: skip
    tensor_parallel: int = _flag(
        "split the model over N processes of a host, on GPUs one each", 1, ge=1, le=MAX_RANKS, metavar="N"
    )
    pipeline_parallel: int = _flag(
        "cut the layers into stages, each of --tensor-parallel processes", 1, ge=1, le=MAX_RANKS, metavar="N"
    )
    host: RunnerHost = _flag(
        "which of a runner's hosts this is, from 0, and how many: each has as many ranks, in order (unset: all ranks "
        "are processes of this one)", RunnerHost(0, 1), metavar="I/N", type=_host,
    )  # fmt: skip
    leader: str = _address(
        "where rank 0 takes the other ranks, on the host of its --advertise (unset: there is one host)", ""
    )
    dtype: str = _flag(
        "numbers of the cuda and cpu executors; of the base's weights only: int4, int8 (on cpu) ($WEFT_DTYPE, or "
        "bf16)", "bf16", choices=("bf16", "fp32", "int8", "int4"), env="WEFT_DTYPE",
    )  # fmt: skip
    kv_dtype: str = _flag(
        "numbers of keys and values on cpu: int4 in groups of 64 (32 where heads are no multiple of it), or as "
        "--dtype", "auto", choices=("auto", "int4"),
    )  # fmt: skip
    sparse_attention: float = _flag(
        "share of its keys that a token attends to on cpu, the best ones and no fewer than 16 (0: all)",
        0.0, ge=0.0, le=1.0, metavar="SHARE",
    )  # fmt: skip
    threads: int = _flag("CPU threads of the model (0: chosen from its size and the quota)", 0, ge=0, le=1024)
    token_time_ms: int = _flag(
        "within it running sequences should get their next token (0: no objective; prompts are chunked to 100, and "
        "lines of batches join up to twice a step of one row)", 0, ge=0, le=60_000,
    )  # fmt: skip
    kv_pages: int = _flag(
        "KV pages in all (1024; 0: by --kv-memory-fraction, or by the policy of --offload)", KV_PAGES, ge=0, le=1 << 20
    )
    kv_memory_fraction: float = _flag(
        "with --kv-pages 0: how much of all the memory of the GPU, or of the container, this process may take, "
        "weights and KV together; a process without a container's limit has 1024 pages", 0.9, metavar="F",
    )  # fmt: skip
    max_sequences: int = _flag(
        "sequences admitted at a time (32; 0: by the policy of --offload, else by the memory of a GPU)",
        MAX_SEQUENCES, ge=0, le=1024,
    )  # fmt: skip
    max_adapters: int = _flag("adapters on the device at a time (0: as many as pages hold)", 0, ge=0, le=MAX_SLOTS)
    max_rank: int = _flag("largest rank of an adapter", 64, ge=1, le=256)
    max_batch_tokens: int = _flag(
        "tokens of an iteration; longer prompts are chunked (512; 0: as --max-sequences)",
        MAX_BATCH_TOKENS, ge=0, le=1 << 20,
    )  # fmt: skip
    speculation: str = _flag(
        "what drafts an answer's next tokens on cpu, in one process: texts that its end has matched, its own and those "
        "of its adapter's latest answers; answers are the same to the bit", "suffix", choices=("suffix", "off"),
    )  # fmt: skip
    role: str = _flag(
        "the phase that its hardware is for, in a pool that computes prompts and tokens apart",
        "any", choices=("any", "prompt", "token"),
    )  # fmt: skip
    offload: OffloadMemory = _flag(
        "a rank's bytes, of which weights that do not fit come while layers compute: on the device that computes "
        "(weights, KV, adapters, steps), of the host beside it, at most on disk, and the folder there; the machine is "
        "measured, and the limits that are 0 follow (unset: all weights are in memory)",
        OffloadMemory(), metavar="device=N,host=N,disk=N,path=DIR", type=_offload,
    )  # fmt: skip
    log_level: str = _flag("", "INFO", choices=("DEBUG", "INFO", "WARNING", "ERROR"))
    log_format: str = _flag("", "text", choices=("text", "json"))

    # What no flag says (`parse_settings`): each is a constant of every runner that serves.
    profile: bool = True  # the model is timed at the start, for about a second: placement goes by what it finds
    page_tokens: int = PAGE_TOKENS
    batching: Batching = Batching.MIXED  # the others are what it is compared with
    max_prefills: int = 0  # prompts that an iteration works on; 0: chosen (`settle_limits`)
    host_mib: int = 0  # MiB of host memory for copies and KV; 0: chosen as well
    by_hand: OffloadByHand | None = None  # None: the runner finds a policy

    @property
    def blobs(self) -> Path:
        """The folder for what came from the depot."""
        return self.model_cache or self.data_dir / "blobs"

    @property
    def ranks(self) -> int:
        """The number of the runner's processes."""
        return self.tensor_parallel * self.pipeline_parallel

    @property
    def hosts(self) -> int:
        return self.host.count

    @property
    def ranks_here(self) -> range:
        """The ranks of this host. Of several hosts the first one is this process."""
        here = self.ranks // self.hosts
        return range(self.host.index * here, (self.host.index + 1) * here)

    def gpu_of(self, rank: int) -> int:
        """Number a rank's GPU on its host."""
        return rank % len(self.ranks_here)

    @property
    def ranks_listen(self) -> str:
        """The address where rank 0 accepts ranks of other hosts."""
        return f"{self.advertise.rpartition(':')[0]}:{self.leader.rpartition(':')[2]}"

    @property
    def finds_policy(self) -> bool:
        """Say whether it offloads, and measures the machine for how."""
        return self.offload.device_bytes > 0 and self.by_hand is None


FLAGS = tuple(setting for setting in fields(RunnerSettings) if setting.metadata)


def parse_settings(argv: list[str] | None = None, **overrides: Any) -> RunnerSettings:
    """Parse flags. Leaves with exit code 2 and every wrong value listed. `overrides`: of what no flag says."""
    parser = argparse.ArgumentParser(
        prog="weft_runner",
        description="Runs one base model and its LoRA adapters: batches, KV pages, adapters, tokens.",
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    for setting in FLAGS:
        _add(parser, setting)
    values = parser.parse_args(argv)
    if faults := list(_faults(values)):
        parser.error("; ".join(faults))
    values.advertise = values.advertise or values.listen
    values.name = values.name or socket.gethostname()
    values.model_name = values.model_name or values.pool
    return replace(RunnerSettings(**vars(values)), **overrides)


def _add(parser: argparse.ArgumentParser, setting: Field[Any]) -> None:
    """Give argparse a row of the table."""
    options = {name: value for name, value in setting.metadata.items() if name not in ("ge", "le", "check", "env")}
    if setting.type in (int, float):
        options["type"] = setting.type
    elif setting.type in (Path, Path | None):
        options["type"] = Path
    if setting.default is MISSING:
        options["required"] = True
    else:
        options["default"] = os.environ.get(setting.metadata.get("env", ""), setting.default)
    parser.add_argument(_name(setting), **options)


def _name(setting: Field[Any]) -> str:
    return f"--{setting.name.replace('_', '-')}"


def _faults(values: argparse.Namespace) -> Iterator[str]:
    """Find everything that is wrong with the values: row by row, then together."""
    for setting in FLAGS:
        yield from _wrong(setting, getattr(values, setting.name))
    if values.threads > (quota := cpu_quota()):
        yield (
            f"--threads {values.threads} is above the {quota} CPUs that this process may use (affinity, cgroups): "
            "all threads would wait for the one without a CPU; give it more CPUs, or fewer --threads (0: chosen)"
        )
    if not 0.0 < values.kv_memory_fraction <= 1.0:
        yield f"--kv-memory-fraction {values.kv_memory_fraction:g} is not above 0 and at most 1"
    if 0 < values.max_batch_tokens < values.max_sequences:
        yield "--max-batch-tokens is below --max-sequences: every running sequence needs a token an iteration"
    yield from _rank_faults(values)
    yield from _executor_faults(values)
    if values.tls_dir and values.depot.startswith("http://"):
        yield f"--depot {values.depot!r}: with --tls-dir the depot is spoken to over https://"


def _wrong(setting: Field[Any], value: Any) -> Iterator[str]:
    """Find a row's own fault."""
    if (check := setting.metadata.get("check")) and value:
        check_value: Callable[[Any], object] = check
        try:
            check_value(value)
        except ValueError as error:
            yield f"{_name(setting)} {error}"
    if "ge" in setting.metadata and not setting.metadata["ge"] <= value <= setting.metadata["le"]:
        yield f"{_name(setting)} {value:g} is outside {setting.metadata['ge']:g}..{setting.metadata['le']:g}"
    if (env := setting.metadata.get("env")) and value not in setting.metadata["choices"]:
        yield f"${env} {value[:100]!r} is none of {', '.join(setting.metadata['choices'])}"


def _rank_faults(values: argparse.Namespace) -> Iterator[str]:
    if (ranks := values.tensor_parallel * values.pipeline_parallel) > MAX_RANKS:
        yield f"--tensor-parallel times --pipeline-parallel is {ranks}, above {MAX_RANKS} processes of a runner"
    hosts = values.host.count
    if ranks % hosts:
        yield f"--host: {hosts} hosts do not divide the {ranks} ranks of a runner"
    if (hosts > 1) != bool(values.leader):
        yield f"--host of {hosts} with --leader {values.leader!r}: several hosts name rank 0's address, one does not"


def _executor_faults(values: argparse.Namespace) -> Iterator[str]:
    """Find settings unsupported by the executor, and missing requirements of offloading."""
    if values.offload.device_bytes and (values.executor == "reference" or values.tensor_parallel > 1):
        yield (
            "--offload is for --executor cpu and cuda without --tensor-parallel: "
            "split the model by --pipeline-parallel, whose stages have a budget each"
        )
    if values.executor not in ("auto", "cpu"):
        if values.kv_dtype == "int4":
            yield f"--kv-dtype int4 is for --executor cpu: --executor {values.executor} has no such KV"
        if values.sparse_attention:
            yield f"--sparse-attention is for --executor cpu: --executor {values.executor} attends to all keys"
