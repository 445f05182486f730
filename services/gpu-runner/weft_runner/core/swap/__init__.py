"""KV in host memory."""
