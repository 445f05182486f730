"""Weft's gateway: the OpenAI API in front of the cluster. It alone holds what was emitted to a client."""
