"""The one image of a test cluster: a static program that waits. Pods bring everything else by volumes."""

import hashlib
import io
import json
import tarfile
from collections.abc import Sequence
from pathlib import Path

PAUSE_IMAGE = "weft.test/pause:1"


def write_image(archive: Path, program: Path, names: Sequence[str]) -> None:
    """Write a docker archive with one layer that holds `/pause`, under these names (`repository:tag`)."""
    layer = _tar({"pause": program.read_bytes()}, mode=0o755)
    config = json.dumps(
        {
            "architecture": "amd64",
            "os": "linux",
            "config": {"Entrypoint": ["/pause"]},
            "rootfs": {"type": "layers", "diff_ids": [f"sha256:{hashlib.sha256(layer).hexdigest()}"]},
        }
    ).encode()
    manifest = [{"Config": "config.json", "RepoTags": list(names), "Layers": ["layer.tar"]}]
    content = {"config.json": config, "layer.tar": layer, "manifest.json": json.dumps(manifest).encode()}
    archive.write_bytes(_tar(content, mode=0o644))


def _tar(files: dict[str, bytes], mode: int) -> bytes:
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w") as tar:
        for name, content in files.items():
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(content), mode
            tar.addfile(entry, io.BytesIO(content))
    return made.getvalue()
