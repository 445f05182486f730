"""The length predictor's encoder against transformers' classifiers, on the same files, and what trains it."""

import json
from collections.abc import Sequence
from dataclasses import astuple, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save
from transformers import (
    AutoModelForSequenceClassification,
    BertConfig,
    BertForSequenceClassification,
    DistilBertConfig,
    DistilBertForSequenceClassification,
)

from harness.numerics import near
from tests.unit.predictor.conftest import parts_of, query_of
from weft_cli.main import main
from weft_predictor.core import Encoder, deciles
from weft_predictor.encoder_files import (
    CALIBRATION,
    EncoderFiles,
    parse,
    read_files,
    read_model,
    tokenize_with,
    write_files,
)
from weft_predictor.errors import BadData
from weft_predictor_train import networks, training
from weft_predictor_train.networks import from_files, from_scratch, held_out_loss, train_network
from weft_predictor_train.training import EncoderOptions, measure, train_encoder_model

COMMON = {"vocab_size": 300, "max_position_embeddings": 32, "num_labels": 10, "initializer_range": 0.2}
DISTILBERT = (
    DistilBertForSequenceClassification,
    DistilBertConfig(dim=48, n_layers=3, n_heads=4, hidden_dim=96, **COMMON),
)
BERT = (
    BertForSequenceClassification,
    BertConfig(hidden_size=48, num_hidden_layers=3, num_attention_heads=4, intermediate_size=96, **COMMON),
)


@pytest.mark.numeric
@pytest.mark.parametrize(("kind", "config"), [DISTILBERT, BERT])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_checkpoint_of_transformers_is_computed_exactly(kind, config, dtype, tmp_path):
    torch.manual_seed(3)
    network = kind(config).to(dtype)
    network.save_pretrained(tmp_path)
    files = EncoderFiles((tmp_path / "config.json").read_bytes(), (tmp_path / "model.safetensors").read_bytes(), b"")
    encoder = Encoder(*parse(files))
    network = network.float().eval()
    for length in (1, 2, 7, 32):
        ids = torch.randint(0, 300, (1, length))
        with torch.inference_mode():
            expected = network(ids, attention_mask=torch.ones_like(ids)).logits[0].numpy()
        near("encoder: logits of numpy", encoder.logits(ids[0].tolist()), expected, 1e-4)
        assert encoder.logits(ids[0].tolist()).argmax() == expected.argmax()


def is_computed_exactly(files: EncoderFiles, folder: Path, prompts: Sequence[Sequence[int]]) -> bool:
    """Whether numpy's logits are those of the classifier that transformers reads from the folder."""
    write_files(folder, files)
    network, encoder = AutoModelForSequenceClassification.from_pretrained(folder).eval(), Encoder(*parse(files))
    with torch.inference_mode():
        expected = [network(torch.tensor([list(ids)])).logits[0].numpy() for ids in prompts]
    return max(np.abs(encoder.logits(ids) - one).max() for ids, one in zip(prompts, expected, strict=True)) < 1e-4


@pytest.mark.parametrize(("kind", "config"), [DISTILBERT, BERT])
def test_a_checkpoint_is_trained_further_and_what_is_written_is_computed_exactly(kind, config, tmp_path):
    torch.manual_seed(3)
    kind(config).save_pretrained(tmp_path)
    start = from_files(
        EncoderFiles((tmp_path / "config.json").read_bytes(), (tmp_path / "model.safetensors").read_bytes(), b"")
    )
    rng = np.random.default_rng(0)
    examples = [(ids, ids[0] % 10) for ids in (rng.integers(1, 300, 1 + i % 20).tolist() for i in range(320))]
    before = held_out_loss(start.network, examples)
    train_network(replace(start, learning_rate=5e-3), examples, examples, seed=0, epochs=3)
    assert held_out_loss(start.network, examples) < before - 0.2
    assert is_computed_exactly(start.files(), tmp_path / "trained", [ids for ids, _ in examples[:20]])


def test_a_checkpoint_without_a_tensor_or_of_another_shape_is_refused(tmp_path):
    start = from_scratch((1, 2, 16, 32), ["some words"], range(10, 110, 10), seed=1)
    files = start.files()
    other = replace(files, config=files.config.replace(b'"hidden_dim": 32', b'"hidden_dim": 64'))
    with pytest.raises(BadData, match="does not fit"):
        from_files(other)
    del (tensors := start.network.state_dict())["classifier.bias"]
    with pytest.raises(BadData, match=r"no classifier\.bias"):
        from_files(replace(files, weights=save(tensors)))


@pytest.fixture(scope="module")
def trained():
    """A small network that learned from scratch, and quickly."""
    parts = parts_of(1, 700)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(training.SIZES, "tiny", (1, 2, 32, 64))
        patch.setattr(networks, "FROM_SCRATCH", 5e-3)
        yield parts, *train_encoder_model(parts, EncoderOptions("tiny", epochs=5))


def test_a_network_from_scratch_is_computed_exactly_and_ranks_answers(trained, tmp_path):
    parts, files, model = trained
    tokenize = tokenize_with(files.tokenizer, parse(files)[0])
    assert is_computed_exactly(files, tmp_path, [tokenize(row.prompt) for row in parts.measure[:40]])
    report = measure(model, parts, 2_048)
    assert report.kendall_tau > 0.5
    assert report.mae_tokens < 0.9 * report.mae_constant
    assert report.coverage == pytest.approx(0.9, abs=0.06)
    short, long = model.predict_batch([query_of(f"{task} something", "acme/plain") for task in ("name", "essay")])
    assert short.bucket_tokens < long.bucket_tokens
    assert from_files(files).shape.edges == deciles(np.array([row.tokens for row in parts.fit]))


def test_the_same_seed_trains_the_same_network_and_another_seed_another(trained):
    parts, first, _ = trained
    one, same, other = (train_encoder_model(parts, EncoderOptions("tiny", seed=n, epochs=1))[0] for n in (1, 1, 2))
    assert one == same
    assert (one.tokenizer, one.config) == (other.tokenizer, other.config) == (first.tokenizer, first.config)
    assert one.weights != other.weights


def test_the_command_writes_a_folder_that_it_measured_and_goes_on_from_one(trained, tmp_path, capsys):
    data, out, further = tmp_path / "data.jsonl", tmp_path / "out", tmp_path / "further"
    rows = [row for part in astuple(trained[0]) for row in part]
    data.write_text("".join(json.dumps({"prompt": prompt, "n_out": tokens}) + "\n" for prompt, _, _, tokens in rows))
    words = ["predictor", "train", str(data), "--kind", "encoder", "--size", "tiny", "--epochs", "1"]
    assert main([*words, "--out", str(out), "--buckets", "tenths", "--max-context-tokens", "1000"]) == 0
    assert "Kendall tau" in capsys.readouterr().out
    assert {file.name for file in out.iterdir()} == {"config.json", "model.safetensors", "tokenizer.json", CALIBRATION}
    assert json.loads((out / "config.json").read_text())["weft_bucket_tokens"][0] == 100
    assert main([*words, "--out", str(further), "--checkpoint", str(out)]) == 0
    first, second = read_model(out), read_model(further)
    assert first.family != second.family
    assert read_files(out).tokenizer == read_files(further).tokenizer
