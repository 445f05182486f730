"""What the scripts of this folder ask the quickstart, and the right answers. `python use_NAME.py URL`, with `/v1`."""

import sys
from pathlib import Path

URL, KEY = sys.argv[1], "unused"
MODEL, JSON_MODEL = "acme/upper", "initech/json"
MODEL_FOLDER = str(Path(__file__).parents[3] / "examples" / "quickstart" / "model")
TEXT = "Weft serves 6 adapters on 1 model"
ANSWER = TEXT.upper()
WORDS = TEXT.split()  # JSON_MODEL answers {"words": WORDS}
CITIES = ("Rome", "Oslo")
