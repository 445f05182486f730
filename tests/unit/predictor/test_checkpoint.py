import io
import json
import pickle
import zipfile
from dataclasses import replace
from random import Random

import numpy as np
import pytest

from tests.unit.predictor.conftest import World, check_calibrator, teach
from weft_predictor.checkpoint import UNREADABLE, load, save
from weft_predictor.core import MIN_LEVEL, RidgeModel
from weft_predictor.errors import CorruptModel
from weft_predictor.models import first_models

DIM = 1 << 14


@pytest.fixture(scope="module")
def model() -> RidgeModel:
    """What a test teaches it, those after it have, too."""
    model = RidgeModel.cold("ridge-test", dim=DIM)
    for outcome in World(Random(1)).answers(400):
        teach(model, outcome)
    return model


def test_a_loaded_model_answers_and_learns_exactly_like_the_one_that_was_saved(model, world, tmp_path):
    model.calibrators.pooled.level, next(iter(model.calibrators.by_group.values())).level = MIN_LEVEL, 1.0
    save(tmp_path / "model.npz", model.save())
    again = load(tmp_path / "model.npz", RidgeModel.load)
    assert again.version == model.version
    assert again.coverage == model.coverage
    for outcome in world(2).answers(60):
        answers = [m.predict_batch([outcome.query]) for m in (model, again)]
        assert answers[0] == answers[1]
        assert teach(model, outcome) == teach(again, outcome)
    check_calibrator(again.calibrators.pooled)


def test_a_loaded_model_knows_who_taught_what_is_shared(world):
    model = RidgeModel.cold("ridge-test", dim=DIM)
    for answer, namespace, learns in zip(world(4).answers(2), ("acme", "globex"), (True, False), strict=True):
        teach(model, replace(answer, query=replace(answer.query, namespace=namespace)))
        model = RidgeModel.load(model.save())
        saved = json.loads(model.save()["meta"].tobytes())
        assert (saved["teacher"], saved["shared_learns"]) == ("acme", learns)


def test_a_snapshot_does_not_change_while_the_model_learns_on(model, world):
    before = model.save()
    copies = {name: array.copy() for name, array in before.items()}
    for outcome in world(3).answers(20):
        teach(model, outcome)
    assert all((before[name] == copies[name]).all() for name in copies)


def test_a_failed_save_leaves_the_old_model_and_nothing_else(model, tmp_path):
    path = tmp_path / "sub" / "model.npz"
    for _ in range(2):
        save(path, model.save())
    before = path.read_bytes()
    with pytest.raises(ValueError, match="allow_pickle"):
        save(path, {"object": np.array([object()])})
    assert path.read_bytes() == before
    assert [file.name for file in path.parent.iterdir()] == ["model.npz"]


DAMAGES = {
    "cut off": lambda content: content[: len(content) // 2],
    "empty": lambda _: b"",
    "no zip": lambda _: b"not a model at all",
    "a flipped byte": lambda content: content[:50_000] + bytes([content[50_000] ^ 0xFF]) + content[50_001:],
}


@pytest.mark.parametrize("how", DAMAGES)
def test_a_damaged_file_is_named_set_aside_and_replaced_by_a_cold_model(how, model, tmp_path, caplog):
    path = tmp_path / "model.npz"
    save(path, model.save())
    path.write_bytes(DAMAGES[how](path.read_bytes()))
    with pytest.raises(CorruptModel, match=r"model\.npz"):
        load(path, RidgeModel.load)
    fresh = first_models(tmp_path, None)[0]
    assert fresh.learned == 0
    assert [file.name for file in tmp_path.iterdir()] == ["model.npz.corrupt"]
    assert "saved model set aside" in caplog.text


def test_a_file_of_another_version_is_named_set_aside_and_answers_are_given(model, world, tmp_path):
    save(tmp_path / "model.npz", {**model.save(), "meta": np.frombuffer(b'{"layout": 99}', np.uint8)})
    with pytest.raises(CorruptModel, match="layout 99, this version reads 2"):
        load(tmp_path / "model.npz", RidgeModel.load)
    fresh = first_models(tmp_path, None)[0]
    assert (tmp_path / "model.npz.layout99").exists()
    (answer,) = fresh.predict_batch([next(iter(world(2).answers(1))).query])
    assert 0 < answer.p50_tokens <= answer.p99_tokens


@pytest.mark.parametrize(
    "change",
    [
        {"weight": np.zeros(1000, np.float32)}, {"weight": np.full(DIM, np.nan, np.float32)},
        {"spread_scale": np.zeros(3)}, {"variance": np.zeros(DIM, np.float32)}, {"spread_scale": np.full(20, -1.0)},
        {"meta": np.frombuffer(b'{"layout": 99}', np.uint8)}, {"meta": np.frombuffer(b"[]", np.uint8)},
        {"group_lengths": np.array([5])},
    ],
)  # fmt: skip
def test_arrays_that_are_no_model_are_refused(change, model):
    with pytest.raises((CorruptModel, *UNREADABLE)):
        RidgeModel.load({**model.save(), **change})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("layout", 1), ("learned", -1), ("base", float("nan")), ("own", 7),
        *(("groups", fields) for fields in ({1: float("nan")}, {1: 0.49}, {1: 1.01}, {2: -1}, {2: 1_001}, {3: -1})),
    ],
)  # fmt: skip
def test_a_model_with_poisoned_numbers_or_of_another_layout_is_refused(name, value, model):
    arrays = dict(model.save())
    meta = json.loads(arrays["meta"].tobytes())
    if name == "groups":
        value = [[value.get(i, known) for i, known in enumerate(group)] for group in meta["groups"]]
    meta[name] = value
    arrays["meta"] = np.frombuffer(json.dumps(meta).encode(), np.uint8)
    with pytest.raises((CorruptModel, *UNREADABLE)):
        RidgeModel.load(arrays)


def test_arrays_that_unpack_beyond_the_bound_are_refused_unread(tmp_path, monkeypatch):
    np.savez_compressed(tmp_path / "model.npz", weight=np.zeros(1 << 16))
    assert (tmp_path / "model.npz").stat().st_size < 10_000
    monkeypatch.setattr("weft_predictor.checkpoint.MAX_FILE_BYTES", 100_000)
    with pytest.raises(CorruptModel, match="bytes of arrays"):
        load(tmp_path / "model.npz", dict)


def test_nothing_is_ever_unpickled(tmp_path):
    class Trap:
        def __reduce__(self):
            return (open, (str(tmp_path / "sprung"), "w"))

    array = io.BytesIO()
    np.lib.format.write_array_header_1_0(array, {"descr": "|O", "fortran_order": False, "shape": (1,)})
    array.write(pickle.dumps(Trap()))
    with zipfile.ZipFile(tmp_path / "model.npz", "w") as file:
        file.writestr("meta.npy", array.getvalue())
    with pytest.raises(CorruptModel):
        load(tmp_path / "model.npz", RidgeModel.load)
    assert not (tmp_path / "sprung").exists()


def test_a_trained_model_is_the_start_where_none_was_saved(model, tmp_path):
    save(tmp_path / "trained.npz", model.save())
    assert first_models(tmp_path / "data", tmp_path / "trained.npz")[0].version == model.version
    with pytest.raises(FileNotFoundError):
        first_models(tmp_path / "data", tmp_path / "missing.npz")
