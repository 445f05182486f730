# pyright: reportUnusedImport=false
"""The pure part: the next line to run, the end of a batch, and the meaning of an input line.

Other packages import these names from here and nothing else: the modules of this package may change.
"""

from weft_batch.core.batches import (
    Added,
    Batches,
    BatchGone,
    CancelAsked,
    Finalize,
    Give,
    LineCounters,
    LineFailed,
    LinesStored,
    NamespaceFigures,
    StoreResult,
    Validate,
    Validated,
)
from weft_batch.core.input_lines import BadLine, GoodLine, InputReader, LineIndex, LineSplitter, compression, read_line
