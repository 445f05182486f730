"""`python -m weft_batch`."""

import sys

from weft.process import uncollected_imports

with uncollected_imports():
    from weft_batch.main import main

sys.exit(main())
