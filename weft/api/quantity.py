"""Kubernetes quantities: "500m", "64Gi", "1e3", 2."""

import re
from decimal import Decimal
from typing import Annotated

from pydantic import PlainValidator, WithJsonSchema

QUANTITY_PATTERN = r"^([0-9]+\.?[0-9]*|\.[0-9]+)([KMGTPE]i|[numkMGTPE]|[eE][-+]?[0-9]{1,2})?$"
_DECIMAL = {"n": -9, "u": -6, "m": -3, "": 0, "k": 3, "M": 6, "G": 9, "T": 12, "P": 15, "E": 18}
_BINARY = {"Ki": 10, "Mi": 20, "Gi": 30, "Ti": 40, "Pi": 50, "Ei": 60}


def amount(quantity: int | str) -> Decimal:
    """The number that a quantity (of QUANTITY_PATTERN) stands for."""
    text = str(quantity)
    if text[-2:] in _BINARY:
        return Decimal(text[:-2]) * 2 ** _BINARY[text[-2:]]
    if text[-1:] in _DECIMAL:
        return Decimal(text[:-1]).scaleb(_DECIMAL[text[-1:]])
    return Decimal(text)


def _checked(value: object) -> int | str:
    number = isinstance(value, int) and not isinstance(value, bool) and value >= 0
    if isinstance(value, int | str) and (number or (isinstance(value, str) and re.match(QUANTITY_PATTERN, value))):
        return value
    raise ValueError("no quantity; write for example 2, 500m or 64Gi")


Quantity = Annotated[
    int | str,
    PlainValidator(_checked),
    WithJsonSchema(
        {"x-kubernetes-int-or-string": True, "minimum": 0, "maxLength": 32, "pattern": QUANTITY_PATTERN},
    ),
]
