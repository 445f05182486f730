"""The cuda executor: Triton kernels, CUDA graphs, adapters in KV pages."""
