"""Capacity planning: a cluster of machines with roles, simulated by iterations, fast enough to compare many designs."""
