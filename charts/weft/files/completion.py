"""`helm test`: one completion through the gateway's Service. Standard library only."""

import json
import os
import sys
import urllib.error
import urllib.request

TIMEOUT_S = 60


def ask(path: str, body: dict | None = None) -> dict:
    headers = {"Content-Type": "application/json"}
    if key := os.environ.get("API_KEY"):
        headers["Authorization"] = f"Bearer {key}"
    data = json.dumps(body).encode() if body else None
    request = urllib.request.Request(os.environ["URL"] + path, data, headers)  # noqa: S310 (the gateway's)
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:  # noqa: S310
            return json.load(answer)
    except urllib.error.HTTPError as error:
        sys.exit(f"{path}: {error.code} {error.read().decode(errors='replace')}")
    except OSError as error:
        sys.exit(f"{path}: {error}")


model = os.environ.get("MODEL")
if not model:
    listed = ask("/v1/models")["data"]
    if not listed:
        sys.exit("/v1/models lists nothing: apply a ServingPool, or give an API key of a namespace that has models")
    model = listed[0]["id"]
answer = ask("/v1/completions", {"model": model, "prompt": os.environ["PROMPT"], "max_tokens": 16})
text = answer["choices"][0]["text"]
if not answer["usage"]["completion_tokens"]:
    sys.exit(f"{model} answered without a token: {answer}")
sys.stdout.write(f"{model}: {text!r} ({answer['usage']['completion_tokens']} tokens)\n")
