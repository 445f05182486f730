import sys

from weft.process import long_lived_imports

with long_lived_imports():
    from weft_scheduler.main import main

sys.exit(main())
