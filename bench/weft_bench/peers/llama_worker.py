"""llama.cpp (its server, in the xllamacpp wheel) at the other end of a pipe; see `vllm_worker.py`.

The work has two fields more: `gguf`, the folder of `llama_files.py`, and `weights`, the base's kind there. Requests
with different adapters run one after the other: the server puts two into one batch only where their adapters are the
same. For the base alone it is given no adapters: merely knowing some makes requests without one dearer.
"""

import json
import os
import sys
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parent))
from llama_files import base_file, file_of  # pyright: ignore[reportMissingImports] (beside this script)
from vllm_worker import answer, own_stdout  # pyright: ignore[reportMissingImports]

ANSWER_S = 3600.0


def main() -> None:
    answers = own_stdout()
    work = json.loads(sys.stdin.readline())
    used = sorted({folder for folder in work["adapters"] if folder})
    server = _server(work, used)
    rows = [used.index(folder) if folder else None for folder in work["adapters"]]
    answer(answers, {"ready": f"xllamacpp {version('xllamacpp')} {work['weights']}"})
    for line in sys.stdin:
        asked = json.loads(line)

        def ask(prompt: list[int], adapter: int | None, tokens: int = asked["tokens"]) -> int:
            return _made(server.listening_address, prompt, adapter, tokens)

        started = time.perf_counter()
        with ThreadPoolExecutor(len(rows)) as threads:
            made = list(threads.map(ask, asked["prompts"], rows))
        seconds = time.perf_counter() - started
        answer(answers, {"seconds": seconds, "tokens": made, "adapters": work["adapters"]})
    os._exit(0)  # the server's threads do not end


def _server(work: dict[str, Any], used: list[str]) -> Any:
    import xllamacpp  # pyright: ignore[reportMissingImports] (of another Python)

    folder, params, rows = Path(work["gguf"]), xllamacpp.CommonParams(), len(work["adapters"])
    params.model.path = str(base_file(folder, work["weights"]))
    params.port, params.verbosity, params.cache_ram_mib = 0, 0, 0
    params.n_parallel, params.n_ctx = rows, rows * (work["context_tokens"] + 32)
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = work["threads"]
    files = [str(file_of(folder, Path(each))) for each in used]
    params.lora_adapters = [xllamacpp.CommonAdapterLoraInfo(file, 1.0) for file in files]
    params.lora_init_without_apply = True
    return xllamacpp.Server(params)


def _made(address: str, prompt: list[int], adapter: int | None, tokens: int) -> int:
    """How many tokens a request got."""
    body = {
        "prompt": prompt, "n_predict": tokens, "ignore_eos": True, "cache_prompt": False, "temperature": 0,
        "samplers": ["top_k"], "top_k": 1, "lora": [] if adapter is None else [{"id": adapter, "scale": 1.0}],
    }  # fmt: skip
    request = urllib.request.Request(f"{address}/completion", json.dumps(body).encode())
    with urllib.request.urlopen(request, timeout=ANSWER_S) as response:
        return json.load(response)["timings"]["predicted_n"]


if __name__ == "__main__":
    main()
