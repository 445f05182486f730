"""What touches the outside: HTTP, gRPC streams, tokenizer threads, metrics and logs around the machine of `core`."""
