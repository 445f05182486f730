import sys

from weft_supervisor.main import main

sys.exit(main())
