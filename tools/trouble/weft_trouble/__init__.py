"""Benchmarks that assert: faults, soaks, crowds of clients, histories and side channels."""
