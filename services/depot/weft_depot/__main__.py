"""`python -m weft_depot`"""

import sys

from weft.process import uncollected_imports

with uncollected_imports():
    from weft_depot.main import main

sys.exit(main())
