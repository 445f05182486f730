"""transformers and PEFT as a worker, an adapter for each row by `adapter_names`; see `serve.py`. All of it is in bf16.

The work has the field `libraries`, whose versions are told. With zentorch, forward passes are compiled by it. With
`weights_bytes`, accelerate keeps that many bytes of layers in memory and reads the other layers from the checkpoint at
each call; it may write to `folder`. Adapters stay in memory.
"""

from collections.abc import Callable
from importlib import import_module
from typing import Any


def load(work: dict[str, Any]) -> tuple[str, Callable[..., dict[str, Any]]]:
    """Return versions and what runs a batch."""
    import torch

    torch.set_num_threads(work["threads"])
    versions = [f"{name} {import_module(name).__version__}" for name in ("transformers", *work["libraries"], "torch")]
    model, names = load_model(work)
    extra = {"adapter_names": [names[folder] for folder in work["adapters"]]} if names else {}
    if "zentorch" in work["libraries"]:
        base = model.get_base_model() if names else model
        base.forward = torch.compile(base.forward, backend="zentorch", dynamic=True)

    def run(prompts: list[list[int]], tokens: int) -> dict[str, Any]:
        ids = torch.tensor(prompts)
        with torch.inference_mode():
            made = model.generate(
                input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=False, pad_token_id=0,
                min_new_tokens=tokens, max_new_tokens=tokens, **extra,
            )  # fmt: skip
        return {"rows": [(made.shape[1] - ids.shape[1], adapter) for adapter in work["adapters"]]}

    return ", ".join(versions), run


def load_model(work: dict[str, Any]) -> tuple[Any, dict[str, str]]:
    """Return the model, and the names of its adapters by folder."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    on_disk, options = "weights_bytes" in work, dict[str, Any](autocast_adapter_dtype=False)
    placed = _placed(work) if on_disk else {}
    model: Any = AutoModelForCausalLM.from_pretrained(work["base"], dtype=torch.bfloat16, **placed)
    used = sorted({folder for folder in work["adapters"] if folder})
    names = {folder: f"adapter{number}" for number, folder in enumerate(used)}
    if used and on_disk:
        del model.hf_device_map  # else PEFT would place all of it anew
        options |= {"torch_device": "cpu", "low_cpu_mem_usage": True}
    if used:
        first = "unused" if on_disk else names[used[0]]  # the first one goes to the disk with its layer
        model = PeftModel.from_pretrained(model, used[0], adapter_name=first, **options)
        for folder in used if on_disk else used[1:]:
            model.load_adapter(folder, adapter_name=names[folder], **options)
    return model.eval(), names


def _placed(work: dict[str, Any]) -> dict[str, Any]:
    """Return what places the layers beyond `weights_bytes` on disk."""
    import torch
    from accelerate import infer_auto_device_map, init_empty_weights
    from transformers import AutoConfig, AutoModelForCausalLM

    with init_empty_weights():
        empty = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(work["base"]), dtype=torch.bfloat16)
    layers: list[str] = sorted(empty._no_split_modules or ())
    places = infer_auto_device_map(
        empty, max_memory={"cpu": work["weights_bytes"]}, no_split_module_classes=layers, dtype=torch.bfloat16
    )
    return {"device_map": places, "offload_folder": work["folder"]}
