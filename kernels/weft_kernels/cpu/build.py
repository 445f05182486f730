"""The library, compiled and linked into a folder. `build_cache` or the wheel keeps it.

A level that this compiler cannot compile is left out, and the plain units are told; the others are built.
"""

import hashlib
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from weft_kernels.cpu import sources
from weft_kernels.cpu.compiler import Compiler, Finished, Limit, run_all, trimmed
from weft_kernels.cpu.errors import NativeUnavailable
from weft_kernels.cpu.sources import Sources
from weft_kernels.cpu.threads import cpu_quota

LIBRARY = "weft_cpu.so"
CHECKSUM = "weft_cpu.sha256"
LIMIT_S = 900.0  # all of it; a loaded machine with one core needs about a ninth
AT_ONCE = 2  # gcc 12 takes up to 340 MiB for a unit

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Built:
    """The library, beside its checksum. `left_out`: levels that the compiler could not compile, and what it said."""

    library: Path
    left_out: Mapping[str, str]
    seconds: float


def build_library(what: Sources, compiler: Compiler, folder: Path, *, limit_s: float = LIMIT_S) -> Built:
    """Compile `what` in an existing, empty folder of ours. Raises NativeUnavailable with the compiler's message."""
    limit, digest = Limit(limit_s), what.digest()
    with compiler.at_hand(folder, limit) as ready:
        log.info(
            "building the CPU kernels, once: about half a minute",
            extra={"kv": {"compiler": str(compiler), "levels": len(what.levels())}},
        )
        objects, left_out = compile_all(what, ready, folder, limit)
        # Plain units first, then levels from the worst up. Of an inline function that several units have, the linker
        # keeps the first: it is always one that each CPU can run that comes there at all.
        command = (*ready.command, *sources.LINK_FLAGS, *ready.link_flags, *map(str, objects), "-o", LIBRARY)
        (end,) = run_all([command], folder, at_once=1, limit=limit)
        if end.code:
            raise _failed("linking", end)
        library = folder / LIBRARY
    if what.digest() != digest:
        raise NativeUnavailable(f"{what.folder} changed while it was compiled: start again")
    (folder / CHECKSUM).write_text(checksum(library))
    built = Built(library, left_out, round(limit.taken_s(), 1))
    for level, why in left_out.items():
        log.warning("the CPU kernels lack a level", extra={"kv": {"level": level, "compiler_says": why}})
    log.info("CPU kernels built", extra={"kv": {"seconds": built.seconds, "bytes": library.stat().st_size}})
    return built


def compile_all(what: Sources, compiler: Compiler, folder: Path, limit: Limit) -> tuple[list[Path], Mapping[str, str]]:
    """Compile all units. Returns (objects in order of linking, `left_out` of `Built`). Raises NativeUnavailable."""
    levels: dict[str, Path] = {}
    left_out: dict[str, str] = {}
    units = what.levels()
    ended = _compile(compiler, {unit: what.flags(level) for level, unit in units.items()}, folder, limit)
    for level, (made, end) in zip(units, ended, strict=True):
        if end.code == 0:
            levels[level] = made
        elif level == sources.PORTABLE or end.died:
            raise _failed(units[level].name, end)
        else:
            left_out[level] = trimmed(end.output)
    compiled = sum(1 << number for number, level in enumerate(sources.LEVELS) if level in levels)
    definitions = (f'-DWEFT_SOURCE_HASH="{what.digest()}"', f"-DWEFT_COMPILED={compiled}")
    plain = _compile(compiler, dict.fromkeys(what.plain(), definitions), folder, limit)
    for made, end in plain:
        if end.code:
            raise _failed(f"{made.stem}.cpp", end)
    return [*(made for made, _ in plain), *levels.values()], left_out


def checksum(library: Path) -> str:
    """Hash the file with SHA-256. Loading a file that was cut short ends the process, so that is found out before."""
    return hashlib.sha256(library.read_bytes()).hexdigest()


def _compile(
    compiler: Compiler, units: Mapping[Path, tuple[str, ...]], folder: Path, limit: Limit
) -> list[tuple[Path, Finished]]:
    """Compile each unit with flags of its own. Returns the objects, and how each compiler's run ended."""
    objects = [folder / f"{unit.stem}.o" for unit in units]
    commands = [
        (*compiler.command, *sources.FLAGS, *flags, "-c", str(unit), "-o", f"{unit.stem}.o")
        for unit, flags in units.items()
    ]
    return list(zip(objects, run_all(commands, folder, at_once=min(AT_ONCE, cpu_quota()), limit=limit), strict=True))


def _failed(what: str, end: Finished) -> NativeUnavailable:
    return NativeUnavailable(f"the compiler failed ({what}): {trimmed(end.output) or f'exit code {end.code}'}")
