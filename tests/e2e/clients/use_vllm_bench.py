"""`vllm bench serve`: completions, and chats spread over adapters, with its defaults."""

import argparse
import json
import tempfile
from pathlib import Path

from asked import MODEL, MODEL_FOLDER, URL
from vllm.benchmarks.serve import add_cli_args, main

REQUESTS = 20
WORK = ["--dataset-name", "random", "--random-input-len", "32", "--random-output-len", "16", "--num-prompts", "20"]
CHATS = (
    "--backend",
    "openai-chat",
    "--endpoint",
    "/v1/chat/completions",
    "--lora-modules",
    "acme/upper",
    "globex/digits",
)

for flags in ((), CHATS):
    parser = argparse.ArgumentParser()
    add_cli_args(parser)
    with tempfile.TemporaryDirectory() as made:
        command = ["--base-url", URL.removesuffix("/v1"), "--model", MODEL, "--tokenizer", str(MODEL_FOLDER), *WORK]
        command += ["--save-result", "--result-dir", made, "--result-filename", "result.json", *flags]
        main(parser.parse_args(command))
        result = json.loads((Path(made) / "result.json").read_text())
    assert (result["completed"], result["failed"]) == (REQUESTS, 0), result
    assert result["total_output_tokens"] > 0, result
