"""transformers + PEFT at the other end of a pipe, one adapter per row through `adapter_names`; see `vllm_worker.py`."""

import sys
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parent))
from transformers_peer import serve  # pyright: ignore[reportMissingImports] (beside this script)


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
    serve(load_model, "peft")
