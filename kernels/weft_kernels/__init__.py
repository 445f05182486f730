"""LoRA kernels over a segment plan: one public operator (`lora.add_lora`), several implementations.

Knows nothing of serving.
"""
