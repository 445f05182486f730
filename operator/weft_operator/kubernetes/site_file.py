"""The `--site` file: YAML in camelCase -> `Site`."""

from pathlib import Path
from typing import Any

import yaml
from pydantic import TypeAdapter, ValidationError
from pydantic.alias_generators import to_camel

from weft.process import CannotStart
from weft_operator.site import Site


class BadSite(CannotStart):
    """The file is not there, is no YAML, or says what no field is."""


def read_site(path: Path) -> Site:
    """Raises BadSite with every wrong field."""
    try:
        said: Any = yaml.safe_load(path.read_text())
    except (OSError, yaml.YAMLError, UnicodeDecodeError) as error:
        raise BadSite(f"--site {path}: {error}") from error
    if not isinstance(said, dict):
        raise BadSite(f"--site {path}: not a mapping of fields")
    return parse_site(said, str(path))  # pyright: ignore[reportUnknownArgumentType] (keys are checked below)


def parse_site(said: dict[Any, Any], where: str) -> Site:
    """The values of a file. Raises BadSite."""
    fields = {to_camel(name): name for name in Site.__dataclass_fields__}
    unknown = sorted(str(name) for name in said if name not in fields)
    if unknown:
        raise BadSite(f"{where}: unknown: {', '.join(unknown)}; known: {', '.join(fields)}")
    try:
        return TypeAdapter(Site).validate_python({fields[name]: value for name, value in said.items()})
    except ValidationError as error:
        wrong = [f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors()]
        raise BadSite(f"{where}: {'; '.join(wrong)}") from error
