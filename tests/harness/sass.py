"""Machine code as `nvdisasm -c` prints it: what a kernel keeps in local memory, and how much of that inside of loops.

What registers do not hold goes to local memory ("spills"), as arrays do that are indexed by a variable. Put away before
a loop and fetched after it, it costs nothing to speak of, and the assembler does so to fit one block more on an SM.
Inside of a loop every round pays.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

_LABEL = re.compile(r"^(\.L_\w+):")
_INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(@!?U?P\w+\s+)?([A-Z][\w.]*)(.*?);")
_TARGET = re.compile(r"`\((\.L_\w+)\)")
_BRANCHES = ("BRA", "JMP", "EXIT", "RET")
_WIDTHS = {"U8": 1, "S8": 1, "U16": 2, "S16": 2, "64": 8, "128": 16}


class Local(NamedTuple):
    """Bytes of a thread, each instruction once."""

    stored: int = 0
    loaded: int = 0
    in_loops: int = 0  # of both


@dataclass(slots=True)
class _Block:
    """Instructions from a label or a branch up to the next; `next`: labels that it may go to."""

    next: list[str] = field(default_factory=list)
    stored: int = 0
    loaded: int = 0


def local_memory(disassembly: str) -> Local:
    """Count the local memory of all functions together."""
    blocks = _blocks(disassembly)
    looped = [block for name, block in blocks.items() if (block.stored or block.loaded) and _again(name, blocks)]
    return Local(
        sum(block.stored for block in blocks.values()),
        sum(block.loaded for block in blocks.values()),
        sum(block.stored + block.loaded for block in looped),
    )


def _blocks(disassembly: str) -> dict[str, _Block]:
    name, ended, goes_on = "begin", False, True
    blocks = {name: _Block()}
    for number, line in enumerate(disassembly.splitlines()):
        label, found = _LABEL.match(line), _INSTRUCTION.match(line)
        if label or (found and ended):
            following = label[1] if label else f"line {number}"
            if goes_on:
                blocks[name].next.append(following)
            name, ended, goes_on = following, False, True
            blocks[name] = _Block()
        if found:
            _add(blocks[name], found[2], found[3])
            ended = found[2].split(".")[0] in _BRANCHES
            goes_on = not ended or bool(found[1])
    return blocks


def _add(block: _Block, operation: str, operands: str) -> None:
    """Add an instruction. A BSSY tells where its BSYNC goes, so its block counts as going there."""
    kind, *modifiers = operation.split(".")
    block.next += _TARGET.findall(operands)
    n_bytes = next((_WIDTHS[x] for x in modifiers if x in _WIDTHS), 4)
    block.stored += n_bytes if kind == "STL" else 0
    block.loaded += n_bytes if kind == "LDL" else 0


def _again(name: str, blocks: Mapping[str, _Block]) -> bool:
    """True where a way leads from this block back to it."""
    seen, ahead = set[str](), list(blocks[name].next)
    while ahead:
        if (at := ahead.pop()) == name:
            return True
        if at in blocks and at not in seen:
            seen.add(at)
            ahead += blocks[at].next
    return False
