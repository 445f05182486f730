"""Weft's gateway: the OpenAI API in front of the cluster. Only the gateway holds the tokens emitted to a client."""
