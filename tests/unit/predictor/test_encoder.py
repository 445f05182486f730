"""The S3 form: a network's files, what it computes of a prompt, and what the ridge makes of its classes."""

import json
import shutil
import sys
from functools import partial
from itertools import pairwise
from pathlib import Path
from random import Random

import numpy as np
import pytest
from safetensors.numpy import save as to_safetensors

from harness.numerics import near
from tests.unit.predictor.conftest import World, outcome_of, parts_of, query_of, random_weights, teach
from weft_predictor.checkpoint import load, save
from weft_predictor.core import Encoder, EncoderShape, RidgeModel, class_of, deciles, tenths
from weft_predictor.encoder_files import CALIBRATION, EncoderFiles, encoder_of, read_model
from weft_predictor.errors import BadData, CorruptModel
from weft_predictor.models import first_models
from weft_predictor_train import training
from weft_predictor_train.vocabulary import tokenizer_of

LOGITS = {  # of transformers' classifiers with the same weights
    "distilbert": [-1.2453, -0.8658, 0.1577],
    "bert": [-0.4943, -1.7843, -2.5077],
}
SHAPE = EncoderShape("distilbert", 300, 32, 2, 4, 16, 32, deciles(np.geomspace(5, 900, 100).astype(np.int64)))
CONFIG = {
    "model_type": "distilbert", "vocab_size": 300, "max_position_embeddings": 32, "n_layers": 2, "n_heads": 4,
    "dim": 16, "hidden_dim": 32, "weft_bucket_tokens": SHAPE.edges,
}  # fmt: skip


@pytest.fixture(scope="module")
def mounted():
    """A network of random weights, and a model that reads its classes."""
    parts = parts_of(1, 700)
    weights, tokenizer = to_safetensors(random_weights(SHAPE)), tokenizer_of([row.prompt for row in parts.fit[:20]])
    files = EncoderFiles(json.dumps(CONFIG).encode(), weights, tokenizer)
    return parts, files, training.fit_and_calibrate(encoder_of(files), parts.calibrate, None)


@pytest.fixture(scope="module")
def promoted(mounted, tmp_path_factory) -> Path:
    parts, files, model = mounted
    report, folder = training.measure(model, parts, 2_048), tmp_path_factory.mktemp("promoted") / "encoder"
    assert training.promote(model, report, parts, folder, 2_048, files).startswith("wrote")
    return folder


@pytest.fixture
def folder(promoted, tmp_path) -> Path:
    """A copy that a test may change."""
    return shutil.copytree(promoted, tmp_path / "encoder")


@pytest.mark.numeric
@pytest.mark.parametrize("kind", LOGITS)
def test_logits_are_those_of_transformers_and_a_prompt_is_cut_at_the_positions(kind):
    shape = EncoderShape(kind, 11, 6, 2, 2, 8, 12, (5, 20, 100))
    encoder = Encoder(shape, random_weights(shape))
    near("encoder: logits of numpy", encoder.logits((2, 9, 4, 10, 5, 3)), LOGITS[kind], 1e-4)
    assert encoder.logits((2, 9, 4, 10, 5, 3, 8)).tolist() == encoder.logits((2, 9, 4, 10, 5, 3)).tolist()


def test_a_folder_answers_like_the_model_it_was_written_from_and_is_kept_if_it_is_as_good(mounted, folder):
    parts, files, model = mounted
    again, items = read_model(folder), [query_of("essay on birds", "acme/plain"), query_of("", "x")]
    assert again.predict_batch(items) == model.predict_batch(items)
    assert training.promote(again, training.measure(again, parts, 2_048), parts, folder, 2_048, files).startswith(
        "kept"
    )
    assert load(folder / CALIBRATION, partial(RidgeModel.load, featurizer=encoder_of(files))).version == again.version


def test_a_prediction_does_not_depend_on_its_batch_and_its_bucket_is_that_of_the_likeliest_class(mounted):
    _, files, model = mounted
    classes = encoder_of(files)
    items = [query_of(f"{task} something {'long ' * i}", "acme/plain") for i, task in enumerate(("name", "essay"))]
    both = model.predict_batch(items)
    assert both == [model.predict_batch([item])[0] for item in items]
    edges, p = json.loads(files.config)["weft_bucket_tokens"], classes.log_probabilities([i.prompt_text for i in items])
    assert [one.bucket_tokens for one in both] == [edges[best] for best in p.argmax(1)]
    assert np.exp(p).sum(1) == pytest.approx(1.0)
    rows, _ = classes.rows([(item.prompt_text, 0) for item in items])
    values = rows.value.reshape(2, 21)
    assert values == pytest.approx(np.hstack([np.ones((2, 1)), np.exp(p), np.maximum(p, -10.0) / -10.0]))
    middles = [(low + high) / 2 for low, high in pairwise([0, *edges])]
    untaught = classes.uncalibrated().predict_rows(rows)
    assert untaught == pytest.approx(np.exp(p) @ np.log(np.maximum(middles, 1.0)), abs=1e-4)


def test_a_mounted_network_without_calibration_answers_at_once_and_learns(folder):
    (folder / CALIBRATION).unlink()
    model, here = read_model(folder), World(Random(6))
    first = model.predict_batch([query_of("essay on birds", "acme/plain")])[0]
    assert 0 < first.p10_tokens < first.p50_tokens < first.p90_tokens < first.p99_tokens
    assert all(teach(model, answer).lesson == "learned" for answer in here.answers(20))
    assert model.version.endswith("+20")


def test_outcomes_survive_a_restart_but_not_another_encoder(folder, tmp_path, caplog):
    model, path = read_model(folder), tmp_path / "model.npz"
    for answer in World(Random(7)).answers(5):
        teach(model, answer)
    save(path, model.save())
    assert first_models(path.parent, folder)[0].version == model.version
    assert first_models(path.parent, None)[0].version.startswith("ridge-"), "a ridge cannot read an encoder's weights"
    assert "saved model set aside" in caplog.text
    assert not path.exists()
    assert model.observe(outcome_of(answer)).lesson == "duplicate"


def test_a_calibration_of_another_network_is_refused(folder):
    config = folder / "config.json"
    config.write_text(config.read_text() + " ")
    with pytest.raises(CorruptModel, match="it reads the features of encoder-"):
        read_model(folder)


def edit(folder: Path, **fields: object) -> None:
    config = folder / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | fields))


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"model_type": "gpt2"}, "model_type is 'gpt2'"), ({"dim": 1 << 40}, "dim is 1099511627776"),
        ({"n_heads": 3}, "3 heads"), ({"n_layers": True}, "n_layers is True"),
        ({"n_layers": 3}, "transformer.layer.2"), ({"activation": "relu"}, "only gelu"),
        ({"weft_bucket_tokens": [1, 2]}, "not 10 rising"),
        ({"weft_bucket_tokens": ["1"] * 10}, "not a list of integers"),
        ({"weft_bucket_tokens": [*range(9, 0, -1), 10]}, "not 10 rising"),
        ({"vocab_size": 9_000}, "word_embeddings.weight is not 9000x16"),
    ],
)  # fmt: skip
def test_a_wrong_config_is_an_error_that_names_the_field(folder, fields, words):
    edit(folder, **fields)
    with pytest.raises(CorruptModel, match=words):
        read_model(folder)


def test_damaged_weights_and_tokenizers_are_errors_with_the_file(folder):
    weights, tokenizer = folder / "model.safetensors", folder / "tokenizer.json"
    whole = weights.read_bytes()
    for damaged in (b"", whole[:100], whole[:-4], whole[:-4] + np.float32("nan").tobytes()):
        weights.write_bytes(damaged)
        with pytest.raises(CorruptModel):
            read_model(folder)
    weights.write_bytes(whole)
    tokenizer.write_text("{}")
    with pytest.raises(CorruptModel, match=r"tokenizer\.json"):
        read_model(folder)
    tokenizer.unlink()
    with pytest.raises(FileNotFoundError):
        read_model(folder)


def test_classes_are_s3s_tenths_or_hold_as_many_answers_each():
    assert tenths(2_048) == (204, 409, 614, 819, 1024, 1228, 1433, 1638, 1843, 2048)
    assert class_of(np.array([1, 204, 205, 2_047, 9_999]), tenths(2_048)).tolist() == [0, 0, 1, 9, 9]
    lengths = np.random.default_rng(0).lognormal(4, 1, 5_000).astype(np.int64) + 1
    assert np.bincount(class_of(lengths, deciles(lengths))) == pytest.approx(500, abs=60)
    assert deciles(np.ones(10, dtype=np.int64)) == tuple(range(1, 11)), "they rise whatever the lengths are"


def test_an_encoder_without_scipy_is_refused_and_the_extra_is_named(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "scipy.special", None)
    with pytest.raises(CorruptModel, match=r"pip install 'weft\[encoder\]'"):
        read_model(folder)


def test_training_an_encoder_without_torch_is_refused_and_the_extra_is_named(mounted, monkeypatch):
    monkeypatch.delitem(sys.modules, "weft_predictor_train.networks", raising=False)
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(BadData, match=r"pip install 'weft\[encoder-training\]'"):
        training.train_encoder_model(mounted[0], training.EncoderOptions())
