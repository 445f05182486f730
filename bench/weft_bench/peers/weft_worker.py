"""Our engine at the other end of a pipe, under the same conditions as a peer; see `vllm_worker.py`."""

import json
import sys
from pathlib import Path
from typing import Any

from weft_bench.cpu_engine import Ask, Offload, Sizes, Subject
from weft_bench.peers.vllm_worker import answer, own_stdout
from weft_stage.cpu_models import files


def main() -> None:
    answers = own_stdout()
    work = json.loads(sys.stdin.readline())
    with Subject(files(Path(work["base"])), _sizes(work)) as subject:
        subject.adapters.paths.update({folder: Path(folder) for folder in work["adapters"] if folder})
        answer(answers, {"ready": subject.executor})
        for line in sys.stdin:
            asked = json.loads(line)
            asks = [
                Ask(folder or "", prompt, asked["tokens"])
                for folder, prompt in zip(work["adapters"], asked["prompts"], strict=True)
            ]
            played = subject.play(asks)
            tokens, ran = [life.tokens for life in played.lives], [life.ask.adapter or None for life in played.lives]
            answer(answers, {"seconds": played.wall_s, "tokens": tokens, "adapters": ran})


def _sizes(work: dict[str, Any]) -> Sizes:
    rows = len(work["adapters"])
    return Sizes(
        executor=work["executor"], dtype=work["dtype"], threads=work["threads"], rows=rows, slots=rows,
        context_tokens=work["context_tokens"], batch_tokens=work["batch_tokens"], prefills=rows,
        max_rank=work["most_rank"], adapter_pages=work["adapter_pages"], offload=_offload(work.get("offload")),
    )  # fmt: skip


def _offload(fields: dict[str, Any] | None) -> Offload | None:
    """Weights on disk, where the work says so."""
    return None if fields is None else Offload(Path(fields.pop("folder")), **fields)


if __name__ == "__main__":
    main()
