"""Measure how hard Weft's texts are to read: `python -m weft_english` prints a table by package.

`texts` reads the sentences and names of a file. `counts` counts the faults. `tests/unit/project/test_english.py`
compares the counts with their ceilings.
"""
