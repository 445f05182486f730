"""aiperf: chats and completions, streamed and whole, of a fixed length."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from asked import MODEL, MODEL_FOLDER, URL

REQUESTS, OUTPUT_TOKENS = 6, 16

with tempfile.TemporaryDirectory() as made:
    for form in ("chat", "completions"):
        for streaming in ((), ("--streaming",)):
            found = Path(made) / f"{form}{len(streaming)}"
            command = [str(Path(sys.executable).with_name("aiperf")), "profile", "--model", MODEL, *streaming]
            command += ["--url", URL.removesuffix("/v1"), "--endpoint-type", form, "--tokenizer", MODEL_FOLDER]
            command += ["--request-count", str(REQUESTS), "--concurrency", "2", "--extra-inputs", "ignore_eos:true"]
            command += ["--isl", "32", "--osl", str(OUTPUT_TOKENS), "--ui", "none", "--output-artifact-dir", str(found)]
            subprocess.run(command, check=True)
            figures = json.loads((found / "profile_export_aiperf.json").read_text())
            assert figures["request_count"]["avg"] == REQUESTS
            assert figures.get("error_request_count", {"avg": 0})["avg"] == 0
            if streaming:
                assert figures["time_to_first_token"]["avg"] > 0
