"""`python -m cluster`."""

import sys

from cluster.main import main

sys.exit(main(sys.argv[1:]))
