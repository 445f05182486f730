"""`python -m weft_bench.trace_runner TABLE FLAGS`: a runner whose executor ends answers where the table says."""

import sys
from pathlib import Path

from weft_bench.trace_executor import TraceExecutor, read_table
from weft_runner.main import main

if __name__ == "__main__":
    answers = read_table(Path(sys.argv[1]))
    sys.exit(main(sys.argv[2:], lambda executor: TraceExecutor(executor, answers)))
