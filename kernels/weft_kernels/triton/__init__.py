"""Kernels for NVIDIA GPUs, in Triton. With TRITON_INTERPRET=1 from before Triton's import, on a CPU."""
