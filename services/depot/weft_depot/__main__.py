"""`python -m weft_depot`"""

import sys

from weft_depot.main import main

sys.exit(main())
