"""`python -m weft_batch`."""

import sys

from weft.process import long_lived_imports

with long_lived_imports():
    from weft_batch.main import main

sys.exit(main())
