"""mistral.rs (its CPU wheel) at the other end of a pipe; see `vllm_worker.py`. Rows of all adapters share a forward.

The work has one field more: `weights`, in which numbers it computes (F32, BF16, F16). It takes text alone, so the model
is shown to it beside a tokenizer in which the word "t17" is token 17. A call admits one caller at a time: all requests
are opened as streams, and their streams are read in turn.
"""

import json
import os
import sys
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

sys.path.append(str(Path(__file__).parent))
from vllm_worker import answer, own_stdout  # pyright: ignore[reportMissingImports] (beside this script)

SPECIAL = ("<unk>", "<s>", "</s>")
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


def main() -> None:
    answers = own_stdout()
    work = json.loads(sys.stdin.readline())
    os.environ["RAYON_NUM_THREADS"] = os.environ["OMP_NUM_THREADS"] = str(work["threads"])
    os.environ.setdefault("RUST_LOG", "error")
    used = sorted({folder for folder in work["adapters"] if folder})
    names = [f"adapter{used.index(folder)}" if folder else "" for folder in work["adapters"]]
    with TemporaryDirectory(prefix="mistral-") as folder:
        present(Path(work["base"]), Path(folder))
        runner = _runner(work, folder, used)
        answer(answers, {"ready": f"mistralrs {version('mistralrs')} {work['weights']}"})
        for line in sys.stdin:
            asked = json.loads(line)
            started = time.perf_counter()
            made = _run(runner, asked["prompts"], names, asked["tokens"])
            seconds = time.perf_counter() - started
            answer(answers, {"seconds": seconds, "tokens": made, "adapters": work["adapters"]})
    os._exit(0)  # its threads do not end


def present(base: Path, folder: Path) -> None:
    """The weights as they are, `config.json` in the older spelling, and a tokenizer of words."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    (folder / "model.safetensors").symlink_to((base / "model.safetensors").absolute())
    config = json.loads((base / "config.json").read_text())
    words = {word: number for number, word in enumerate(SPECIAL)}
    words |= {f"t{number}": number for number in range(len(SPECIAL), config["vocab_size"])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token=SPECIAL[0]))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    parts = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]  # it refuses others than these
    tokenizer.decoder = decoders.Sequence(parts)
    tokenizer.add_special_tokens(list(SPECIAL))
    tokenizer.save(str(folder / "tokenizer.json"))
    written = {
        "config.json": config | {"torch_dtype": "bfloat16", "use_flash_attn": False},
        "tokenizer_config.json": {
            **dict(zip(("unk_token", "bos_token", "eos_token"), SPECIAL, strict=True)), "chat_template": TEMPLATE,
        },
        "generation_config.json": {"bos_token_id": 1, "eos_token_id": 2},
    }  # fmt: skip
    for name, content in written.items():
        (folder / name).write_text(json.dumps(content))


def _runner(work: dict[str, Any], folder: str, used: Sequence[str]) -> Any:
    import mistralrs  # pyright: ignore[reportMissingImports] (of another Python)

    dtype = getattr(mistralrs.ModelDType, work["weights"])
    model = {"model_id": folder, "arch": mistralrs.Architecture.Llama, "dtype": dtype}
    if used:
        adapters = [
            mistralrs.LoraAdapter(alias=f"adapter{number}", source=source) for number, source in enumerate(used)
        ]
        which = mistralrs.Which.Lora(adapters=adapters, **model)
    else:
        which = mistralrs.Which.Plain(**model)
    return mistralrs.Runner(which=which, max_seqs=len(work["adapters"]), prefix_cache_n=0)


def _run(runner: Any, prompts: Sequence[Sequence[int]], names: Sequence[str], tokens: int) -> list[int]:
    """How many tokens each request got."""
    from mistralrs import ChatCompletionRequest  # pyright: ignore[reportMissingImports]

    streams: dict[int, Any] = {}
    for row, (prompt, name) in enumerate(zip(prompts, names, strict=True)):
        text = " ".join(f"t{token}" for token in prompt)
        request = ChatCompletionRequest(
            model="default", messages=[{"role": "user", "content": text}], max_tokens=tokens, temperature=0.0,
            ignore_eos=True, stream=True, **({"adapter": name} if name else {}),
        )  # fmt: skip
        streams[row] = iter(runner.send_chat_completion_request(request))
    made = [0] * len(prompts)
    while streams:
        for row, stream in list(streams.items()):
            if next(stream, None) is None:
                del streams[row]
            else:
                made[row] += 1
    return made


if __name__ == "__main__":
    main()
