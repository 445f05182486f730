"""`weft bench push`: from an adapter's bytes to the first token of an answer that pins them, through a whole stack.

A trainer publishes a content each step, each with weights of its own: upload through the gateway into the depot,
publish with the object's version as condition, then ask for the content by its digest until it answers. The model is
random; the runner is idle otherwise. Client and stack share the cores.
"""

import json
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import httpx2

from weft_bench.cases import Push
from weft_bench.cpu_shapes import SHAPES
from weft_bench.drive.engine import Sizes
from weft_bench.path_shape import write_manifests
from weft_bench.run import Run
from weft_cli.push import FILES, Publication, publish, upload
from weft_stage.cpu_models import adapter, base_model, cache_dir
from weft_stage.errors import RequestFailed
from weft_stage.lines import Line, percentile
from weft_stage.stack import Stack

RANK = 16
TARGET = "<= 1000"
READY_S, SERVED_S = 180.0, 60.0
PAUSE_S = 0.005  # between two questions for a content that is not served yet
CONFIG, WEIGHTS = FILES


def figures(options: Push, run: Run) -> Iterator[Line]:
    """Measure pushes after one that warms up. Raises StackFailed, RequestFailed."""
    name, pushes, folder = options.model_shape, options.pushes, options.models or cache_dir()
    origin, shape = run.origin("tokenizers"), SHAPES[name]
    sizes = Sizes(rows=8, slots=4, context_tokens=256, profile=False)
    uploaded, published, answered = list[float](), list[float](), list[float]()
    with TemporaryDirectory(prefix="weft-bench-") as scratch:
        source = adapter(folder, name, shape, 0, RANK)
        manifests = write_manifests(
            Path(scratch) / "manifests", base_model(folder, name, shape), (source,), shape, sizes
        )
        with Stack(manifests, Path(scratch) / "data") as stack:
            stack.wait_for_models(2, timeout_s=READY_S)
            objects, _ = stack.controller.list("loraadapters")
            [meta] = [obj["metadata"] for obj in objects]
            model = objects[0]["status"]["modelName"]
            with httpx2.Client(base_url=stack.url, timeout=SERVED_S) as gateway:
                for step in range(pushes + 1):
                    content = _trained(source, Path(scratch) / f"step-{step}", step)
                    begun = time.perf_counter()
                    stored = upload(gateway, content, meta["namespace"])
                    at_upload = time.perf_counter()
                    publication = Publication(meta["namespace"], meta["name"], version=f"step-{step}")
                    publish(stack.controller, stored["source"]["uri"], publication)
                    at_publish = time.perf_counter()
                    _first_token(gateway, f"{model}@{stored['id']}")
                    done = time.perf_counter()
                    run.say(f"push {step} of {pushes}: {done - begun:.3f} s")
                    if step:
                        uploaded.append(at_upload - begun)
                        published.append(at_publish - at_upload)
                        answered.append(done - begun)
        megabytes = sum((source / file).stat().st_size for file in FILES) / 1e6
    case = f"{name}, rank {RANK}, {megabytes:.0f} MB"
    for metric, values in (("upload", uploaded), ("publish", published), ("bytes to first token", answered)):
        for percent in (50, 99):
            target = TARGET if values is answered and percent == 99 else None
            yield origin.line(case, f"{metric} p{percent}", 1e3 * percentile(values, percent), "ms", target=target)


def _trained(source: Path, folder: Path, step: int) -> Path:
    """Copy the adapter with other weights: the last numbers of the file are those of this step."""
    folder.mkdir()
    shutil.copy(source / CONFIG, folder)
    weights = bytearray((source / WEIGHTS).read_bytes())
    weights[-4:] = bytes((step % 251, 0, (step // 251) % 251, 0))  # small numbers, whether of 16 or of 32 bits
    (folder / WEIGHTS).write_bytes(weights)
    return folder


def _first_token(gateway: httpx2.Client, model: str) -> None:
    """Ask until the content answers. Raises RequestFailed."""
    body = {"model": model, "prompt": [5, 6, 7, 8], "max_tokens": 1, "temperature": 0, "stream": True}
    deadline = time.perf_counter() + SERVED_S
    while time.perf_counter() < deadline:
        with gateway.stream("POST", "/v1/completions", json=body) as response:
            if response.status_code == 200:
                first = next((line for line in response.iter_lines() if line.startswith("data: ")), "")
                if "choices" not in json.loads(first.removeprefix("data: ") or "{}"):
                    raise RequestFailed(f"{model}: the answer begins with {first[:200]!r}")
                return
            if response.status_code != 404:
                raise RequestFailed(f"{model}: HTTP {response.status_code}: {response.read()[:200]!r}")
        time.sleep(PAUSE_S)
    raise RequestFailed(f"{model} was not served within {SERVED_S:g} s")
