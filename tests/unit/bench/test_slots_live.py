"""`weft bench slots --part live`: what is asked of the stack, and its pool."""

import random
from pathlib import Path

import yaml

from weft_bench.slots import LONGEST, POOL, SHORTEST, UNBOUNDED
from weft_bench.slots_live import BOUND, bodies, resize


def test_requests_have_the_lengths_of_the_grid_and_name_every_adapter() -> None:
    work = bodies(random.Random(0), 32, 400, 1_000)
    assert work == bodies(random.Random(0), 32, 400, 1_000)
    assert {number for number, _ in work} == {*range(32)}
    assert all(body["model"] == f"default/r16-{number}" for number, body in work)
    for _, body in work:
        assert SHORTEST <= len(body["prompt"]) <= LONGEST
        assert SHORTEST <= body["max_tokens"] <= LONGEST


def test_the_pool_has_the_memory_of_the_grid_and_a_bound_only_where_one_is_measured(tmp_path: Path) -> None:
    path = tmp_path / "bench.yaml"
    for bound in (UNBOUNDED, BOUND):
        pool = {"kind": "ServingPool", "spec": {"kvCache": {"pages": 1}, "lora": {"maxAdapters": 3}}}
        path.write_text(yaml.safe_dump_all([pool, {"kind": "LoRAAdapter"}]))
        resize(path, bound)
        spec = next(yaml.safe_load_all(path.read_text()))["spec"]
        assert spec["kvCache"]["pages"] == POOL.total_pages
        assert spec["lora"].get("maxAdapters", UNBOUNDED) == bound
