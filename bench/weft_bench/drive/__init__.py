"""Drivers: what plays work through an engine, a stack, a peer or the simulator, and times it."""
