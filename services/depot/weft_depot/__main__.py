"""`python -m weft_depot`"""

import sys

from weft.process import give_large_blocks_back, long_lived_imports

give_large_blocks_back()
with long_lived_imports():
    from weft_depot.main import main

sys.exit(main())
