"""`weft conformance`: what a server of LoRA adapters promises, checked by asking it."""
