"""The webhook's handlers without a cluster: what is raised, what is warned, and that the chart asks on their paths."""

from pathlib import Path

import kopf
import pytest
import yaml

from harness.conflicting_manifests import base, lora, slots
from tests.unit.operator.planning import stored
from weft_operator.core import DesiredState, Object, parse
from weft_operator.kubernetes import PATHS, register, review
from weft_operator.local import admit

GOLDEN = Path(__file__).parents[2] / "integration" / "chart" / "golden" / "default.yaml"


def desired_of(*manifests: Object) -> DesiredState:
    desired = DesiredState()
    for number, manifest in enumerate(manifests):
        desired.put(parse(stored(admit(manifest, lambda _: None), uid=f"u-{number}")))
    return desired


def test_every_objection_is_reported_at_once_with_its_field_and_reason() -> None:
    desired = desired_of(base(lora={"maxRank": 16}, advanced={"maxAdapters": 1}))
    wish = admit(lora("a", pinned=True, maxRank=32, baseModel="llama", modelName="base"), lambda _: None)
    with pytest.raises(kopf.AdmissionError) as caught:
        review(wish, None, desired, [])
    assert caught.value.code == 422
    told = [part.split(": ")[:2] for part in str(caught.value).split("; spec.")]
    assert [(field.removeprefix("spec."), reason) for field, reason in told] == [
        ("modelName", "NameConflict"),
        ("baseModel", "BaseMismatch"),
        ("maxRank", "RankTooLarge"),
        ("pinned", "NoSlots"),
    ]


def test_a_warning_is_handed_on_and_refuses_nothing() -> None:
    warnings: list[str] = []
    review(admit(lora("a"), lambda _: None), None, DesiredState(), warnings)
    assert warnings == ["ServingPool platform/base does not exist yet: the adapter waits for it (PoolNotFound)"]


def test_the_manifest_as_the_api_server_sends_it_before_it_is_stored_is_judged() -> None:
    """On CREATE there is a uid and a time, and no resourceVersion yet."""
    wish = stored(admit(lora("a", pinned=True), lambda _: None), uid="u-9")
    del wish["metadata"]["resourceVersion"]
    with pytest.raises(kopf.AdmissionError, match="NoSlots"):
        review(wish, None, desired_of(base(**slots(1))), [])


def test_the_handlers_are_for_writes_of_the_objects_themselves() -> None:
    registry = kopf.OperatorRegistry()
    register(registry, DesiredState())
    handlers = registry._webhooks.get_all_handlers()  # pyright: ignore[reportPrivateUsage]
    assert {f"/{handler.id}" for handler in handlers} == set(PATHS.values())
    for handler in handlers:
        assert list(handler.operations or ()) == ["CREATE", "UPDATE"]
        assert (handler.subresource, handler.side_effects) == (None, False)


def test_the_chart_asks_on_these_paths() -> None:
    """kopf admits what is asked on a path that it does not know, so a wrong one would switch the rules off."""
    objects = [obj for obj in yaml.safe_load_all(GOLDEN.read_text()) if obj]
    (hooks,) = [obj["webhooks"] for obj in objects if obj["kind"] == "ValidatingWebhookConfiguration"]
    assert {hook["rules"][0]["resources"][0]: hook["clientConfig"]["service"]["path"] for hook in hooks} == PATHS
    for hook in hooks:
        assert (hook["failurePolicy"], hook["sideEffects"], hook["timeoutSeconds"]) == ("Fail", "None", 2)
        (rule,) = hook["rules"]
        assert (rule["apiGroups"], rule["operations"]) == (["serving.weft.dev"], ["CREATE", "UPDATE"])
