"""`python -m harness.cluster`."""

import sys

from harness.cluster.main import main

sys.exit(main(sys.argv[1:]))
