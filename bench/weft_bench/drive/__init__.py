"""Drivers: what plays work through an engine, a stack, a peer or the simulator, and times it."""

from weft_bench.drive.engine import Batch, Model, Sizes, Subject, base, decode, load_all, settings, steady

__all__ = ["Batch", "Model", "Sizes", "Subject", "base", "decode", "load_all", "settings", "steady"]
