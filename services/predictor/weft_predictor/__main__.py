import sys

from weft_predictor.main import main

sys.exit(main())
