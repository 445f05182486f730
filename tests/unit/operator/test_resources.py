"""What a stored pool means where its spec leaves something open, beside the API's own defaults."""

from tests.unit.operator.planning import pool_object, stored
from weft_operator.core import parse_pool


def test_a_pool_without_groups_has_one_that_may_be_empty_and_as_large_as_the_pool() -> None:
    template = {"image": "runner:1"}
    (group,) = parse_pool(stored(pool_object(template=template))).groups
    assert (group.name, group.template, group.min, group.max, group.phase) == ("runners", template, 0, None, "Any")
