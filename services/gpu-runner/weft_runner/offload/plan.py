"""What an executor obeys: which packed matrix lies where, a block's sequences by tier, and how large its buffers are.

A layer has four packed matrices (`MATRICES`, in the order in which a step reads them) and lies in whole matrices; the
head is one more, which passes in pieces no larger than a matrix. What is not on the device passes through the ring:
`buffers` times the largest streamed layer. With two of them one is read while the one before is computed. KV lies in
whole sequences: the first `kv_device` places of a block have theirs on the device, the next `kv_host` on the host, the
others on the disk.
Activations lie on one tier.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from weft_runner.errors import PolicyInvalid
from weft_runner.offload.machine import MachineRates
from weft_runner.offload.policy import Budgets, Formats, MemoryTier, Policy, check_budgets, check_policy, policy_of

MATRICES = ("qkv", "o", "gate_up", "down")
BUFFERS = (2, 1)  # of the largest streamed layer: with one, nothing is read while a layer computes


def kv_buffers(buffers: int) -> int:
    """Buffers for a device batch's part of a layer of KV: one more than for weights, which stores what was written."""
    return buffers + 1 if buffers > 1 else 1


@dataclass(frozen=True, slots=True)
class WeightTiers:
    """`layers[i][m]`: where matrix `MATRICES[m]` of layer i of this rank lies. `head`: None on a rank without it."""

    layers: tuple[tuple[MemoryTier, MemoryTier, MemoryTier, MemoryTier], ...]
    head: MemoryTier | None

    def of_groups(self, n_groups: int) -> tuple[tuple[MemoryTier, ...], ...]:
        """Return the tier of each matrix of the layers, then of the head's pieces. Raises PolicyInvalid."""
        pieces = n_groups - len(self.layers)
        if pieces < 0 or (pieces > 0) != (self.head is not None):
            whole = f"{len(self.layers)} layers {'with' if self.head else 'without'} a head"
            raise PolicyInvalid(f"the plan is of {whole}, not of these")
        return (*self.layers, *(((self.head,),) * pieces if self.head is not None else ()))


@dataclass(frozen=True, slots=True)
class Usage:
    """Bytes of one tier by what they are for."""

    weights: int = 0
    kv: int = 0
    activations: int = 0
    adapters: int = 0
    ring: int = 0
    workspace: int = 0

    @property
    def total(self) -> int:
        return self.weights + self.kv + self.activations + self.adapters + self.ring + self.workspace


@dataclass(frozen=True, slots=True)
class PassTime:
    """Seconds of one pass over the layers (FlexGen, section 4.2): each stream's own, and what the pass takes in all."""

    disk_read_s: float
    to_device_s: float
    to_host_s: float
    disk_write_s: float
    compute_s: float
    pass_s: float


@dataclass(frozen=True, slots=True)
class BlockTime:
    """Time of a block of sequences: prompts in `prompt_passes` passes and then a pass for each further token.

    `prompt`: all prompt passes together; `token`: one pass with KV of its average length. `block_s` counts all;
    `bound_s`: what disk bytes or FLOPs alone allow for this policy; `token_1_s`: a token of one request alone.
    """

    prompt: PassTime
    token: PassTime
    block_s: float
    bound_s: float
    tokens_per_s: float
    token_1_s: float


@dataclass(frozen=True, slots=True)
class OffloadPlan:
    """`prompt_passes`: passes over the layers in which the prompts of a full block are computed (FlexGen: 1).

    `batch_tokens`: of a device batch, for its workspace. `usage`: of each tier, within the budgets.
    """

    policy: Policy
    formats: Formats
    budgets: Budgets
    tiers: WeightTiers
    activations: MemoryTier
    kv_device: int
    kv_host: int
    prompt_passes: int
    batch_tokens: int
    buffers: int
    usage: dict[MemoryTier, Usage]
    predicted: BlockTime
    relaxed_s: float  # of a block by the linear program: no rounded policy of this block and batch is faster

    def activation_rows(self, rows: int, tier: MemoryTier = MemoryTier.DISK) -> int:
        """Return how many of `rows` rows between layers lie on that tier."""
        return rows if self.activations is tier else 0

    def kv_pages(self, page_bytes: int, tier: MemoryTier = MemoryTier.DISK) -> tuple[int, int]:
        """Return the KV pages on that tier, and how many of them a device batch has."""
        pages = -(-self.usage[tier].kv // page_bytes)
        on_disk = self.policy.block - self.kv_device - self.kv_host
        sequences = self.kv_host if tier is MemoryTier.HOST else on_disk
        return pages, -(-pages * min(self.policy.batch, sequences) // max(1, sequences))


@dataclass(frozen=True, slots=True)
class OffloadPolicy:
    """What a runner found at its start: each rank's machine and plan; no plans: as many weights stay as fit."""

    machines: Mapping[int, MachineRates]
    plans: Mapping[int, OffloadPlan]


def check_plan(plan: OffloadPlan) -> None:
    """The laws: the policy's own, no tier above its budget, every sequence's KV on one tier. Raises PolicyInvalid."""
    check_policy(plan.policy)
    check_budgets(plan.budgets)
    for tier in MemoryTier:
        if (used := plan.usage[tier].total) > plan.budgets.of(tier):
            raise PolicyInvalid(f"{used} bytes on the {tier}, which has {plan.budgets.of(tier)}")
    if min(plan.kv_device, plan.kv_host) < 0 or plan.kv_device + plan.kv_host > plan.policy.block:
        raise PolicyInvalid(f"KV of {plan.kv_device} and {plan.kv_host} of {plan.policy.block} sequences")
    if not 1 <= plan.prompt_passes <= plan.policy.block:
        raise PolicyInvalid(f"prompts of {plan.policy.block} sequences in {plan.prompt_passes} passes")


def plan_of(fields: Mapping[str, Any]) -> OffloadPlan:
    """Read `asdict`'s form, also after JSON. Raises PolicyInvalid."""
    try:
        tiers, predicted = fields["tiers"], fields["predicted"]
        head, whole = tiers["head"], dict[str, Any](predicted)
        whole |= {name: PassTime(**predicted[name]) for name in ("prompt", "token")}
        plan = OffloadPlan(
            policy=policy_of(fields["policy"]),
            formats=Formats(**fields["formats"]),
            budgets=Budgets(**fields["budgets"]),
            tiers=WeightTiers(
                tuple((MemoryTier(q), MemoryTier(o), MemoryTier(g), MemoryTier(d)) for q, o, g, d in tiers["layers"]),
                head and MemoryTier(head),
            ),
            activations=MemoryTier(fields["activations"]),
            usage={MemoryTier(tier): Usage(**used) for tier, used in fields["usage"].items()},
            predicted=BlockTime(**whole),
            **{
                name: fields[name]
                for name in ("kv_device", "kv_host", "prompt_passes", "batch_tokens", "buffers", "relaxed_s")
            },
        )
    except (KeyError, TypeError, ValueError) as error:
        raise PolicyInvalid(f"a plan that is not whole: {error!r}") from error
    check_plan(plan)
    return plan
