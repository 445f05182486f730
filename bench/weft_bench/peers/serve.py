"""The worker's end of the pipe: PYTHON serve.py MODULE. The Python of a peer need not have weft.

The first line on standard input is the work, a JSON object for `load` of MODULE, which is a module beside this file.
`load` returns versions and a function. The versions are answered as {"ready": versions}. Each further line holds the
arguments of the function, which returns the answer. Seconds are added to an answer without them. All that the engine
prints goes to standard error.

The work of an engine: {"base": folder, "adapters": [folder or null of each row], "max_rank", "context_tokens" of a row,
"batch_tokens" of a pass, "kv_gib", "threads"}, and fields of the module. Arguments: {"prompts": [tokens of each row],
"tokens": of each answer}. Answer: {"seconds", "rows": [[tokens, adapter] of each row]}.
"""

import json
import os
import sys
import time
from importlib import import_module


def main(module: str) -> None:
    """Serve until standard input ends."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    versions, run = import_module(module).load(json.loads(sys.stdin.readline()))
    print(json.dumps({"ready": versions}), file=answers, flush=True)
    for line in sys.stdin:
        arguments, started = json.loads(line), time.perf_counter()
        answer = run(**arguments)
        print(json.dumps({"seconds": time.perf_counter() - started, **answer}), file=answers, flush=True)
    os._exit(0)  # the threads of some engines do not end


if __name__ == "__main__":
    main(sys.argv[1])
