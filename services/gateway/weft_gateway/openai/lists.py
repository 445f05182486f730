"""Lists of the API and their queries."""

from collections.abc import Mapping
from typing import Any, TypeVar

from starlette.requests import Request

from weft_gateway.errors import ParameterError

MAX_ID_CHARS = 256
T = TypeVar("T")


class Query:
    """The query of a list, whose parameters have these names; any other is refused by name."""

    def __init__(self, request: Request, *names: str) -> None:
        """Raises ParameterError."""
        self._given = request.query_params
        for name in self._given:
            if name not in names:
                text = f"The parameter {name[:64]} is not supported. Supported: {', '.join(names)}."
                raise ParameterError(text, param=name[:64], code="unsupported_parameter")

    def after(self) -> str:
        """An id: the list goes on behind it. Raises ParameterError."""
        after = self._given.get("after", "")
        if len(after) > MAX_ID_CHARS:
            raise ParameterError("after: is not an id.", param="after")
        return after

    def limit(self, default: int, most: int) -> int:
        """Raises ParameterError."""
        given = self._given.get("limit", str(default))
        if not (given.isascii() and given.isdigit() and len(given) <= 9 and 1 <= int(given) <= most):
            raise ParameterError(f"limit: must be a number from 1 to {most}.", param="limit")
        return int(given)

    def one_of(self, name: str, values: Mapping[str, T]) -> T | None:
        """None: it is not given. Raises ParameterError."""
        given = self._given.get(name)
        if given is None:
            return None
        if given not in values:
            raise ParameterError(f"{name}: must be one of {', '.join(values)}.", param=name)
        return values[given]


def listed(data: list[dict[str, Any]], has_more: bool) -> dict[str, Any]:
    """One page."""
    ends = {"first_id": data[0]["id"], "last_id": data[-1]["id"]} if data else {"first_id": None, "last_id": None}
    return {"object": "list", "data": data, **ends, "has_more": has_more}
