"""`python -m weft_bench.batching_runner MECHANISM FLAGS`: a runner of that batching mechanism."""

import sys

from weft_runner.core import Batching
from weft_runner.main import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[2:], batching=Batching(sys.argv[1])))
