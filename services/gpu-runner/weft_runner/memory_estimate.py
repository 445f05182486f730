"""What serving a model takes of memory, computed from its description before anything is loaded, and what there is.

The cpu executor packs matrices, with columns padded to 32 and rows to 16; the embedding stays in the mapped file, whose
pages give way. The reference and the cuda executor have everything in one dtype, and the embedding too, which the
latter keeps in bf16 beside int4 matrices. What there is: the least that the machine and any control group of this
process have left.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import psutil

from weft.domain.model.packed import CUDA_INT4, NUMBER_BYTES, PLAIN, kv_token_bytes, packed_bytes, vector_numbers
from weft.domain.model.spec import ModelSpec
from weft_runner.errors import OutOfMemory

PROC, CGROUP = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")
NO_LIMIT = 1 << 60  # cgroup v1 writes a number near 2^63 where there is none, v2 the word `max`


@dataclass(frozen=True, slots=True)
class MemoryLimit:
    """What is left. `limit` names the owner of the memory, for the error that says it does not suffice.

    `of_bytes`: all of it. `is_group`: this process is in a container with a limit, and does not share that with others.
    """

    n_bytes: int
    limit: str
    of_bytes: int = 0
    is_group: bool = False


def available_memory(proc: Path = PROC, cgroup: Path = CGROUP) -> MemoryLimit:
    """The least that the machine and any control group above this process have left. Page cache counts as free."""
    memory, groups = psutil.virtual_memory(), _groups(proc, cgroup)
    machine = MemoryLimit(memory.available, "this machine", memory.total, is_group=bool(groups))
    return min((machine, *groups), key=lambda limit: limit.n_bytes)


def _groups(proc: Path, cgroup: Path) -> list[MemoryLimit]:
    """Every group from the process's own up to the root. In a container the own one may be mounted as the root."""
    try:
        lines = proc.read_text().splitlines()
    except OSError:
        return []  # not Linux, or no /proc: the machine is all there is to ask
    limits: list[MemoryLimit] = []
    for _, controllers, path in (line.split(":", 2) for line in lines if line.count(":") >= 2):
        if controllers in ("", "memory"):
            root = cgroup / controllers if controllers else cgroup
            inside = root / path.lstrip("/")
            limits += [
                left for group in (inside, *inside.parents) if group.is_relative_to(root) if (left := _left(group))
            ]
    return limits


def _left(group: Path) -> MemoryLimit | None:
    """v2's names, then v1's; None if the group has no limit or is not visible from here."""
    for limit_file, used in (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")):
        limit, usage = _number(group / limit_file), _number(group / used)
        if limit is not None and usage is not None and limit < NO_LIMIT:
            left = max(0, limit - usage + _cache(group / "memory.stat"))
            name = f"this container (limit {limit / (1 << 30):.2f} GiB)"
            return MemoryLimit(min(left, limit), name, limit, is_group=True)
    return None


def _cache(stat: Path) -> int:
    """Return the reclaimable bytes of cached files. In v1 child groups are counted under other names."""
    try:
        rows = dict(line.split() for line in stat.read_text().splitlines())
    except (OSError, ValueError):
        return 0
    return sum(int(rows.get(f"total_{name}", rows.get(name, 0))) for name in ("active_file", "inactive_file"))


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


# ---- what serving takes

GIB = 1 << 30
REQUESTS_BYTES = 32 << 20  # connections, requests and what malloc keeps of them; 48 streams of short prompts take 4 MiB


@dataclass(frozen=True, slots=True)
class MemoryEstimate:
    """Bytes needed in addition to the process's constant memory."""

    layers: int
    embedding: int  # with the head
    kv_pages: int
    workspace: int
    requests: int = 0  # of the host's memory

    @property
    def total(self) -> int:
        return self.layers + self.embedding + self.kv_pages + self.workspace + self.requests

    def by_part(self) -> str:
        """`layers 1.20 GiB, embedding and head 0.25 GiB, ...`, parts of no bytes left out."""
        parts = {
            "layers": self.layers,
            "embedding and head": self.embedding,
            "KV pages": self.kv_pages,
            "workspace": self.workspace,
            "requests": self.requests,
        }
        return ", ".join(f"{name} {_gib(size)}" for name, size in parts.items() if size)


def estimate_memory(
    spec: ModelSpec, kind: str, *, kv_pages: int, page_tokens: int, workspace_bytes: int = 0, ranks: int = 1,
    stages: int = 1, int4_kv: bool = False,
) -> MemoryEstimate:  # fmt: skip
    """Estimate what serving takes; adapters share the budget of the KV pages.

    `kind`: bf16, fp32, int8 or int4, what the cpu executor packs matrices as; a kind of `PLAIN`; or `CUDA_INT4`.
    `ranks`: processes of this machine that the model is split over; each has the embedding, and a key-value head that
    several have is there as often. `stages`: processes that it is cut into; the first has the embedding and the last
    one the head, tied or not.
    """
    copies = ranks - 1 + (stages > 1 and spec.tied_embeddings)
    return MemoryEstimate(
        layers=spec.layers * _layer_bytes(spec, kind),
        embedding=_embedding_bytes(spec, kind) + copies * packed_bytes(spec.vocab_size, spec.hidden_size, kind),
        kv_pages=kv_pages * page_bytes(spec, kind, page_tokens, int4_kv=int4_kv) * max(1, ranks // spec.kv_heads),
        workspace=workspace_bytes,
    )


def device_workspace(
    spec: ModelSpec, kind: str, *, rows: int, tokens: int, context: int, page_tokens: int, recorded: Iterable[int]
) -> int:
    """Estimate from below what the cuda executor takes beside weights and pages: page tables, logits, a step's rows.

    `rows`, `tokens`: most of a step; `recorded`: rows of captured steps, each with page tables of its own. What
    the libraries take is not in it.
    """
    tables = 4 * -(-context // page_tokens) * (rows + sum(recorded))
    logits = 2 * 4 * rows * spec.vocab_size  # and a copy with penalties
    widths = 2 * spec.hidden_size + spec.q_size + 2 * spec.kv_size + spec.mlp_size + spec.intermediate_size
    return tables + logits + tokens * widths * NUMBER_BYTES[kind] + 4 * context * spec.rotary_size


def page_bytes(spec: ModelSpec, kind: str, page_tokens: int, *, int4_kv: bool = False) -> int:
    """Size one KV page `[L, 2, N, P, D]`."""
    return spec.layers * page_tokens * kv_token_bytes(spec, kind, int4=int4_kv)


def check_memory(needed: MemoryEstimate, available: MemoryLimit) -> None:
    """Compare, for a runner with less would be killed by the kernel without a reason. Raises OutOfMemory."""
    if needed.total > available.n_bytes:
        raise OutOfMemory(
            f"serving needs {_gib(needed.total)} ({needed.by_part()}), and {available.limit} has "
            f"{_gib(available.n_bytes)} left: give it more memory, or ask for fewer KV pages"
        )


def _layer_bytes(spec: ModelSpec, kind: str) -> int:
    matrices = sum(packed_bytes(n_out, n_in, kind) for n_in, n_out in map(spec.projection, spec.family.projections))
    return matrices + 4 * vector_numbers(spec)


def _embedding_bytes(spec: ModelSpec, kind: str) -> int:
    """The head, and the embedding if it is not the head itself or read from the mapped file."""
    head = packed_bytes(spec.vocab_size, spec.hidden_size, kind)
    if kind in PLAIN:
        number = 0 if spec.tied_embeddings else PLAIN[kind]
    elif kind == CUDA_INT4:
        number = NUMBER_BYTES[kind]
    else:
        number = 4 if spec.dtype == "float16" else 0
    return head + spec.vocab_size * spec.hidden_size * number + 4 * spec.hidden_size


def _gib(size: int) -> str:
    return f"{size / GIB:.2f} GiB"
