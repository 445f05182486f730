"""`python -m fuzz.child TARGET SEEDS... OPTIONS`: one target under libFuzzer, with the bounds of each input."""

import logging
import resource
import sys
import time
from pathlib import Path

import atheris  # pyright: ignore[reportMissingImports] (`make fuzz` installs it)

CPU_S, BYTES = 1.0, 64 << 20  # of one input

with atheris.instrument_imports(include=["weft", "weft_gateway", "weft_depot", "weft_batch", "weft_scheduler",
                                         "weft_supervisor", "weft_operator", "weft_runner"]):  # fmt: skip
    from fuzz.targets import TARGETS


class TooMuch(Exception):
    """An input takes more time or memory than one may."""


def main() -> None:
    target = TARGETS[sys.argv[1]]
    logging.disable()  # thousands of refusals a second are no news
    for example in target.examples:
        target.run(example)  # whatever is imported or built at first

    def bounded(data: bytes) -> None:
        before, begun = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
        target.run(data)
        spent_s = time.process_time() - begun
        grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
        if spent_s > CPU_S or grown > BYTES:
            raise TooMuch(f"{spent_s:.2f} s of CPU, {grown >> 20} MiB more at the most")

    for number, example in enumerate(target.examples):
        (Path(sys.argv[2]) / f"example-{number}").write_bytes(example)
    atheris.Setup([sys.argv[0], *sys.argv[2:]], bounded)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
