"""The model that serves, and what becomes of one that is mounted while another serves."""

import json
import os

import numpy as np
import pytest

from tests.unit.predictor.conftest import query_of, teach
from weft_predictor.checkpoint import save
from weft_predictor.core import RidgeModel, ridge_model
from weft_predictor.errors import BadData
from weft_predictor.models import SAVED, ModelWatch, first_models

DIM = 1 << 14


@pytest.fixture
def mounted(tmp_path):
    return tmp_path / "mounted.npz"


def ridge(name: str) -> RidgeModel:
    return RidgeModel.cold(name, dim=DIM)


def test_a_mounted_model_is_judged_where_another_was_saved_and_not_where_it_is_the_saved_one(tmp_path, mounted, world):
    model = ridge("first")
    save(mounted, model.save())
    served, candidate = first_models(tmp_path, mounted)
    assert (served.version, candidate) == ("first+0", None)
    for answer in world(1).answers(5):
        teach(served, answer)
    save(tmp_path / SAVED, served.save())
    served, candidate = first_models(tmp_path, mounted)
    assert (served.version, candidate) == ("first+5", None)
    save(mounted, ridge("second").save())
    served, candidate = first_models(tmp_path, mounted)
    assert (served.version, candidate.version) == ("first+5", "second+0")


def test_a_mounted_model_that_cannot_be_read_does_not_keep_the_saved_one_from_serving(tmp_path, mounted, caplog):
    save(tmp_path / SAVED, ridge("saved").save())
    mounted.write_bytes(b"PK half a file")
    served, candidate = first_models(tmp_path, mounted)
    assert (served.version, candidate) == ("saved+0", None)
    assert "mounted model refused" in caplog.text


def test_a_model_of_another_version_waits_and_is_found_again_by_its_version(tmp_path):
    path, other = tmp_path / SAVED, {"meta": np.frombuffer(b'{"layout": 99}', np.uint8)}
    save(path, ridge("ours").save())
    path.replace(tmp_path / f"{SAVED}.layout{ridge_model.LAYOUT}")  # as a version with another layout leaves it
    save(path, other)
    assert first_models(tmp_path, None)[0].version == "ours+0"
    assert {file.name for file in tmp_path.iterdir()} == {SAVED, f"{SAVED}.layout99"}
    path.write_bytes(b"PK damaged")
    assert first_models(tmp_path, None)[0].version != "ours+0"
    assert {file.name for file in tmp_path.iterdir()} == {f"{SAVED}.corrupt", f"{SAVED}.layout99"}


@pytest.fixture
def watch(mounted):
    save(mounted, ridge("first").save())
    offered = list[str]()

    async def offer(model) -> None:
        offered.append(model.version)

    return ModelWatch(mounted, 1.0, offer), offered


def replace(mounted, content: bytes | RidgeModel, at: int) -> None:
    if isinstance(content, bytes):
        mounted.write_bytes(content)
    else:
        save(mounted, content.save())
    os.utime(mounted, ns=(at, at))


async def test_a_changed_file_is_offered_once_and_only_when_it_has_settled(watch, mounted):
    watcher, offered = watch
    await watcher.check_files()
    replace(mounted, ridge("second"), 1)
    await watcher.check_files()
    replace(mounted, ridge("third"), 2)
    await watcher.check_files()
    assert offered == []
    for _ in range(3):
        await watcher.check_files()
    assert offered == ["third+0"]


async def test_a_truncated_file_is_refused_by_name_and_the_next_whole_one_offered(watch, mounted, caplog):
    watcher, offered = watch
    for at, content in enumerate((mounted.read_bytes()[:5_000], ridge("second"))):
        replace(mounted, content, at)
        for _ in range(2):
            await watcher.check_files()
        assert "mounted model refused" in caplog.text
    assert offered == ["second+0"]
    mounted.unlink()
    for _ in range(2):
        await watcher.check_files()
    assert offered == ["second+0"]


def test_predictions_of_a_file_are_replayed_by_request_or_by_prompt(tmp_path):
    rows = [
        {"key": "r1", "p10": 1, "p50": 5, "p90": 9, "p99": 12},
        {"key": "trace 7", "p10": 2, "p50": 2, "p90": 2, "p99": 2, "bucket": 205},
    ]
    (tmp_path / "lengths.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    model, candidate = first_models(tmp_path, tmp_path.__class__(f"replay:{tmp_path}/lengths.jsonl"))
    items = [query_of(text, "m") for text in ("anything", "trace 7", "unknown")]
    items[0] = items[0].__class__("r1", *("", "", "", 0, 0))
    found = model.predict_batch(items)
    assert candidate is None
    assert [p.request_id for p in found] == [item.request_id for item in items]
    assert [(p.p10_tokens, p.p50_tokens, p.p90_tokens, p.p99_tokens, p.bucket_tokens) for p in found] == [
        (1, 5, 9, 12, 0), (2, 2, 2, 2, 205), (0, 0, 0, 0, 0),
    ]  # fmt: skip
    model.scale = 2.5
    assert model.predict_batch(items[:1])[0].p90_tokens == 23
    model.scale = 1e12
    assert model.predict_batch(items[:1])[0].p90_tokens == 2**31 - 1


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("[]", "not an object"),
        ('{"p10": 1, "p50": 1, "p90": 1, "p99": 1}', "key is None"),
        ('{"key": "r", "p10": 1, "p50": 3, "p90": 2, "p99": 4}', "not within 1.. and in order"),
        ('{"key": "r", "p10": 1, "p50": NaN, "p90": 2, "p99": 4}', "NaN"),
        ('{"key": "r", "p10": -1, "p50": 1, "p90": 2, "p99": 4}', "p10 is -1"),
        ('{"key": "r", "p10": 1, "p50": 1, "p90": 2, "p99": 4000000000}', "p99 is 4000000000"),
    ],
)
def test_a_file_of_predictions_that_are_none_is_refused_with_its_line(line, words, tmp_path):
    path = tmp_path / "lengths.jsonl"
    path.write_text('{"key": "ok", "p10": 1, "p50": 1, "p90": 1, "p99": 1}\n' + line + "\n")
    with pytest.raises(BadData, match=r"lengths\.jsonl, line 2") as refusal:
        first_models(tmp_path, path.__class__(f"replay:{path}"))
    assert words in str(refusal.value)
