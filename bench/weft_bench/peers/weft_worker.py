"""Our engine as a worker; see `serve.py`."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from weft_bench.drive.engine import Offload, Sizes, Subject
from weft_stage.cpu_models import files
from weft_stage.playing import Ask


def load(work: dict[str, Any]) -> tuple[str, Callable[..., dict[str, Any]]]:
    """Return versions and what runs a batch. Further fields of the work: those of `Sizes` and of `Offload`."""
    adapters: list[str | None] = work["adapters"]
    offload, rows = work.get("offload"), len(adapters)
    sizes = Sizes(
        executor=work["executor"], dtype=work["dtype"], threads=work["threads"], rows=rows, slots=rows,
        context_tokens=work["context_tokens"], batch_tokens=work["batch_tokens"], prefills=rows,
        max_rank=work["max_rank"], adapter_pages=work["adapter_pages"],
        offload=Offload(**offload | {"folder": Path(offload["folder"])}) if offload else None,
    )  # fmt: skip
    subject = Subject(files(Path(work["base"])), sizes)
    subject.adapters.paths.update({folder: Path(folder) for folder in adapters if folder})

    def run(prompts: list[list[int]], tokens: int) -> dict[str, Any]:
        asks = [Ask(folder or "", prompt, tokens) for folder, prompt in zip(adapters, prompts, strict=True)]
        played = subject.play(asks)
        rows = [(life.tokens, life.ask.adapter or None) for life in played.lives]
        return {"seconds": played.wall_s, "rows": rows}

    return subject.executor, run
