"""`python -m weft_depot`"""

import sys

from weft.process import keep_heap_small, long_lived_imports

with long_lived_imports():
    from weft_depot.main import main

keep_heap_small()
sys.exit(main())
