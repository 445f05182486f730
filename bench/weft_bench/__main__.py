"""`python -m weft_bench NAME ...`: `weft bench NAME ...` without the command line's packages."""

import sys

from weft_bench.command import main

sys.exit(main(sys.argv[1:]))
