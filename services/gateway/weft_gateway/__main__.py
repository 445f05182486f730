"""`python -m weft_gateway`"""

import sys

from weft.process import uncollected_imports

with uncollected_imports():
    from weft_gateway.main import main

sys.exit(main())
