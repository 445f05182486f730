"""`python -m harness.openapi_fuzz --examples N`: schemathesis on the OpenAPI document of a running gateway.

A stack with the quickstart is started for it, and the document is given the names of its models. Every operation gets
requests that fit the document, others that nearly do, and headers, paths and methods as nobody sends them: no answer
may be a 5xx, or other than the document says.
"""

import argparse
import json
import subprocess
import sys
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from weft_stage.stack import Stack, quickstart

PACKAGE = "schemathesis==4.32.5"
CHECKS = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"
UV = Path(sys.executable).with_name("uv")


def named(document: Any, models: Sequence[str]) -> Any:
    """The document, whose bodies name one of these models."""
    for operations in document["paths"].values():
        for operation in operations.values():
            body = operation.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema", {})
            if "model" in body.get("properties", {}):
                body["properties"]["model"] = {"type": "string", "enum": list(models)}
    return document


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m harness.openapi_fuzz", description=(__doc__ or "").split("\n\n")[0]
    )
    parser.add_argument("--examples", type=int, default=100, help="of each operation and phase")
    given = parser.parse_args()
    with TemporaryDirectory(prefix="weft-openapi-") as scratch, Stack(quickstart(), Path(scratch)) as stack:
        models = stack.wait_for_models()
        with urllib.request.urlopen(f"{stack.url}/openapi.json") as answer:
            document = named(json.load(answer), models)
        path = Path(scratch) / "openapi.json"
        path.write_text(json.dumps(document))
        command = [
            str(UV), "tool", "run", "--from", PACKAGE, "st", "run", str(path), f"--url={stack.url}",
            f"--checks={CHECKS}", f"--max-examples={given.examples}",
            "--phases=coverage,fuzzing", "--request-timeout=120", "--no-color",
        ]  # fmt: skip
        return subprocess.call(command, cwd=scratch)  # it keeps what it found where it runs


if __name__ == "__main__":
    sys.exit(main())
