"""Kernels for NVIDIA GPUs, in Triton. With TRITON_INTERPRET=1 from before Triton's import, on a CPU.

Others take its modules from here, `from weft_kernels.triton import lora`. All but `entries` need torch.
"""
