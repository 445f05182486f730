import sys

from weft.process import uncollected_imports

with uncollected_imports():
    from weft_supervisor.main import main

sys.exit(main())
