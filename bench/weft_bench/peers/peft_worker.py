"""transformers + PEFT at the other end of a pipe, one adapter per row through `adapter_names`; see `vllm_worker.py`."""

import json
import sys
import time
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parent))
from vllm_worker import answer, own_stdout  # pyright: ignore[reportMissingImports] (beside this script)


def main() -> None:
    answers = own_stdout()
    work = json.loads(sys.stdin.readline())
    import peft
    import torch
    import transformers

    torch.set_num_threads(work["threads"])
    model, names = load_model(work)
    extra = {"adapter_names": [names[folder] for folder in work["adapters"]]} if names else {}
    versions = (f"{module.__name__} {module.__version__}" for module in (transformers, peft, torch))
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


def load_model(work: dict[str, Any]) -> tuple[Any, dict[str, str]]:
    """The model and the adapters' names by folder; none of them for the base alone. All of it in bf16, as ours is."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(work["base"], dtype=torch.bfloat16)
    used = sorted({folder for folder in work["adapters"] if folder})
    names = {folder: f"adapter{number}" for number, folder in enumerate(used)}
    if used:
        model = PeftModel.from_pretrained(model, used[0], adapter_name=names[used[0]], autocast_adapter_dtype=False)
        for folder in used[1:]:
            model.load_adapter(folder, adapter_name=names[folder], autocast_adapter_dtype=False)
    return model.eval(), names


if __name__ == "__main__":
    main()
