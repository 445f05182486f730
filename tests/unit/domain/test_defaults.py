"""What a message of the contracts leaves out: protobuf gives an older peer's unknown field as zero, or as empty."""

import dataclasses
import inspect
from typing import Any

from weft.domain import adapter, batch, fleet, ids, limits, prediction, request, routes, runner
from weft.domain.ids import NEVER
from weft.domain.model import spec
from weft.domain.model.families import Family
from weft.domain.request import NO_ALLOTMENT, NO_DEFAULTS

MODULES = (adapter, batch, fleet, ids, limits, prediction, request, routes, runner, spec)


def defaults(of: Any) -> dict[str, Any]:
    if hasattr(of, "_field_defaults"):
        return of._field_defaults
    fields = dataclasses.fields(of) if dataclasses.is_dataclass(of) else ()
    return {field.name: field.default for field in fields if field.default is not dataclasses.MISSING}


def test_a_field_that_is_not_given_is_zero_or_empty_as_one_that_an_older_peer_does_not_send() -> None:
    """Exceptions: what the codec replaces or always sends, and what a model's config.json leaves out.

    A family's row is no message.
    """
    classes = [of for module in MODULES for of in vars(module).values() if inspect.isclass(of) and of is not Family]
    said = {
        (of, name)
        for of in classes
        for name, value in defaults(of).items()
        if value and value not in (NEVER, NO_ALLOTMENT, NO_DEFAULTS)
    }
    names = {of.__name__: {name for other, name in said if of is other} for of, _ in said}
    assert names == {
        "KeyRoute": {"scope"},
        "ModelSpec": {"activation", "embedding_scale", "logit_divisor", "residual_scale"},
        "NewBatch": {"completion_window"},
        "PoolSpec": {
            "max_queue", "queue", "reservation", "consolidation",
            "phases",
        },
        "RopeSpec": {
            "kind", "factor", "low_freq_factor", "high_freq_factor", "original_max_positions", "attention_factor",
            "beta_fast", "beta_slow", "truncate", "share",
        },
        "RunnerFigures": {"ready", "role"},
        "RunnerReport": {"figures"},
        "Sampling": {"top_p", "repetition_penalty"},
    }  # fmt: skip
