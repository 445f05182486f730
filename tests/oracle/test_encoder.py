"""The length predictor's encoder against transformers' classifiers, on the same files."""

import numpy as np
import pytest
import torch
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    DistilBertConfig,
    DistilBertForSequenceClassification,
)

from weft_predictor.core import Encoder
from weft_predictor.encoder_files import EncoderFiles, parse, write_files
from weft_predictor.encoder_training import files_of, from_files, from_scratch

COMMON = {"vocab_size": 300, "max_position_embeddings": 32, "num_labels": 10, "initializer_range": 0.2}
DISTILBERT = (
    DistilBertForSequenceClassification,
    DistilBertConfig(dim=48, n_layers=3, n_heads=4, hidden_dim=96, **COMMON),
)
BERT = (
    BertForSequenceClassification,
    BertConfig(hidden_size=48, num_hidden_layers=3, num_attention_heads=4, intermediate_size=96, **COMMON),
)


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
        assert np.abs(encoder.logits(ids[0].tolist()) - expected).max() < 1e-4
        assert encoder.logits(ids[0].tolist()).argmax() == expected.argmax()


def test_transformers_reads_what_training_writes(tmp_path):
    start = from_scratch("1.5M", ["some words to begin with"], range(10, 110, 10), seed=1)
    files = files_of(start, start.weights)
    write_files(tmp_path, files)
    network = DistilBertForSequenceClassification.from_pretrained(tmp_path).eval()
    ids = list(start.examples(["some words"], [3])[0][0])
    with torch.inference_mode():
        expected = network(torch.tensor([ids])).logits[0].numpy()
    assert np.abs(Encoder(*parse(files)).logits(ids) - expected).max() < 1e-5
    assert from_files(files).shape == start.shape
