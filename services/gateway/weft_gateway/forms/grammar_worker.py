"""A process that builds and compiles grammars. A hostile grammar costs no more than this process.

Lines of JSON: a `StructuredOutput` as a list on standard input; [grammar, "", parameter] or ["", fault, parameter] on
the output. A grammar beyond CPU_S of processor time ends the process by SIGPROF (time of a busy machine does not
count). A grammar beyond its memory ends the process by SIGABRT. `grammar_checker` starts it again.
"""

import json
import resource
import signal
import sys
from pathlib import Path

from weft.grammars import one_line
from weft_gateway.forms.structured_outputs import StructuredOutput, grammar_of
from weft_gateway.forms.tool_grammars import FaultyTool

CPU_S = 1.0  # per grammar; usual grammars take a millisecond
MEMORY_BYTES = 64 << 20  # for all grammars together
TOO_LARGE = "it takes too much memory to compile"


def main() -> None:
    """Answer lines until standard input ends."""
    limit = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize() + MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for line in sys.stdin.buffer:
        signal.setitimer(signal.ITIMER_PROF, CPU_S)
        output = StructuredOutput(*json.loads(line))
        grammar, fault, param = "", "", output.param
        try:
            grammar = grammar_of(output)
        except FaultyTool as error:
            fault, param = str(error), error.param
        except ValueError as error:
            fault = f"{param}: {error}"
        except MemoryError:
            fault = f"{param}: {TOO_LARGE}"
        except KeyboardInterrupt:
            return
        except BaseException as error:  # noqa: BLE001 (it is named; also a panic of the library, which is no Exception)
            fault = f"{param}: it cannot be compiled: {type(error).__name__}: {one_line(str(error))}"
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        sys.stdout.write(json.dumps((grammar, fault, param)) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
