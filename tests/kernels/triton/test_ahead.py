"""Kernels compiled where no GPU is: a runner that starts with them compiles none."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from harness.triton_compile import unavailable

if reason := unavailable():
    pytest.skip(reason, allow_module_level=True)

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 256, "vocab_size": 512,
    "max_position_embeddings": 256, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": False,
}  # fmt: skip
# Another process, with an empty cache of its own, and the carried one in another place: what a start launches.
START = """
import sys
from pathlib import Path
from weft.domain.model.config import parse_model_config
from weft_kernels.triton import ahead
from weft_runner.compile_kernels import Target, compile_for
ahead.CARRIED = Path(sys.argv[1])
ahead.use_carried()
compile_for(Target("", parse_model_config(Path(sys.argv[2]).read_bytes()), 90, 16, 1, 1))
"""


@pytest.mark.slow
def test_a_start_compiles_nothing_that_is_carried(tmp_path: Path) -> None:
    (config := tmp_path / "config.json").write_text(json.dumps(CONFIG))
    words = ["--capability", "90", "--max-rank", "16", "--rows", "2", "--tokens", "2", "--out", str(tmp_path / "made")]
    said = run(tmp_path, "-m", "weft_runner.compile_kernels", str(config), *words)
    assert "sm_90, ranks to 16" in said
    kernels = list((tmp_path / "made").rglob("*.cubin"))
    assert f"\n{len(kernels)} kernels, " in said
    assert not list((tmp_path / "made").rglob("*.ttir"))
    (tmp_path / "made").rename(tmp_path / "carried")
    run(tmp_path, "-c", START, str(tmp_path / "carried"), str(config))
    assert not list((tmp_path / "own").rglob("*.cubin"))
    asked = {folder.name for folder in (tmp_path / "own").iterdir()}
    assert len(asked) > 5, "else nothing was launched"
    assert asked <= {path.parent.name for path in kernels}


def run(folder: Path, *words: str) -> str:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(folder / "own"), "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, *words]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
