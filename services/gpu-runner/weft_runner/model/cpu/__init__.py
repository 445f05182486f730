"""The cpu executor: packed weights and adapters for the native kernels."""
