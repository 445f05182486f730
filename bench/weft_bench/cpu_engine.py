"""Names of `drive.engine` under their former module."""

from weft_bench.drive.engine import PAGE_TOKENS, Offload, Sizes, Subject, pages_of, settings
from weft_stage.playing import Ask, Folders, Life, Played

__all__ = ["PAGE_TOKENS", "Ask", "Folders", "Life", "Offload", "Played", "Sizes", "Subject", "pages_of", "settings"]
