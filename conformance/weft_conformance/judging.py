"""What a server of LoRA adapters promises, and how its answers are judged: pure.

A server is compared with itself. Each model answers each prompt greedily and alone, past the prefix cache where it can
be: these are the references. Answers under load are then attributed: an answer is its model's if it is the reference,
or if it shares a longer beginning with the reference than with that of any other model. So a server whose arithmetic
depends on the batch passes where its greedy text departs late, and one that mixes weights or pages does not.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from itertools import combinations
from statistics import median
from typing import Any

from weft_cli.errors import BadInput

MIN_ADAPTERS, MAX_ADAPTERS = 2, 32
PLACES = ("castle of Oslo", "harbour of Rome", "garden of Lima", "market of Cairo", "school of Quito", "mill of Bonn")
PROMPTS = tuple(f"The {place} has {doors} doors and {doors + 3} towers" for doors, place in enumerate(PLACES, start=2))
LONG_PROMPTS = tuple(" and ".join(PROMPTS[first:] + PROMPTS[:first]) for first in range(len(PROMPTS)))


class Verdict(StrEnum):
    PASS = "pass"  # noqa: S105
    FAIL = "fail"
    NOT_APPLICABLE = "not applicable"


@dataclass(frozen=True, slots=True)
class Outcome:
    verdict: Verdict
    detail: str


@dataclass(frozen=True, slots=True)
class Model:
    """A name, and what its requests hold beside it: some servers select adapters by a field of their own."""

    name: str
    fields: Mapping[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True, slots=True)
class Answer:
    model: str
    prompt: str
    text: str


References = Mapping[str, Mapping[str, str]]  # prompt -> model -> text


@dataclass(frozen=True, slots=True)
class Result:
    """The outcome of one check."""

    name: str
    promise: str
    verdict: Verdict
    detail: str


def model_of(text: str) -> Model:
    """Read `NAME`, or `NAME={"field": ...}`. Raises BadInput."""
    name, equals, fields = text.partition("=")
    try:
        value = json.loads(fields) if equals else {}
    except ValueError as error:
        raise BadInput(f"{text!r}: behind = has to stand a JSON object: {error}") from error
    if not name or not isinstance(value, dict):
        raise BadInput(f"{text!r} is neither NAME nor NAME={{...}}")
    return Model(name, value)


def discovered(listed: Sequence[Mapping[str, Any]], base: str | None) -> tuple[str, list[str]]:
    """Find a base in `/v1/models` and its adapters, those that name it as `parent`. Raises BadInput."""
    parents = [one["parent"] for one in listed if one.get("parent")]
    if base is None and not parents:
        raise BadInput("/v1/models names no adapter with a `parent`", "give --base and --adapter")
    found: str = base or max(parents, key=parents.count)
    return found, [one["id"] for one in listed if one.get("parent") == found][:MAX_ADAPTERS]


def telling(references: References) -> list[str]:
    """List the prompts that every model answers in its own way."""
    return [prompt for prompt, texts in references.items() if len(set(texts.values())) == len(texts)]


def alike(references: References) -> list[tuple[str, str]]:
    """List pairs of models that give the same answer to every prompt."""
    models = sorted({model for texts in references.values() for model in texts})
    return [(a, b) for a, b in combinations(models, 2) if all(texts[a] == texts[b] for texts in references.values())]


def attributed(text: str, texts: Mapping[str, str]) -> str | None:
    """Find the model whose reference shares the longest beginning with the text; None: none, or several do."""
    if exact := [model for model, reference in texts.items() if reference == text]:
        return exact[0] if len(exact) == 1 else None
    shared = {model: _shared(text, reference) for model, reference in texts.items()}
    longest = max(shared.values(), default=0)
    best = [model for model, chars in shared.items() if chars == longest]
    return best[0] if longest and len(best) == 1 else None


def _shared(a: str, b: str) -> int:
    """Count the characters of the beginning that both have."""
    return next((at for at, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def judged(answers: Iterable[Answer], references: References) -> Outcome:
    """Judge whether each answer is its own model's."""
    count = exact = 0
    wrong: list[Answer] = []
    for one in answers:
        texts = references[one.prompt]
        count += 1
        exact += one.text == texts[one.model]
        if attributed(one.text, texts) != one.model:
            wrong.append(one)
    if not wrong:
        return Outcome(Verdict.PASS, f"{count} answers, {exact} equal to the references")
    first = wrong[0]
    whose = attributed(first.text, references[first.prompt])
    said = f"{len(wrong)} of {count} answers are not their model's; {first.model} gave {first.text[:40]!r}"
    return Outcome(Verdict.FAIL, f"{said}, which is {f'of {whose}' if whose else 'of no model'}")


def fair(rare_s: Sequence[float], flood_s: Sequence[float], alone_s: float) -> Outcome:
    """Judge times to the first token of a rarely used adapter beside a flood of another one's requests.

    A first-come, first-served server gives both the same. The bound is twice the flood's median plus the time alone.
    """
    rare, flood = median(rare_s), median(flood_s)
    bound = 2 * flood + alone_s
    text = f"first token after {rare * 1e3:.0f} ms (median of {len(rare_s)}), the flood's after {flood * 1e3:.0f} ms"
    return Outcome(Verdict.PASS if rare <= bound else Verdict.FAIL, f"{text}, alone {alone_s * 1e3:.0f} ms")


def updated(during: Sequence[Answer], old: Mapping[str, str], new: Mapping[str, str]) -> Outcome:
    """Judge whether each answer of an update's time is one of the old content or of the new one, by prompt."""
    if all(old[prompt] == new[prompt] for prompt in old):
        return Outcome(Verdict.NOT_APPLICABLE, "the answers are the same before and after the command")
    counts = {"old": 0, "new": 0}
    for one in during:
        texts = {"old": old[one.prompt], "new": new[one.prompt]}
        if old[one.prompt] == new[one.prompt]:
            continue
        whose = attributed(one.text, texts)
        if whose is None:
            return Outcome(Verdict.FAIL, f"{one.text[:60]!r} is neither the old content's answer nor the new one's")
        counts[whose] += 1
    return Outcome(Verdict.PASS, f"{counts['old']} answers of the old content, {counts['new']} of the new one")


def document(url: str, models: Sequence[Model], results: Sequence[Result]) -> dict[str, Any]:
    """Gather everything that was found, for machines."""
    return {"url": url, "models": [one.name for one in models], "checks": [asdict(one) for one in results]}
