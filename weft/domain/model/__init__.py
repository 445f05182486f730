"""A base model and the adapters that fit it, described once: configuration, tensor names, safetensors header."""
