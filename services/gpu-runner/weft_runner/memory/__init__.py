"""Tensors that live longer than a step: KV pages and adapters."""
