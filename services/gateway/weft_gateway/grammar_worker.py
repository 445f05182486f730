"""A process that builds and compiles grammars, so that a hostile one costs no more than this process.

Lines of JSON: a `Form` as a list on standard input; [grammar, ""] or ["", what is wrong] on standard output.
`shell/grammar_checker.py` ends it when an answer takes too long.
"""

import json
import resource
import sys
from pathlib import Path

from weft_gateway.openai.structured_outputs import Form, grammar_of

MEMORY_BYTES = 64 << 20  # for all that grammars take


def main() -> None:
    """Until standard input ends."""
    limit = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize() + MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for line in sys.stdin.buffer:
        try:
            answer = grammar_of(Form(*json.loads(line))), ""
        except ValueError as error:
            answer = "", str(error)
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
