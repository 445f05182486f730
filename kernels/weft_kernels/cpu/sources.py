"""The sources of the library and how they are compiled: one translation unit for each instruction level, plain ones for
the rest.

A level's own flags reach its own unit only, so the library runs on any CPU of its architecture and selects a level at
run time. No -march=native and no -ffast-math: which machine compiled it, and which runs it, must not show in the bits.
"""

import hashlib
import platform
from dataclasses import dataclass, replace
from pathlib import Path

FLAGS = (
    "-std=c++17", "-O3", "-fPIC", "-fvisibility=hidden", "-ffp-contract=off", "-fno-math-errno", "-fno-exceptions",
    "-pthread",
)  # fmt: skip
LINK_FLAGS = ("-shared", "-pthread", "-Wl,--no-undefined")

# Of a level that this CPU will not take. Without optimization g++ 15 and later check what the C++ library takes for
# granted, by a function of its runtime, which our library has no need of.
_UNUSED = ("-O0", "-D_GLIBCXX_NO_ASSERTIONS")
_AVX512 = ("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mfma")
LEVELS: dict[str, tuple[str, ...]] = {  # worst first, as in weft_cpu.h
    "portable": (),
    "avx2": ("-mavx2", "-mfma", "-mf16c"),
    "avx512": _AVX512,
    "avx512_bf16": (*_AVX512, "-mavx512bf16"),
    "amx_bf16": (*_AVX512, "-mavx512bf16", "-mamx-tile", "-mamx-bf16"),
}
PORTABLE = "portable"
_X86 = ("x86_64", "amd64", "i686", "i386")


@dataclass(frozen=True, slots=True)
class Sources:
    """A folder of `level_<name>.cpp`, plain `*.cpp` and headers. `machine`: the architecture, as `uname -m` has it.

    `only`: the level that is compiled beside the portable one; None: all of them are.
    """

    folder: Path
    machine: str = platform.machine()
    only: str | None = None

    def levels(self) -> dict[str, Path]:
        """The unit of each level that this architecture can have, worst first; the portable one always."""
        known = LEVELS if self.machine.lower() in _X86 else (PORTABLE,)
        wanted = [name for name in known if self.only is None or name in (PORTABLE, self.only)]
        units = {name: self.folder / f"level_{name}.cpp" for name in wanted}
        return {name: unit for name, unit in units.items() if name == PORTABLE or unit.is_file()}

    def flags(self, level: str) -> tuple[str, ...]:
        """The options of a level's own. Where it only stands beside the one that serves, it is not optimised."""
        return _UNUSED if level == PORTABLE and self.only not in (None, PORTABLE) else LEVELS[level]

    def plain(self) -> list[Path]:
        """The units without instruction levels of their own."""
        return sorted(unit for unit in self.folder.glob("*.cpp") if not unit.name.startswith("level_"))

    def digest(self) -> str:
        """Hash everything here that decides what the library does: texts, flags, architecture."""
        whole = hashlib.sha256(f"{self.machine}\n{FLAGS}\n{LINK_FLAGS}\n{LEVELS}\n".encode())
        for file in sorted((*self.folder.glob("*.cpp"), *self.folder.glob("*.h"))):
            text = file.read_bytes()
            whole.update(f"{file.name} {len(text)}\n".encode() + text)
        return whole.hexdigest()


def for_this_cpu(what: Sources, cpuinfo: Path = Path("/proc/cpuinfo")) -> Sources:
    """Choose the sources with the best level alone that this CPU has by what the system says; the library decides."""
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        return what
    flags = next((set(line.split()) for line in lines if line.startswith("flags")), set[str]())
    usable = [level for level in what.levels() if {_cpu_flag(option) for option in LEVELS[level]} <= flags]
    return replace(what, only=usable[-1])


def _cpu_flag(option: str) -> str:
    """Name what /proc/cpuinfo calls the instructions of a compiler's option: `amx_tile` those of `-mamx-tile`."""
    return option.removeprefix("-m").replace("-", "_").replace("512bf16", "512_bf16")


SOURCES = Sources(Path(__file__).with_name("src"))
