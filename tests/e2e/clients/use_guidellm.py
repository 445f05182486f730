"""guidellm: both kinds of requests that it sends to an OpenAI-compatible server, with lengths that it sets itself."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from asked import MODEL, MODEL_FOLDER, URL

REQUESTS, OUTPUT_TOKENS = 6, 16
FLAGS = {
    "--tokenizer": f"kind=huggingface_auto,model={MODEL_FOLDER}",
    "--data": f"kind=synthetic_text,prompt_tokens=32,output_tokens={OUTPUT_TOKENS}",
    "--profile": "kind=concurrent,streams=2",
    "--constraint": f"kind=max_requests,count={REQUESTS}",
}

with tempfile.TemporaryDirectory() as made:
    for form in ("/v1/completions", "/v1/chat/completions"):
        found = Path(made) / f"{form.rpartition('/v1/')[2].replace('/', '-')}.json"
        target = f"kind=openai_http,target={URL.removesuffix('/v1')},model={MODEL},request_format={form}"
        command = [str(Path(sys.executable).with_name("guidellm")), "run", "--backend", target]
        command += [text for flag in FLAGS.items() for text in flag]
        command += ["--output", f"kind=json,path={found}", "--disable-console"]
        subprocess.run(command, check=True)
        (benchmark,) = json.loads(found.read_text())["benchmarks"]
        done = benchmark["requests"]
        assert {state: len(requests) for state, requests in done.items() if requests} == {"successful": REQUESTS}
        assert {one["output_metrics"]["text_tokens"] for one in done["successful"]} == {OUTPUT_TOKENS}
