"""The scenario of `weft plan capacity`: a load, objectives, a model and hardware, in one YAML file."""

import re
import sys
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, cast

import yaml
from pydantic import AfterValidator, Field, PlainValidator, ValidationError, ValidationInfo

from weft.api.fields import ApiModel, Rule
from weft.api.manifests import STDIN, Problem
from weft.api.yaml_documents import BadYaml, documents
from weft_cli.errors import BadInput
from weft_cli.plan import HINT
from weft_sim.planning.objectives import Objective
from weft_sim.planning.workload import distribution

TIME = re.compile(r"(\d+(?:\.\d+)?)(ms|s)")
LEVEL = re.compile(r"p(\d+(?:\.\d+)?)")


def _relative_to(path: Path, info: ValidationInfo[Path]) -> Path:
    """Make a path from the scenario's folder on."""
    return info.context / path


def _model(text: str, info: ValidationInfo[Path]) -> str:
    return str(info.context / text) if text.endswith(".json") else text


def _distribution(text: str) -> str:
    distribution(text)
    return text


def _levels(value: object) -> tuple[tuple[float, float], ...]:
    """Read `{p90: 1s}` as levels and seconds; `()`, the default, has none."""
    if value == ():
        return ()
    if not isinstance(value, dict) or not value:
        raise ValueError("write levels and times: {p90: 800ms}, {p50: 0.5s, p99: 2s}")
    points = list[tuple[float, float]]()
    for name, time in cast("dict[object, object]", value).items():
        level, bound = LEVEL.fullmatch(str(name)), TIME.fullmatch(str(time))
        if level is None or bound is None or not 0 < float(level[1]) < 100:
            raise ValueError(f"`{name}: {time}` is no level and time; write p90: 800ms, or p99.9: 2s")
        points.append((float(level[1]) / 100, float(bound[1]) / (1e3 if bound[2] == "ms" else 1.0)))
    return tuple(points)


Place = Annotated[Path, AfterValidator(_relative_to)]
Distribution = Annotated[str, AfterValidator(_distribution)]
Levels = Annotated[tuple[tuple[float, float], ...], PlainValidator(_levels)]


class ScenarioLoad(ApiModel):
    """The requests: from a trace, from a trace at a changed rate, or with drawn lengths."""

    trace: Place | None = None
    """The trace: of Azure, Mooncake, Splitwise, or a .csv or .jsonl of your own."""
    rate: Annotated[float, Field(strict=True, ge=1e-6)] | None = None
    """Requests a second, as a Poisson process. It defaults to the trace's own times."""
    prompt: Distribution | None = None
    """Prompt tokens without a trace: fixed:N, uniform:LEAST,MOST or lognormal:MEDIAN,SIGMA."""
    output: Distribution | None = None
    """Tokens of answers, likewise."""
    requests: Annotated[int, Field(strict=True, ge=50)] = 4_000
    """The requests of a simulation; twice as many confirm the answer."""


class Objectives(ApiModel):
    """The times that levels of each metric's distribution may have: `ttft: {p90: 1s}`."""

    ttft: Levels = ()
    """The time to a request's first token."""
    tbt: Levels = ()
    """The time between two tokens, over all tokens."""
    tpot: Levels = ()
    """The mean time between a request's tokens."""
    e2e: Annotated[Levels, Field(alias="e2e")] = ()
    """The time to a request's last token."""

    def all(self) -> tuple[Objective, ...]:
        named = ((name, getattr(self, name)) for name in type(self).model_fields)
        return tuple(Objective.of_level(name, *of) for name, levels in named for of in levels)


class HardwareChoice(ApiModel):
    """The hardware from which runners may be made."""

    table: Place | None = None
    """A table of prices and power of your own (TOML). It defaults to A100, H100 and H200."""
    kinds: tuple[str, ...] = ()
    """The kinds of the table to choose among. It defaults to all its GPUs."""
    gpus: Annotated[tuple[Annotated[int, Field(strict=True, ge=1)], ...], Field(min_length=1)] = (1, 2, 4, 8)
    """The numbers of GPUs of a runner to try, each a tensor split."""
    performance: Literal["roofline", "splitwise-sim"] = "roofline"
    """The model of step times: rooflines, or splitwise-sim's published tables for A100 and H100."""


class PlanScenario(ApiModel):
    """A scenario: the workload, its objectives and the hardware. Paths are relative to the scenario's folder."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "model",
            "which model? For example model: meta-llama/Llama-3.1-70B, or pool: pool.yaml",
            None,
            lambda scenario: scenario.model is not None or scenario.pool is not None,
        ),
        Rule(
            "objectives", "which? For example ttft: {p90: 1s}", None, lambda scenario: bool(scenario.objectives.all())
        ),
    )

    model: Annotated[str, AfterValidator(_model)] | None = None
    """A model's name that is known, or a config.json. It defaults to the pool's."""
    pool: Place | None = None
    """A manifest with the ServingPool to plan, which comes back with roles and groups."""
    load: ScenarioLoad
    """The requests."""
    objectives: Objectives
    """The times within which they should be answered."""
    hardware: HardwareChoice = HardwareChoice()
    """What runners may be made of."""
    minimize: Literal["cost", "power", "count"] = "cost"
    """What is to be small."""
    phases: Annotated[tuple[Literal["Split", "Unified"], ...], Field(min_length=1)] = ("Split", "Unified")
    """Whether runners are for prompts and for tokens, for both, or either."""
    batch_tokens: Annotated[int, Field(strict=True, ge=16)] | None = None
    """The tokens of an iteration; Unified designs try a quarter too. It defaults to the pool's, or 2048."""


def read_scenario(path: Path) -> PlanScenario:
    """Read a scenario. Raises BadInput with every problem, its line and what is possible."""
    name, text = "<stdin>" if path == STDIN else str(path), ""
    try:
        text = (sys.stdin.buffer.read() if path == STDIN else path.read_bytes()).decode()
        documents_in = [value for value in documents(text) if value is not None]
        if len(documents_in) != 1:
            raise BadYaml(f"{len(documents_in)} documents; a scenario is one")
    except (OSError, UnicodeDecodeError, BadYaml) as error:
        message = f"cannot be read: {error.strerror}" if isinstance(error, OSError) else str(error)
        raise BadInput(str(Problem(name, 0, "", message)), HINT) from error
    if not isinstance(documents_in[0], dict) or "kind" in documents_in[0]:
        message = (
            "a manifest; a scenario may name it, pool: PATH" if isinstance(documents_in[0], dict) else "not a mapping"
        )
        raise BadInput(str(Problem(name, 0, "", message)), HINT)
    try:
        return PlanScenario.model_validate(documents_in[0], context=Path() if path == STDIN else path.parent)
    except ValidationError as error:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        problems = [_problem(name, root, item) for item in error.errors(include_url=False)]
        raise BadInput("\n".join(problems), HINT) from error


def _problem(name: str, root: Any, item: Any) -> str:
    text_out, value_in = item["msg"].removeprefix("Value error, "), item["input"]
    if item["type"] == "tuple_type":
        text_out = "write a list: [ONE, OTHER]"
    if item["type"] != "unknown_field" and not isinstance(value_in, dict | list) and repr(value_in) not in text_out:
        text_out = f"{text_out}; it is {str(value_in)[:100]!r}"
    field = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in item["loc"]).removeprefix(".")
    return str(Problem(f"{name}, line {_line(root, item['loc'])}", 0, field, text_out))


def _line(node: Any, place: tuple[str | int, ...]) -> int:
    """The line of a field's name, or of what it is missing from."""
    line = node.start_mark.line + 1
    for part in place:
        items = enumerate(node.value) if isinstance(node, yaml.SequenceNode) else ()
        pairs = node.value if isinstance(node, yaml.MappingNode) else ()
        named = [*((i, item, item) for i, item in items), *((key.value, key, value) for key, value in pairs)]
        child_at = next(((at, child) for key, at, child in named if key == part), None)
        if child_at is None:
            break
        line, node = child_at[0].start_mark.line + 1, child_at[1]
    return line
