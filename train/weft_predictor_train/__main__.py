import sys

from weft_predictor_train.training import main

sys.exit(main())
