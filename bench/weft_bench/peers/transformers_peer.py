"""transformers' `generate` at the other end of a pipe, for the workers whose models differ; see `vllm_worker.py`."""

import json
import sys
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parent))
from vllm_worker import answer, own_stdout  # pyright: ignore[reportMissingImports] (beside this script)


def serve(load_model: Callable[[dict[str, Any]], tuple[Any, dict[str, str]]], library: str) -> None:
    """Answer every line of prompts. `load_model`: the model, adapters' names by folder; `library`: by what."""
    answers = own_stdout()
    work = json.loads(sys.stdin.readline())
    import torch
    import transformers

    torch.set_num_threads(work["threads"])
    model, names = load_model(work)
    extra = {"adapter_names": [names[folder] for folder in work["adapters"]]} if names else {}
    versions = (f"{module.__name__} {module.__version__}" for module in (transformers, import_module(library), torch))
    answer(answers, {"ready": ", ".join(versions)})
    for line in sys.stdin:
        asked = json.loads(line)
        ids, tokens = torch.tensor(asked["prompts"]), asked["tokens"]
        started = time.perf_counter()
        with torch.inference_mode():
            made = model.generate(
                input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=False, pad_token_id=0,
                min_new_tokens=tokens, max_new_tokens=tokens, **extra,
            )  # fmt: skip
        seconds = time.perf_counter() - started
        counts = [made.shape[1] - ids.shape[1]] * len(ids)
        answer(answers, {"seconds": seconds, "tokens": counts, "adapters": work["adapters"]})
