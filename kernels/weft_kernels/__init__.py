"""LoRA kernels over a segment plan (`plan`): `lora` in plain torch, `cpu` native, `triton` for GPUs. No serving."""
