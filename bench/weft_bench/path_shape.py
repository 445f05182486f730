"""Manifests of a pool with a random model and its adapters, for stacks of benchmarks."""

import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers
import yaml

from weft_bench.drive.engine import Sizes, pages_of
from weft_stage.shapes import Shape

MODEL, NAMESPACE = "base", "default"  # the adapters say that they were trained on "base"
SPECIAL = ("<unk>", "<s>", "</s>")


def write_manifests(
    folder: Path,
    base: Path,
    adapters: Sequence[Path],
    shape: Shape,
    sizes: Sizes,
    spec: Mapping[str, Any] | None = None,
) -> Path:
    """Write a pool with this base, and its adapters. `spec`: fields of the pool that are others; None leaves one out.

    Files of the same file system are not copied.
    """
    for source, target in ((base, folder / "model"), *((path, folder / path.name) for path in adapters)):
        shutil.copytree(source, target, copy_function=_linked)
    (folder / "model" / "tokenizer.json").write_text(tokenizer(shape.vocab), encoding="utf-8")
    pool = {
        "model": {"name": MODEL, "uri": "file:model"},
        "replicas": 1,
        "lora": {"maxRank": sizes.max_rank},
        "advanced": {
            "maxSequences": sizes.rows, "maxBatchTokens": sizes.batch_tokens, "maxQueue": 100_000,
            "maxAdapters": sizes.slots, "kvPages": pages_of(sizes), "speculation": sizes.speculation.capitalize(),
        },
        "slo": {"tokenTimeMs": sizes.token_time_ms},
        **(spec or {}),
    }  # fmt: skip
    objects = [_object("ServingPool", MODEL, {name: value for name, value in pool.items() if value is not None})]
    for path in adapters:
        source = {"uri": f"file:{path.name}"}
        objects.append(_object("LoRAAdapter", path.name, {"poolRef": {"name": MODEL}, "source": source}))
    (folder / "bench.yaml").write_text(yaml.safe_dump_all(objects), encoding="utf-8")
    return folder


def _object(kind: str, name: str, spec: Mapping[str, Any]) -> dict[str, Any]:
    metadata = {"name": name, "namespace": NAMESPACE}
    return {"apiVersion": "serving.weft.dev/v1alpha1", "kind": kind, "metadata": metadata, "spec": spec}


def tokenizer(vocab: int) -> str:
    """Return `tokenizer.json` of a vocabulary of numbered words: token 17 is `w17`."""
    words = {word: i for i, word in enumerate(SPECIAL)} | {f"w{i}": i for i in range(len(SPECIAL), vocab)}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token=SPECIAL[0]))
    made.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    made.add_special_tokens(list(SPECIAL))
    return made.to_str()


def _linked(source: str, target: str) -> None:
    """Give the file a second name, or copy it where that cannot be. (The depot refuses links that leave its root.)"""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy(source, target)
