"""What was measured of a machine, kept beside the packed weights: a runner that starts anew does not measure again.

A file for each machine, kernels and model, with all of that and a digest in it. One that is damaged, or of others, is
named and measured again; where it cannot be kept, the next start measures.
"""

import hashlib
import json
import logging
import os
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from weft_runner.errors import MachineInvalid
from weft_runner.offload.machine import MachineRates, machine_of
from weft_runner.offload.policy import Formats

FORMAT = 2
CPUINFO = Path("/proc/cpuinfo")
MAX_FILE_BYTES = 1 << 20

log = logging.getLogger(__name__)


def rates_identity(kernels: str, base: str, formats: Formats, threads: int) -> dict[str, Any]:
    """Tell measurements apart: by processor, kernels (with the device that they run on), model, threads."""
    return {
        "format": FORMAT, "processor": _processor(), "kernels": kernels, "base": base, "weights": formats.weights,
        "kv": formats.kv, "threads": threads,
    }  # fmt: skip


def kept_rates(folder: Path, identity: dict[str, Any], measure: Callable[[], MachineRates]) -> MachineRates:
    """Read rates from the file, or measure and keep them. Raises what `measure` does."""
    path = folder / f"machine-{_digest(identity)[:16]}.json"
    try:
        rates = _read(path, identity)
    except FileNotFoundError:
        why = "there is no such file yet"
    except (OSError, ValueError, TypeError, KeyError, MachineInvalid) as error:
        why = f"it is damaged or of another machine: {error}"
    else:
        log.info("the machine was measured before", extra={"kv": {"path": str(path)}})
        return rates
    log.info("the machine is measured", extra={"kv": {"path": str(path), "why": why}})
    rates = measure()
    try:
        _write(path, identity, rates)
    except OSError as error:
        log.warning("what was measured is not kept", extra={"kv": {"path": str(path), "reason": str(error)}})
    return rates


def _read(path: Path, identity: dict[str, Any]) -> MachineRates:
    """Read and check the file. Raises OSError, ValueError, TypeError, KeyError, MachineInvalid."""
    if (size := path.stat().st_size) > MAX_FILE_BYTES:
        raise ValueError(f"{size} bytes")
    kept = json.loads(path.read_bytes())
    if kept["identity"] != identity:
        raise ValueError("its identity is another")
    if kept["sha256"] != _digest(kept["rates"]):
        raise ValueError("its digest is not that of its rates")
    return machine_of(kept["rates"])


def _write(path: Path, identity: dict[str, Any], rates: MachineRates) -> None:
    fields = json.loads(json.dumps(asdict(rates)))
    partial = path.with_suffix(f".{os.getpid()}.partial")
    try:
        partial.write_text(json.dumps({"identity": identity, "rates": fields, "sha256": _digest(fields)}, indent=1))
        partial.rename(path)
    finally:
        partial.unlink(missing_ok=True)


def _digest(fields: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()


def _processor() -> str:
    """Name the processor and count its cores; what cannot be read is left out."""
    try:
        lines = CPUINFO.read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith(("model name", "CPU implementer"))]
    return f"{os.cpu_count()} x {names[0] if names else os.uname().machine}"
