"""Requests of the search as JSON, and processes of their own for the search and for measuring a GPU."""

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from weft.domain.model.spec import LayerSpec, ModelSpec, RopeSpec
from weft_runner.errors import NoPolicyFits, OffloadError, PolicyInvalid
from weft_runner.offload.costs import BlockWork
from weft_runner.offload.machine import MachineRates, machine_of
from weft_runner.offload.plan import OffloadPlan, plan_of
from weft_runner.offload.policy import Budgets, Formats, MemoryTier, WeightsFormat
from weft_runner.offload.rounding import Supports
from weft_runner.offload.search import PolicySearch

SOLVE_S = 120.0  # the largest grid takes some ten seconds
MEASURE_S = 180.0  # with torch's import and kernels that are compiled for the first time


def request_json(request: PolicySearch) -> dict[str, Any]:
    """Return the form that `request_of` reads."""
    layers = None if request.layers is None else [request.layers.start, request.layers.stop]
    return {**asdict(replace(request, layers=None)), "spec": spec_json(request.spec), "layers": layers}


def spec_json(spec: ModelSpec) -> dict[str, Any]:
    """Return the form that `spec_of` reads, without the tokens that end a sequence."""
    return {**asdict(replace(spec, eos=frozenset())), "eos": []}


def spec_of(fields: Mapping[str, Any]) -> ModelSpec:
    """Read `spec_json`'s form, also after JSON. Raises KeyError, TypeError: it is not whole."""
    spec = dict[str, Any](fields)
    ropes = (rope | {name: tuple(rope[name]) for name in ("short", "long")} for rope in spec["ropes"])
    spec |= {"ropes": tuple(RopeSpec(**rope) for rope in ropes), "biases": tuple(spec["biases"])}
    spec |= {"by_layer": tuple(LayerSpec(**layer) for layer in spec["by_layer"]), "eos": frozenset[int]()}
    return ModelSpec(**spec)


def request_of(fields: Mapping[str, Any]) -> PolicySearch:
    """Read `request_json`'s form, also after JSON. Raises PolicyInvalid, MachineInvalid."""
    try:
        supports, layers = fields["supports"], fields["layers"]
        return PolicySearch(
            spec_of(fields["spec"]),
            machine_of(fields["machine"]),
            Budgets(**fields["budgets"]),
            Formats(**fields["formats"]),
            BlockWork(**fields["work"]),
            Supports(tuple(map(MemoryTier, supports["kv"])), tuple(map(MemoryTier, supports["activations"]))),
            fields["most_block"],
            None if layers is None else range(*layers),
            fields["most_tokens"],
        )
    except (KeyError, TypeError, ValueError) as error:
        raise PolicyInvalid(f"a request that is not whole: {error!r}") from error


def solve_ranks(requests: Mapping[int, PolicySearch], timeout_s: float = SOLVE_S) -> dict[int, OffloadPlan]:
    """Policies of the ranks of a pipeline, together (`search.find_plans`), found in a short-lived process.

    Raises NoPolicyFits, OffloadError: it found none, or could not run.
    """
    (found,) = solve_each([requests], timeout_s)
    if isinstance(found, NoPolicyFits):
        raise found
    return found


def solve_each(
    pools: Sequence[Mapping[int, PolicySearch]], timeout_s: float = SOLVE_S
) -> list[dict[int, OffloadPlan] | NoPolicyFits]:
    """Solve for the ranks of several pools, one pool after the other in one process, each within `timeout_s`.

    Where the first has no policy the others are not asked for: the answer is that error alone. Raises OffloadError.
    """
    asked = [{str(rank): request_json(request) for rank, request in ranks.items()} for ranks in pools]
    answer = ask_process("weft_runner.offload", {"pools": asked}, timeout_s * len(pools))
    return [_found(one) for one in answer["answers"]]


def ask_process(module: str, question: Mapping[str, Any], timeout_s: float, extra: str = "offload") -> dict[str, Any]:
    """Return the answer of `python -m MODULE`. `extra`: the extra of this package that it needs.

    Raises OffloadError: it could not run, or its answer is an error.
    """
    command, sent = [sys.executable, "-m", module], json.dumps(question)
    try:
        done = subprocess.run(command, input=sent, capture_output=True, text=True, timeout=timeout_s, check=False)  # noqa: S603 (our own module)
    except subprocess.TimeoutExpired as error:
        raise OffloadError(f"no answer of {module} within {timeout_s:g} s") from error
    except OSError as error:
        raise OffloadError(f"the process of {module} did not start: {error}") from error
    try:
        answer: dict[str, Any] = json.loads(done.stdout)
    except ValueError as error:
        why = " ".join(done.stderr.strip().splitlines()[-1:])
        raise OffloadError(f"the process of {module} failed: {why}; it needs weft[{extra}]") from error
    if "error" in answer:
        raise OffloadError(f"{answer['error']}: {answer['message']}")
    return answer


def measured_gpu(folder: Path, spec: ModelSpec, formats: Sequence[WeightsFormat], most_bytes: int) -> MachineRates:
    """Measure this machine's GPU as a runner does (`model.cuda.machine_rates`), with the disk of `folder`.

    A process of its own measures: who asks has no torch, and the GPU is free again afterwards.

    Raises OffloadError, also where there is no GPU that the kernels run on.
    """
    question = {"folder": str(folder), "spec": spec_json(spec), "formats": list(formats), "most_bytes": most_bytes}
    return machine_of(ask_process("weft_runner.model.cuda.measuring", question, MEASURE_S, "runner")["machine"])


def _found(answer: Mapping[str, Any]) -> dict[int, OffloadPlan] | NoPolicyFits:
    if "plans" in answer:
        return {int(rank): plan_of(plan) for rank, plan in answer["plans"].items()}
    return NoPolicyFits(answer["message"], answer["tier"], answer["short_bytes"])
