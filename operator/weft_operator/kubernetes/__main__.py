import sys

from weft_operator.kubernetes.main import main

sys.exit(main())
