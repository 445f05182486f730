"""Prometheus beside a control plane: one process that scrapes one address every second."""

import contextlib
import json
import urllib.request
from collections.abc import Generator
from pathlib import Path
from urllib.error import URLError

from harness.autoscalers import programs
from harness.ports import free_addresses
from harness.waiting import wait_until
from weft_devcluster.processes import Process


@contextlib.contextmanager
def prometheus(target: str, folder: Path) -> Generator[str]:
    """Run Prometheus; give its address once it answers. `target` is HOST:PORT. Raises ToolMissing."""
    built = programs.folder_of(programs.PROMETHEUS)
    (address,) = free_addresses(1)
    job = {"job_name": "weft", "scrape_interval": "1s", "static_configs": [{"targets": [target]}]}
    config = folder / "prometheus.yml"  # JSON is YAML
    config.write_text(json.dumps({"scrape_configs": [job]}))
    command = [
        built / "prometheus", f"--config.file={config}", f"--web.listen-address={address}",
        f"--storage.tsdb.path={folder / 'prometheus'}",
    ]  # fmt: skip
    process = Process("prometheus", command, folder)
    with contextlib.ExitStack() as stack:
        stack.callback(process.end)
        wait_until(lambda: _is_ready(process, address), "Prometheus is ready")
        yield address


def _is_ready(process: Process, address: str) -> bool:
    process.check()
    with contextlib.suppress(URLError), urllib.request.urlopen(f"http://{address}/-/ready", timeout=10.0) as answer:
        return answer.status == 200
    return False
