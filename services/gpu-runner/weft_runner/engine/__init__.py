# pyright: reportUnusedImport=false
"""How steps run: built of batches, and one loop that schedules, launches, completes and accounts for them."""

from weft_runner.engine.builder import StepBuilder
