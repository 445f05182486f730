"""`python -m weft_batch`."""

import sys

from weft_batch.main import main

sys.exit(main())
