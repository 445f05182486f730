"""A Containerfile's instructions, as far as ours use them: to check them, and to run a stage's commands elsewhere."""

from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
IMAGES = ROOT / "images"


@dataclass(frozen=True, slots=True)
class Instruction:
    """One instruction: `RUN`, and what follows it with its lines joined."""

    name: str
    words: str


@dataclass(frozen=True, slots=True)
class Stage:
    """From one FROM to the next. `base` is an image or an earlier stage."""

    name: str
    base: str
    instructions: tuple[Instruction, ...]

    def all(self, name: str) -> list[str]:
        return [instruction.words for instruction in self.instructions if instruction.name == name]

    def copies(self) -> list[tuple[list[str], str]]:
        """(sources, target) of what comes from the context."""
        split = [words.split() for words in self.all("COPY") if not words.startswith("--from=")]
        return [(words[:-1], words[-1]) for words in split]


def stages(path: Path) -> list[Stage]:
    """In order; what stands before the first FROM is left out."""
    found: list[Stage] = []
    for instruction in instructions(path.read_text()):
        if instruction.name == "FROM":
            base, _, name = instruction.words.partition(" AS ")
            found.append(Stage(name, base, ()))
        elif found:
            last = found[-1]
            found[-1] = Stage(last.name, last.base, (*last.instructions, instruction))
    return found


def instructions(text: str) -> list[Instruction]:
    """Comments dropped, continued lines joined."""
    lines = "\n".join(line for line in text.splitlines() if not line.startswith("#")).replace("\\\n", " ").splitlines()
    return [Instruction(name, rest.strip()) for line in lines if line for name, _, rest in [line.partition(" ")]]
