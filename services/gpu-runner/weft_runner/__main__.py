"""`python -m weft_runner`."""

import sys

from weft_runner.main import main

sys.exit(main())
