# pyright: reportUnusedImport=false
"""What the model computes: its description, its weights, the executors and sampling.

Others take these names from here; modules that need torch, and executors, are left out.
"""
