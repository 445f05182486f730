"""An adapter or a base model as an artifact: read with bounds, verified, named by its content, kept by digest.

Standard library and numpy only. Nothing here trusts what it reads, and nothing here executes it: safetensors headers
and JSON are data, pickles are refused by name.
"""
