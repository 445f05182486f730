"""mistral.rs (its CPU wheel) as a worker; see `serve.py`. Rows of all adapters share a forward pass.

Fields of the work: `kind`, the numbers in which it computes (F32, BF16, F16), and `folder`, which is empty. It takes
text alone. The model is therefore shown to it beside a tokenizer in which the word "t17" is token 17. A call admits one
caller at a time: all requests are opened as streams, and the streams are read in turn.
"""

import json
import os
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

SPECIAL = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


def load(work: dict[str, Any]) -> tuple[str, Callable[..., dict[str, Any]]]:
    """Return versions and what runs a batch."""
    os.environ["RAYON_NUM_THREADS"] = os.environ["OMP_NUM_THREADS"] = str(work["threads"])
    os.environ.setdefault("RUST_LOG", "error")
    import mistralrs  # pyright: ignore[reportMissingImports] (of another Python)

    used = sorted({folder for folder in work["adapters"] if folder})
    model = {
        "model_id": present(Path(work["base"]), Path(work["folder"])), "arch": mistralrs.Architecture.Llama,
        "dtype": getattr(mistralrs.ModelDType, work["kind"]),
    }  # fmt: skip
    adapters = [mistralrs.LoraAdapter(alias=f"adapter{number}", source=source) for number, source in enumerate(used)]
    which = mistralrs.Which.Lora(adapters=adapters, **model) if used else mistralrs.Which.Plain(**model)
    runner = mistralrs.Runner(which=which, max_seqs=len(work["adapters"]), prefix_cache_n=0)
    names = [{"adapter": f"adapter{used.index(folder)}"} if folder else {} for folder in work["adapters"]]

    def run(prompts: list[list[int]], tokens: int) -> dict[str, Any]:
        streams = dict[int, Any]()
        for row, prompt in enumerate(prompts):
            request = mistralrs.ChatCompletionRequest(
                model="default", messages=[{"role": "user", "content": " ".join(f"t{token}" for token in prompt)}],
                max_tokens=tokens, temperature=0.0, ignore_eos=True, stream=True, **names[row],
            )  # fmt: skip
            streams[row] = iter(runner.send_chat_completion_request(request))
        counts = [0] * len(prompts)
        while streams:
            for row, stream in list(streams.items()):
                if next(stream, None) is None:
                    del streams[row]
                else:
                    counts[row] += 1
        return {"rows": list(zip(counts, work["adapters"], strict=True))}

    return f"mistralrs {version('mistralrs')} {work['kind']}", run


def present(base: Path, folder: Path) -> str:
    """Fill the folder with the weights, `config.json` in the older spelling and a tokenizer of words. Returns it."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    config = json.loads((base / "config.json").read_text())
    (folder / "model.safetensors").symlink_to((base / "model.safetensors").absolute())
    words = [*SPECIAL.values(), *(f"t{number}" for number in range(len(SPECIAL), config["vocab_size"]))]
    tokenizer = Tokenizer(models.WordLevel({word: n for n, word in enumerate(words)}, unk_token=SPECIAL["unk_token"]))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    parts = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]  # the only parts that it takes
    tokenizer.decoder = decoders.Sequence(parts)
    tokenizer.add_special_tokens(list(SPECIAL.values()))
    tokenizer.save(str(folder / "tokenizer.json"))
    for name, content in {
        "config": config | {"torch_dtype": "bfloat16", "use_flash_attn": False},
        "tokenizer_config": SPECIAL | {"chat_template": TEMPLATE},
        "generation_config": {"bos_token_id": 1, "eos_token_id": 2},
    }.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return str(folder)
