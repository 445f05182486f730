"""FlexGen's policy (section 4.3): eleven variables, in which form numbers lie, and the bytes that each tier may have.

**Variables.** A block is `block` sequences (bls), passed through each layer in device batches of `batch` sequences
(gbs). Three triples say which share of the weights (w), of the activations between layers (h) and of the KV (c) lies
on the device (g), on the host (c) and on the disk (d).

**Tiers.** The device computes. Without a GPU it is the memory given to the engine, and device and host are one
memory: the host's budget is then 0. On a GPU all three are real.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Literal

from weft_runner.errors import PolicyInvalid

EXACT = 1e-6  # by which a triple may miss 1: a solver's tolerance
MAX_BLOCK_SEQUENCES = 4096
MAX_TIER_BYTES = 1 << 50  # no limit

WeightsFormat = Literal["bf16", "fp32", "int8", "int4"]
KvFormat = Literal["bf16", "fp32", "int4"]


class MemoryTier(StrEnum):
    """The tiers on which bytes can lie, the fastest first."""

    DEVICE = "device"
    HOST = "host"
    DISK = "disk"


@dataclass(frozen=True, slots=True)
class Shares:
    """Shares of one kind of bytes on the three tiers. Each is from 0 to 1; they sum to 1."""

    device: float
    host: float
    disk: float

    @classmethod
    def of(cls, by_tier: Mapping[MemoryTier, float]) -> "Shares":
        """Return the shares of amounts of any unit; all on the device where there are none."""
        total = sum(by_tier.values())
        if total <= 0:
            return cls(1.0, 0.0, 0.0)
        return cls(*(by_tier.get(tier, 0.0) / total for tier in MemoryTier))


@dataclass(frozen=True, slots=True)
class Policy:
    """The eleven variables: bls, gbs, wg wc wd, hg hc hd, cg cc cd."""

    block: int
    batch: int
    weights: Shares
    activations: Shares
    kv: Shares


@dataclass(frozen=True, slots=True)
class Formats:
    """How numbers lie, and what else changes the bytes that move.

    `cpu_attention`: scores are computed on the host where KV lies there (section 4.3, delegation).
    `executor`: whose packed matrices they are.
    `sparse_attention`: a decode step reads the values of the best tenth of the keys alone (section 5).
    """

    weights: WeightsFormat = "bf16"
    kv: KvFormat = "bf16"
    cpu_attention: bool = False
    sparse_attention: bool = False
    executor: Literal["cpu", "cuda"] = "cpu"


@dataclass(frozen=True, slots=True)
class Budgets:
    """Bytes that an engine may have of each tier."""

    device_bytes: int
    host_bytes: int = 0
    disk_bytes: int = MAX_TIER_BYTES

    def of(self, tier: MemoryTier) -> int:
        """Return the bytes of one tier."""
        return {
            MemoryTier.DEVICE: self.device_bytes,
            MemoryTier.HOST: self.host_bytes,
            MemoryTier.DISK: self.disk_bytes,
        }[tier]


def check_shares(shares: Shares, name: str) -> None:
    """Check one triple. Raises PolicyInvalid: a share outside [0, 1], or a sum that is not 1."""
    parts = (shares.device, shares.host, shares.disk)
    if not all(math.isfinite(part) and -EXACT <= part <= 1 + EXACT for part in parts):
        raise PolicyInvalid(f"{name}: shares {parts} are not all from 0 to 1")
    if abs(sum(parts) - 1) > EXACT:
        raise PolicyInvalid(f"{name}: shares {parts} sum to {sum(parts):.6f}, not to 1")


def check_policy(policy: Policy) -> None:
    """Check the batch, the block and all three triples. Raises PolicyInvalid."""
    if not 1 <= policy.batch <= policy.block <= MAX_BLOCK_SEQUENCES:
        raise PolicyInvalid(
            f"a device batch of {policy.batch} in a block of {policy.block}: "
            f"from 1 to the block, at most {MAX_BLOCK_SEQUENCES}"
        )
    for name, shares in (("weights", policy.weights), ("activations", policy.activations), ("KV", policy.kv)):
        check_shares(shares, name)


def check_budgets(budgets: Budgets) -> None:
    """Check that each tier's bytes are possible, and that the device has some. Raises PolicyInvalid."""
    for tier in MemoryTier:
        if not 0 <= budgets.of(tier) <= MAX_TIER_BYTES:
            raise PolicyInvalid(f"a budget of {budgets.of(tier)} bytes of the {tier}")
    if not budgets.device_bytes:
        raise PolicyInvalid("the device has no bytes")


def policy_of(fields: Mapping[str, Any]) -> Policy:
    """Read `asdict`'s form. Raises PolicyInvalid."""
    try:
        shares = {name: Shares(**fields[name]) for name in ("weights", "activations", "kv")}
        policy = Policy(block=fields["block"], batch=fields["batch"], **shares)
    except (KeyError, TypeError) as error:
        raise PolicyInvalid(f"a policy without {error}") from error
    check_policy(policy)
    return policy
