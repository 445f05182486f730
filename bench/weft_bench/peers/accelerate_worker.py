"""transformers + accelerate with weights on disk, at the other end of a pipe; see `vllm_worker.py`.

The work has two fields more: `weights_bytes`, of the layers that stay in memory, and `folder`, where accelerate may
write. The other layers are read from the checkpoint at each of their calls. Adapters are PEFT's, one for each row
(`adapter_names`), and stay in memory.
"""

import sys
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parent))
from transformers_peer import serve  # pyright: ignore[reportMissingImports] (beside this script)


def load_model(work: dict[str, Any]) -> tuple[Any, dict[str, str]]:
    """The model and the adapters' names by folder; none of them for the base alone."""
    import torch
    from accelerate import infer_auto_device_map, init_empty_weights
    from peft import PeftModel
    from transformers import AutoConfig, AutoModelForCausalLM

    dtype = torch.bfloat16
    with init_empty_weights():
        empty = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(work["base"]), dtype=dtype)
    whole: list[str] = sorted(empty._no_split_modules or ())
    places = infer_auto_device_map(
        empty, max_memory={"cpu": work["weights_bytes"]}, no_split_module_classes=whole, dtype=dtype
    )  # fmt: skip
    model = AutoModelForCausalLM.from_pretrained(
        work["base"], dtype=dtype, device_map=places, offload_folder=work["folder"]
    )  # fmt: skip
    used = sorted({folder for folder in work["adapters"] if folder})
    names = {folder: f"adapter{number}" for number, folder in enumerate(used)}
    if used:
        del model.hf_device_map  # else PEFT would place all of it anew
        options: dict[str, Any] = {"autocast_adapter_dtype": False, "torch_device": "cpu", "low_cpu_mem_usage": True}
        model = PeftModel.from_pretrained(
            model, used[0], adapter_name="unused", **options
        )  # goes to the disk with its layer
        for folder in used:
            model.load_adapter(folder, adapter_name=names[folder], **options)
    return model.eval(), names


if __name__ == "__main__":
    serve(load_model, "accelerate")
