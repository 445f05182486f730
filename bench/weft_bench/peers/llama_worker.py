"""llama.cpp (its server, in the xllamacpp wheel) and ik_llama.cpp as workers; see `serve.py`.

The work has two fields more: `gguf`, the files of `llama_files.py` by folder, and `libraries`, whose versions are told.
Rows with different adapters run one after the other: llama.cpp's server makes a batch of requests with the same
adapters only, and ik_llama.cpp has adapters for a whole context. For the base alone no adapter is loaded, since one
that is not used makes the others slower.
"""

import ctypes
import json
import urllib.request
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from typing import Any

import numpy as np

ANSWER_S = 3600.0
Run = Callable[[list[list[int]], int], list[int]]


def load(work: dict[str, Any]) -> tuple[str, Callable[..., dict[str, Any]]]:
    """Return versions and what runs a batch."""
    (library,) = work["libraries"]
    used = sorted({folder for folder in work["adapters"] if folder})
    made = {"xllamacpp": server, "ik-llama-cpp-python": context}[library](work, used)

    def run(prompts: list[list[int]], tokens: int) -> dict[str, Any]:
        return {"rows": list(zip(made(prompts, tokens), work["adapters"], strict=True))}

    return f"{library} {version(library)} {work['kind']}", run


def server(work: dict[str, Any], used: Sequence[str]) -> Run:
    """Return llama.cpp's runner of batches, which returns the tokens of each row."""
    import xllamacpp  # pyright: ignore[reportMissingImports] (of another Python)

    params, rows = xllamacpp.CommonParams(), len(work["adapters"])
    params.model.path = work["gguf"][work["base"]]
    params.port, params.verbosity, params.cache_ram_mib = 0, 0, 0
    params.n_parallel, params.n_ctx = rows, rows * (work["context_tokens"] + 32)
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = work["threads"]
    params.lora_adapters = [xllamacpp.CommonAdapterLoraInfo(work["gguf"][each], 1.0) for each in used]
    params.lora_init_without_apply = True
    listening = xllamacpp.Server(params)
    lora = [[{"id": used.index(each), "scale": 1.0}] if each else [] for each in work["adapters"]]

    def run(prompts: list[list[int]], tokens: int) -> list[int]:
        def ask(prompt: list[int], adapters: list[dict[str, Any]]) -> int:
            body = {
                "prompt": prompt, "n_predict": tokens, "ignore_eos": True, "cache_prompt": False, "temperature": 0,
                "samplers": ["top_k"], "top_k": 1, "lora": adapters,
            }  # fmt: skip
            request = urllib.request.Request(f"{listening.listening_address}/completion", json.dumps(body).encode())
            with urllib.request.urlopen(request, timeout=ANSWER_S) as response:
                return json.load(response)["timings"]["predicted_n"]

        with ThreadPoolExecutor(rows) as threads:
            return list(threads.map(ask, prompts, lora))

    return run


def context(work: dict[str, Any], used: Sequence[str]) -> Run:
    """Return ik_llama.cpp's runner of batches, by its C interface: the class of its package runs one row alone."""
    from ik_llama_cpp import _ctypes_api as api  # pyright: ignore[reportMissingImports] (of another Python)

    library, rows, pointer = api._lib, len(work["adapters"]), ctypes.c_void_p
    library.llama_lora_adapter_init.restype = pointer
    library.llama_lora_adapter_init.argtypes = pointer, ctypes.c_char_p
    library.llama_lora_adapter_set.argtypes = pointer, pointer, ctypes.c_float
    library.llama_lora_adapter_clear.argtypes = (pointer,)
    model = api.llama_model_load_from_file(work["gguf"][work["base"]].encode(), api.llama_model_default_params())
    params = api.llama_context_default_params()
    params.n_ctx = params.n_batch = rows * (work["context_tokens"] + 32)
    params.n_seq_max, params.n_threads, params.n_threads_batch = rows, work["threads"], work["threads"]
    params.flash_attn = not used  # it has no flash attention beside adapters
    made, vocab = api.llama_init_from_model(model, params), api.llama_vocab_n_tokens(api.llama_model_get_vocab(model))
    adapters = {each: library.llama_lora_adapter_init(model, work["gguf"][each].encode()) for each in used}

    def step(inputs: dict[int, list[int]], begin: int) -> dict[int, list[int]]:
        """Compute each row's tokens, which begin at this position. Returns each row's likeliest next token."""
        batch, last = api.llama_batch_init(sum(map(len, inputs.values())), 0, 1), dict[int, int]()
        for row, tokens in inputs.items():
            for position, token in enumerate(tokens, begin):
                at = last[row] = batch.n_tokens
                batch.token[at], batch.pos[at], batch.n_seq_id[at], batch.seq_id[at][0] = token, position, 1, row
                batch.logits[at], batch.n_tokens = position == begin + len(tokens) - 1, at + 1
        code = api.llama_decode(made, batch)
        api.llama_batch_free(batch)
        if code:
            raise RuntimeError(f"expected llama_decode to return 0, got {code}")
        logits = {row: api.llama_get_logits_ith(made, at) for row, at in last.items()}
        return {row: [int(np.ctypeslib.as_array(each, (vocab,)).argmax())] for row, each in logits.items()}

    def run(prompts: list[list[int]], tokens: int) -> list[int]:
        """Run rows of the same adapter together. Prompts have one length."""
        counts = [0] * rows
        for adapter in dict.fromkeys(work["adapters"]):
            inputs = {row: prompts[row] for row, each in enumerate(work["adapters"]) if each == adapter}
            api.llama_kv_cache_clear(made)
            library.llama_lora_adapter_clear(made)
            if adapter and library.llama_lora_adapter_set(made, adapters[adapter], 1.0):
                raise RuntimeError(f"expected llama_lora_adapter_set to take {adapter}")
            for number in range(tokens):
                inputs = step(inputs, len(prompts[0]) + number - 1 if number else 0)
                for row in inputs:
                    counts[row] += 1
        return counts

    return run
