"""The `--runner-defaults` file: YAML in camelCase -> `RunnerDefaults`."""

from pathlib import Path
from typing import Any

import yaml
from pydantic import TypeAdapter, ValidationError
from pydantic.alias_generators import to_camel

from weft.process import CannotStart
from weft_operator.core.runner_defaults import RunnerDefaults


class BadRunnerDefaults(CannotStart):
    """The file is not there, is no YAML, or says what no field is."""


def read_runner_defaults(path: Path) -> RunnerDefaults:
    """Raises BadRunnerDefaults with every wrong field."""
    try:
        said: Any = yaml.safe_load(path.read_text())
    except (OSError, yaml.YAMLError, UnicodeDecodeError) as error:
        raise BadRunnerDefaults(f"--runner-defaults {path}: {error}") from error
    if not isinstance(said, dict):
        raise BadRunnerDefaults(f"--runner-defaults {path}: not a mapping of fields")
    return parse_runner_defaults(said, str(path))  # pyright: ignore[reportUnknownArgumentType] (keys are checked below)


def parse_runner_defaults(said: dict[Any, Any], where: str) -> RunnerDefaults:
    """The values of a file. Raises BadRunnerDefaults."""
    fields = {to_camel(name): name for name in RunnerDefaults.__dataclass_fields__}
    unknown = sorted(str(name) for name in said if name not in fields)
    if unknown:
        raise BadRunnerDefaults(f"{where}: unknown: {', '.join(unknown)}; known: {', '.join(fields)}")
    try:
        return TypeAdapter(RunnerDefaults).validate_python({fields[name]: value for name, value in said.items()})
    except ValidationError as error:
        wrong = [f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors()]
        raise BadRunnerDefaults(f"{where}: {'; '.join(wrong)}") from error
