import csv
import gzip
import io
import json
import sys

import numpy as np
import pytest

from weft.domain.prediction import Prediction
from weft_cli.main import main
from weft_predictor.checkpoint import load
from weft_predictor.core import RidgeModel
from weft_predictor.errors import BadData
from weft_predictor_train import training
from weft_predictor_train.datasets import Columns, read
from weft_predictor_train.evaluation import best_constant, bucket, evaluate, packing


@pytest.fixture
def data(world, tmp_path):
    rows = [
        {"prompt": f"{o.query.prompt_text} {i}", "adapter": o.query.model_name, "n_in": 8, "n_out": o.tokens}
        for i, o in enumerate(world(1).answers(1_500))
    ]
    path = tmp_path / "data.jsonl.gz"
    with gzip.open(path, "wt") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    return path


def test_train_prints_honest_figures_and_writes_the_model_it_measured(data, tmp_path, capsys):
    out = tmp_path / "model.npz"
    assert training.main([str(data), "--out", str(out), "--max-context-tokens", "1000"]) == 0
    text, progress = capsys.readouterr()
    for words in (
        "always the commonest bucket",
        "Kendall tau",
        "coverage at q90",
        "best constant",
        "oracle",
        "max 1000",
    ):
        assert words in text
    assert progress == "", "a progress bar only on a terminal"
    assert load(out, RidgeModel.load).version in text


def test_the_model_beats_the_constant_and_covers_90_percent(data):
    parts = training.split(read(data, Columns()))
    report = training.measure(training.train(parts, dim=1 << 14), parts, 1_000)
    constant, model = (next(p for p in report.packings if name in p.policy) for name in ("constant", "model"))
    assert report.kendall_tau > 0.6
    assert report.coverage == pytest.approx(0.9, abs=0.05)
    assert model.initial < 0.7 * constant.initial
    assert report.mae_tokens < 0.6 * report.mae_constant
    assert report.bucket_accuracy > report.majority


def test_a_prompt_is_never_on_two_sides_and_the_split_is_the_same_every_time(data):
    rows = read(data, Columns())
    first, second = training.split(rows), training.split(reversed(rows))
    sides = [{row.prompt for row in side} for side in (first.fit, first.calibrate, first.measure)]
    assert sum(map(len, sides)) == len(set().union(*sides))
    assert first == second
    assert [round(len(side) / len(rows), 1) for side in sides] == [0.6, 0.2, 0.2]


@pytest.mark.slow
def test_a_model_that_is_no_better_does_not_replace_the_one_there(data, tmp_path, capsys):
    out = tmp_path / "model.npz"
    assert training.main([str(data), "--out", str(out)]) == 0
    before = out.read_bytes()
    assert training.main([str(data), "--out", str(out)]) == 0
    assert "kept" in capsys.readouterr().out
    assert out.read_bytes() == before


def test_the_progress_bar_needs_a_terminal():
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    for stream, shown in ((Terminal(), True), (io.StringIO(), False)):
        assert list(training._bar("fit", range(400), stream)) == list(range(400))
        assert ("400/400" in stream.getvalue()) == shown


def test_csv_with_named_columns_is_read(tmp_path):
    path = tmp_path / "data.csv"
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([["ask", "size"], ["hello, world", "12"], ["bye", "0"]])
    rows = read(path, Columns(prompt="ask", length="size"))
    assert [(row.prompt, row.tokens, row.adapter) for row in rows] == [("hello, world", 12, ""), ("bye", 1, "")]


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.txt", "", "expected .jsonl"),
        ("a.jsonl", "", "no rows"),
        ("a.jsonl", '{"prompt": "x"}\n', "no column n_out"),
        ("a.jsonl", '{"prompt": "x", "n_out": 1}\n{"prompt": "x", "n_out": "many"}\n', "row 2"),
        ("a.jsonl", '{"prompt": "x", "n_out": -1}\n', "length -1"),
        ("a.jsonl", "{\n", "line 1"),
        ("a.jsonl", "[1]\n", "not an object"),
        ("a.jsonl.gz", "plain text", "a.jsonl.gz"),
        ("a.csv", "prompt,n_out\nx,1\n", "at least 50"),
    ],
)
def test_data_that_cannot_be_used_is_named_with_its_place(name, content, words, tmp_path, capsys):
    (tmp_path / name).write_text(content)
    assert training.main([str(tmp_path / name)]) == 1
    assert words in capsys.readouterr().err
    if "50" not in words:
        with pytest.raises(BadData):
            read(tmp_path / name, Columns())


@pytest.mark.parametrize(("tokens", "expected"), [(0, 0), (99, 0), (100, 1), (999, 9), (10**6, 9)])
def test_a_bucket_is_a_tenth_of_the_maximum(tokens, expected):
    assert bucket(tokens, 1_000) == expected


def test_s3_doubling_is_counted_per_request():
    row = packing("x", np.array([10, 10, 10]), np.array([10, 11, 35]))
    assert row.initial == pytest.approx(30 / 56)
    assert row.overrun == pytest.approx(2 / 3)
    assert row.final == pytest.approx((10 + 20 + 40) / 56)
    assert row.doublings == pytest.approx(3 / 3)


def test_a_predictor_that_knows_everything_scores_like_the_oracle():
    used = np.arange(1, 101)
    report = evaluate([Prediction("", int(n), int(n)) for n in used], used, used, max_context_tokens=1_000)
    assert report.kendall_tau == pytest.approx(1.0)
    assert report.coverage == 1.0
    assert report.pinball == 0.0
    assert report.packings[-1].initial == report.packings[-2].initial == 1.0
    assert best_constant(used) == 91


def test_training_without_scipy_is_refused_and_the_extra_is_named(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "scipy", None)
    monkeypatch.delitem(sys.modules, "weft_predictor_train.training")
    assert main(["predictor", "train", "data.jsonl"]) == 1
    assert "pip install 'weft[training]'" in capsys.readouterr().err
