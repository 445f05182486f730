"""The S3 form: a small network trained on made-up prompts, its files, and what the ridge makes of its classes."""

import json
import shutil
import sys
from functools import partial
from itertools import pairwise
from pathlib import Path
from random import Random

import numpy as np
import pytest

from tests.unit.predictor.conftest import World, outcome_of, query_of, teach
from weft_predictor import training
from weft_predictor.checkpoint import load, save
from weft_predictor.core import RidgeModel, class_of, deciles, tenths
from weft_predictor.datasets import AnsweredPrompt
from weft_predictor.encoder_files import CALIBRATION, encoder_of, read_files, read_model
from weft_predictor.errors import CorruptModel
from weft_predictor.models import first_models
from weft_predictor.training import EncoderOptions, promote, split, train_encoder_model


def parts_of(seed: int, rows: int) -> training.Split:
    answers = World(Random(seed)).answers(rows)
    return split(
        AnsweredPrompt(f"{one.query.prompt_text} {i}", one.query.model_name, 8, one.tokens)
        for i, one in enumerate(answers)
    )


@pytest.fixture(scope="module")
def trained():
    parts = parts_of(1, 700)
    return parts, *train_encoder_model(parts, EncoderOptions(epochs=5))


@pytest.fixture(scope="module")
def promoted(trained, tmp_path_factory) -> Path:
    parts, files, model = trained
    report, folder = training.measure(model, parts, 2_048), tmp_path_factory.mktemp("promoted") / "encoder"
    assert promote(model, report, parts, folder, 2_048, files).startswith("wrote")
    return folder


@pytest.fixture
def folder(promoted, tmp_path) -> Path:
    """A copy that a test may change."""
    return shutil.copytree(promoted, tmp_path / "encoder")


@pytest.mark.slow
def test_a_trained_encoder_beats_the_constant_and_covers_90_percent():
    parts = parts_of(1, 2_000)
    _, model = train_encoder_model(parts, EncoderOptions(epochs=4))
    report = training.measure(model, parts, 2_048)
    assert report.kendall_tau > 0.4
    assert report.mae_tokens < 0.8 * report.mae_constant
    assert report.coverage == pytest.approx(0.9, abs=0.05)


@pytest.mark.slow
def test_the_same_seed_trains_the_same_network_and_another_seed_another():
    parts = parts_of(2, 700)
    one, same, other = (train_encoder_model(parts, EncoderOptions(epochs=1, seed=seed))[0] for seed in (1, 1, 2))
    assert one == same
    assert (one.tokenizer, one.config) == (other.tokenizer, other.config)
    assert one.weights != other.weights


@pytest.mark.slow
def test_training_continues_from_a_checkpoint(trained, folder):
    parts, files, _ = trained
    again, _ = train_encoder_model(parts, EncoderOptions(epochs=1, checkpoint=folder))
    assert again.tokenizer == files.tokenizer
    assert again.weights != files.weights


@pytest.mark.slow
def test_a_folder_answers_like_the_model_it_was_written_from_and_is_kept_if_it_is_as_good(trained, folder):
    parts, files, model = trained
    again, items = read_model(folder), [query_of("essay on birds", "acme/plain"), query_of("", "x")]
    assert again.predict_batch(items) == model.predict_batch(items)
    assert promote(again, training.measure(again, parts, 2_048), parts, folder, 2_048, files).startswith("kept")


def test_a_prediction_does_not_depend_on_its_batch_and_its_bucket_is_that_of_the_likeliest_class(trained):
    _, files, model = trained
    classes = encoder_of(files)
    items = [query_of(f"{task} something {'long ' * i}", "acme/plain") for i, task in enumerate(("name", "essay"))]
    both = model.predict_batch(items)
    assert both == [model.predict_batch([item])[0] for item in items]
    edges, p = json.loads(files.config)["weft_bucket_tokens"], classes.log_probabilities([i.prompt_text for i in items])
    assert [one.bucket_tokens for one in both] == [edges[best] for best in p.argmax(1)]
    assert both[0].bucket_tokens < both[1].bucket_tokens
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
    assert first.p50_tokens > model.predict_batch([query_of("name birds", "acme/plain")])[0].p50_tokens
    assert all(teach(model, answer).lesson == "learned" for answer in here.answers(20))
    assert model.version.endswith("+20")


def test_outcomes_survive_a_restart_but_not_another_encoder(folder, trained, tmp_path, caplog):
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
        ({"weft_bucket_tokens": ["1"] * 10}, "no list of integers"),
        ({"weft_bucket_tokens": [*range(9, 0, -1), 10]}, "not 10 rising"),
        ({"vocab_size": 9_000}, "word_embeddings.weight is not 9000x128"),
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


@pytest.mark.slow
def test_the_command_writes_a_folder_that_it_measured(tmp_path, capsys):
    data, out = tmp_path / "data.jsonl", tmp_path / "out"
    parts = parts_of(2, 700)
    rows = [*parts.fit, *parts.calibrate, *parts.measure]
    data.write_text("".join(json.dumps({"prompt": row.prompt, "n_out": row.tokens}) + "\n" for row in rows))
    words = ["--kind", "encoder", "--epochs", "1", "--buckets", "tenths", "--max-context-tokens", "1000"]
    assert training.main([str(data), "--out", str(out), *words]) == 0
    assert "Kendall tau" in capsys.readouterr().out
    assert {file.name for file in out.iterdir()} == {"config.json", "model.safetensors", "tokenizer.json", CALIBRATION}
    assert json.loads((out / "config.json").read_text())["weft_bucket_tokens"][0] == 100
    read = partial(RidgeModel.load, featurizer=encoder_of(read_files(out)))
    assert load(out / CALIBRATION, read).version == read_model(out).version


def test_an_encoder_without_scipy_is_refused_and_the_extra_is_named(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "scipy.special", None)
    with pytest.raises(CorruptModel, match=r"pip install 'weft\[encoder\]'"):
        read_model(folder)
