import sys

from weft.process import uncollected_imports

with uncollected_imports():
    from weft_scheduler.main import main

sys.exit(main())
