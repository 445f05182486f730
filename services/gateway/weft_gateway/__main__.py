"""`python -m weft_gateway`"""

import sys

from weft_gateway.main import main

sys.exit(main())
