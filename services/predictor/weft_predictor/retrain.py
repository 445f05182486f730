"""`weft_predictor retrain`: the process that trains a network on answered prompts. The predictor starts it.

It reads the prompts (token ids) on standard input, a network in FOLDER, and writes another one, with its read-out and
calibration, to OUT. It runs at the lowest priority, with bounds of CPU time and memory, and the kernel ends it with its
parent. Nothing that happens here reaches the process that predicts.
"""

import ctypes
import os
import resource
import signal
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from weft_predictor.core.encoder import Encoder, EncoderClasses, class_of, deciles, tenths
from weft_predictor.core.retraining import AnsweredIds
from weft_predictor.datasets import AnsweredPrompt
from weft_predictor.encoder_files import parse, read_files
from weft_predictor.encoder_training import files_of, from_files, train_encoder
from weft_predictor.errors import CorruptModel, PredictorError
from weft_predictor.samples import decode_samples
from weft_predictor.training import fit_and_calibrate, save_model

LEARNING_RATE = 2e-4
HELD_OUT = 5  # every fifth prompt: its loss ends the training, and the read-out is fitted on it
MEMORY_BYTES, MEMORY_PER_WEIGHT_BYTE = 2 << 30, 16
PR_SET_PDEATHSIG = 1


def main(argv: Sequence[str]) -> int:
    """FOLDER NAME OUT CPU_SECONDS PARENT_PID. 0: OUT has a network, 1: there is none, and why is on standard error."""
    folder, name, out, cpu_s, parent = Path(argv[0]), argv[1], Path(argv[2]), int(argv[3]), int(argv[4])
    _bound(folder, cpu_s, parent)
    try:
        retrain(folder, name, out, decode_samples(sys.stdin.buffer.read()))
    except (PredictorError, OSError, MemoryError) as error:
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        return 1
    return 0


def retrain(folder: Path, name: str, out: Path, samples: Sequence[AnsweredIds]) -> None:
    """Train the network of that name further. S3's equal buckets stay, deciles become those of the samples."""
    files = read_files(folder)
    if files.name != name:
        raise CorruptModel(f"{folder} has {files.name} by now, not {name}")
    tokens = np.array([sample.tokens for sample in samples], dtype=np.int64)
    start = from_files(files)
    edges = start.shape.edges if start.shape.edges == tenths(start.shape.edges[-1]) else deciles(tokens)
    start = replace(start, shape=replace(start.shape, edges=edges), learning_rate=LEARNING_RATE)
    examples = list(zip([sample.ids.tolist() for sample in samples], class_of(tokens, edges).tolist(), strict=True))
    order = np.random.default_rng(0).permutation(len(samples)).tolist()
    held_out, fit = order[::HELD_OUT], [i for place, i in enumerate(order) if place % HELD_OUT]
    weights = train_encoder(start, [examples[i] for i in fit], [examples[i] for i in held_out], seed=0)
    trained = files_of(start, weights)
    features = EncoderClasses(Encoder(*parse(trained)), lambda number: examples[int(number)][0], trained.name)
    rows = [AnsweredPrompt(str(i), samples[i].adapter, len(samples[i].ids), samples[i].tokens) for i in held_out]
    save_model(out, fit_and_calibrate(features, rows, None), trained)


def _bound(folder: Path, cpu_s: int, parent: int) -> None:
    os.nice(19)
    weights = sum(file.stat().st_size for file in folder.iterdir())
    memory = MEMORY_BYTES + MEMORY_PER_WEIGHT_BYTE * weights
    for limit, most in ((resource.RLIMIT_CPU, cpu_s), (resource.RLIMIT_AS, memory), (resource.RLIMIT_CORE, 0)):
        resource.setrlimit(limit, (most, most))
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit("the parent is gone")
