"""`python -m weft_devcluster`."""

import sys

from weft_devcluster.main import main

sys.exit(main(sys.argv[1:]))
