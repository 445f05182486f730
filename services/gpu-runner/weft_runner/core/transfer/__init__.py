"""KV between runners."""
