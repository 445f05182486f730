"""`python -m weft_stage.thread_runner FLAGS`: a runner of one thread, so that several share a machine's cores."""

import sys

from weft_runner.main import main

if __name__ == "__main__":
    sys.exit(main([*sys.argv[1:], "--threads", "1"]))
