"""Accelerators, as their makers' data sheets give them: dense rates, without sparsity."""

from dataclasses import dataclass

GIB = 2**30


class UnknownHardware(ValueError):
    """The accelerator is unknown. The message lists the known accelerators."""


@dataclass(frozen=True, slots=True)
class Accelerator:
    """One accelerator. `flops` by dtype of the operands; `link_bytes_per_s`: to its peers, in one direction."""

    name: str
    memory_bytes: float
    bytes_per_s: float
    bf16_flops: float
    fp8_flops: float | None
    link_bytes_per_s: float
    processors: int  # streaming multiprocessors: what a product of few tiles leaves idle

    def flops(self, dtype: str) -> float:
        """Operations a second on operands of this dtype: bf16 units where there are none for fp8."""
        return self.fp8_flops if dtype == "fp8" and self.fp8_flops else self.bf16_flops


_PCIE_4, _PCIE_5, _NVLINK_3, _NVLINK_4 = 32e9, 64e9, 300e9, 450e9
ACCELERATORS = {
    accelerator.name: accelerator
    for accelerator in (
        Accelerator("A100-80G", 80 * GIB, 2.039e12, 312e12, None, _NVLINK_3, 108),
        Accelerator("H100", 80 * GIB, 3.35e12, 989e12, 1979e12, _NVLINK_4, 132),
        # Hopper with four stacks of HBM2e, as in MareNostrum 5: 2 TB/s.
        Accelerator("H100-64G", 64 * GIB, 2.02e12, 989e12, 1979e12, _NVLINK_4, 132),
        Accelerator("H200", 141e9, 4.8e12, 989e12, 1979e12, _NVLINK_4, 132),
        # GeForce: bf16 products that accumulate in fp32 run at half of the rate of fp16 ones.
        Accelerator("RTX-4090", 24 * GIB, 1.008e12, 165e12, 330e12, _PCIE_4, 128),
        # The server edition: 1,597 GB/s (the workstation's memory has 1,792).
        Accelerator("RTX-PRO-6000", 96 * GIB, 1.597e12, 503e12, 1007e12, _PCIE_5, 188),
    )
}


def accelerator(name: str) -> Accelerator:
    """The accelerator of this name. Raises UnknownHardware."""
    if name not in ACCELERATORS:
        raise UnknownHardware(f"hardware {name!r}: choose among {', '.join(ACCELERATORS)}")
    return ACCELERATORS[name]
