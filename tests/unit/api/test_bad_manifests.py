"""The table that the API server is held to (tests/operator/test_crds.py): the local API gives the same reasons."""

from typing import Any

import pytest

from harness.bad_manifests import BAD, GOOD, Bad
from weft_operator.errors import Invalid
from weft_operator.local import admit


def stored(row: Bad) -> dict[str, Any] | None:
    return None if row.before is None else dict(admit(row.before, lambda _: None))


@pytest.mark.parametrize("row", BAD, ids=lambda row: row.name)
def test_a_bad_manifest_is_refused_where_and_why_the_api_server_refuses_it(row: Bad) -> None:
    before = stored(row)
    with pytest.raises(Invalid) as caught:
        admit(row.wish, lambda _: before)
    causes = [(cause.field, cause.message) for cause in caught.value.causes]
    assert any(field.startswith(row.field) and row.here in message for field, message in causes), causes


@pytest.mark.parametrize("name", GOOD)
def test_on_the_right_side_of_a_bound_it_is_taken(name: str) -> None:
    assert admit(GOOD[name], lambda _: None)["spec"]


def test_one_refusal_names_every_wrong_field() -> None:
    wish = {**BAD[0].wish, "spec": {"poolRef": {}, "source": {"uri": "upper", "digest": "x"}, "maxRank": 0}}
    with pytest.raises(Invalid) as caught:
        admit(wish, lambda _: None)
    fields = {cause.field for cause in caught.value.causes}
    assert fields == {"spec.poolRef.name", "spec.source.uri", "spec.source.digest", "spec.maxRank"}
