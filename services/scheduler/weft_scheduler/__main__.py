import sys

from weft_scheduler.main import main

sys.exit(main())
