"""`python -m weft_stage.trace_runner TABLE STEP_MS BEST_BATCH FLAGS`: a runner whose executor is a `TraceExecutor`."""

import sys
from pathlib import Path

from weft_runner.main import main
from weft_stage.trace_executor import Pace, TraceExecutor, read_table

if __name__ == "__main__":
    answers, pace = read_table(Path(sys.argv[1])), Pace(int(sys.argv[2]) / 1e3, int(sys.argv[3]))
    sys.exit(main(sys.argv[4:], lambda executor: TraceExecutor(executor, answers, pace)))
