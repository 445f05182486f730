"""A process that builds and compiles grammars, so that a hostile one costs no more than this process.

Lines of JSON: a `Form` as a list on standard input; [grammar, ""] or ["", what is wrong] on standard output.
A form that takes more than CPU_S of processor time ends it by SIGPROF, one that takes too much memory by an error: the
time of a machine that is busy with others does not count. `shell/grammar_checker.py` starts it again.
"""

import json
import resource
import signal
import sys
from pathlib import Path

from weft_gateway.openai.structured_outputs import Form, grammar_of

CPU_S = 1.0  # for one grammar; usual ones take a millisecond
MEMORY_BYTES = 64 << 20  # for all that grammars take


def main() -> None:
    """Until standard input ends."""
    limit = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize() + MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for line in sys.stdin.buffer:
        signal.setitimer(signal.ITIMER_PROF, CPU_S)
        try:
            answer = grammar_of(Form(*json.loads(line))), ""
        except ValueError as error:
            answer = "", str(error)
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
