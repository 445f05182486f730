"""Random small models of every family with random adapters, written by transformers and peft: the oracle of executors.

`random_model` draws sizes, windows, rope, tied or untied head, and adapters of mixed ranks and targets from a seed, and
saves them as those libraries do. `Rows` steps sequences over an executor by hand, so that any mixture of prefill,
chunks and decode of any adapters can be compared with one whole forward of the oracle, position by position.
"""

import json
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from harness import interpreter
from harness.native_library import native_library
from harness.native_models import as_tensor, cpu_executor
from harness.ranks import base_of, settings_of
from weft.artifacts.adapter_config import parse_adapter_config
from weft.domain.model.config import parse_spec
from weft.domain.model.families import FAMILIES as SERVED
from weft.domain.model.spec import ModelSpec
from weft_kernels.plan import plan_rows
from weft_runner.executors import make_executor
from weft_runner.model import Executor, StepInput, StepRow, check_step, map_tensors, read_spec
from weft_runner.model.cuda.device import find_gpu
from weft_runner.model.cuda.executor import CudaExecutor, Sizes
from weft_runner.model.weights import Pack, load_weights

CONFIGS = {
    "llama": "LlamaConfig", "mistral": "MistralConfig", "qwen2": "Qwen2Config", "qwen3": "Qwen3Config",
    "granite": "GraniteConfig", "smollm3": "SmolLM3Config", "olmo2": "Olmo2Config", "olmo3": "Olmo3Config",
    "gemma2": "Gemma2Config", "gemma3": "Gemma3TextConfig", "phi3": "Phi3Config", "starcoder2": "Starcoder2Config",
    "granite4": "GraniteMoeHybridConfig", "ministral3": "Ministral3Config",
}  # fmt: skip
FAMILIES = tuple(CONFIGS)
RANKS = (1, 2, 3, 5, 8, 16, 24, 64)
Texts = Mapping[str, tuple[str, list[int]]]  # key -> (adapter, tokens); adapter "" is the base
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}


@cache
def libraries() -> tuple[Any, Any]:
    """Import transformers and peft. That takes seconds: a worker that only collects these tests does without."""
    import peft
    import transformers

    transformers.logging.disable_progress_bar()
    return transformers, peft


@dataclass
class Verdict:
    """What the oracle says of an answer: positions that differ by a clear gap, and those too close to tell."""

    wrong: list[int] = field(default_factory=list)
    near_ties: int = 0
    smallest_gap: float = float("inf")

    @classmethod
    def of(cls, logits: torch.Tensor, answer: Sequence[int], tolerance: float) -> "Verdict":
        """Compare an answer with the best token of each row of the oracle's logits [len(answer), V]."""
        best, verdict = logits.topk(2, dim=-1), cls()
        for position, token in enumerate(answer):
            gap = float(best.values[position, 0] - best.values[position, 1])
            verdict.smallest_gap = min(verdict.smallest_gap, gap)
            if gap < tolerance:
                verdict.near_ties += 1
            elif int(best.indices[position, 0]) != token:
                verdict.wrong.append(position)
        return verdict


class ExactModel(TorchDispatchMode):
    """Computes in fp64 where the code of a model with fp64 weights converts to fp32: rope, norms, softmax.

    Raises AssertionError at an operation whose result is a float of fewer bits all the same.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        kwargs = dict(kwargs or {})
        if kwargs.get("dtype") == torch.float32:
            kwargs["dtype"] = torch.float64
        result = func(*args, **kwargs)
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and tensor.is_floating_point():
                assert tensor.dtype == torch.float64, f"expected a result in fp64, got {tensor.dtype} of {func}"
        return result


@contextmanager
def exact(model: torch.nn.Module) -> Iterator[None]:
    """Compute in fp64. Weights, rotary frequencies and other constants in buffers are still those of fp32."""
    usual = torch.get_default_dtype()
    model.double()
    torch.set_default_dtype(torch.float64)  # of quotients of integers
    try:
        with ExactModel():
            yield
    finally:
        torch.set_default_dtype(usual)
        model.float()


@dataclass
class OracleModel:
    """A base in `folder / "base"`, adapters in `folder / NAME`, and what transformers + peft make of them in fp32."""

    folder: Path
    adapters: tuple[str, ...]

    @property
    def files(self) -> dict[str, Path]:
        return {path.name: path for path in (self.folder / "base").iterdir()}

    @cached_property
    def config(self) -> dict[str, Any]:
        return json.loads((self.folder / "base" / "config.json").read_text())

    @cached_property
    def spec(self) -> ModelSpec:
        return read_spec(self.files["config.json"], self.files)

    @cached_property
    def model(self) -> Any:
        return load_peft(self.folder, self.adapters)

    def logits(self, adapter: str, ids: Sequence[int]) -> torch.Tensor:
        """Return [len(ids), V] of one forward over all of them; `adapter` "" is the base."""
        return self._forward(adapter, [list(ids)])[0]

    def logits_of(self, texts: Texts) -> dict[str, torch.Tensor]:
        """Return [len(tokens), V] of each text, padded at its end: no token attends to a later token.

        A forward has the texts of an adapter that LongRoPE treats alike.
        """
        groups: dict[tuple[str, bool], list[str]] = {}
        for key, (adapter, tokens) in texts.items():
            groups.setdefault((adapter, self.is_long(len(tokens))), []).append(key)
        logits: dict[str, torch.Tensor] = {}
        for (adapter, _), keys in groups.items():
            rows = [texts[key][1] for key in keys]
            size = max(map(len, rows))
            padded = self._forward(adapter, [[*row, *[0] * (size - len(row))] for row in rows])
            logits |= {key: padded[i, : len(row)] for i, (key, row) in enumerate(zip(keys, rows, strict=True))}
        return logits

    def is_long(self, tokens: int) -> bool:
        """Whether LongRoPE takes its factors of long texts."""
        return (short := self.spec.short_tokens) is not None and tokens > short

    @torch.no_grad()
    def _forward(self, adapter: str, rows: list[list[int]]) -> torch.Tensor:
        tokens = torch.tensor(rows)
        if not adapter:
            if not self.adapters:
                return self.model(input_ids=tokens).logits
            with self.model.disable_adapter():
                return self.model(input_ids=tokens).logits
        self.model.set_adapter(adapter)
        return self.model(input_ids=tokens).logits

    def judge(self, adapter: str, prompt: Sequence[int], answer: Sequence[int], tolerance: float) -> Verdict:
        """Compare an answer with greedy decoding, token for token; gaps below `tolerance` are not judged.

        By teacher forcing: if the oracle's next token is the answer's at every position, then by induction the
        oracle's own greedy run is that answer.
        """
        logits = self.logits(adapter, [*prompt, *answer])
        return Verdict.of(logits[len(prompt) - 1 : -1], answer, tolerance)


def random_model(
    folder: Path, family: str, seed: int, *, adapters: int = 4, shard_size: str = "50GB", dtype: str = "float32"
) -> OracleModel:
    """Write a base of `family` and random adapters, alike for a seed. `dtype`: as stored; fp32 is what computes."""
    rng = random.Random(f"{family} {seed}")
    write_base(folder / "base", family, seed, shard_size=shard_size, dtype=dtype, **random_config(family, rng))
    if not adapters:
        return OracleModel(folder, ())
    return write_adapters(folder, [random_adapter(rng, i, modules_of(family)) for i in range(adapters)], seed)


def random_spec(family: str, seed: int) -> ModelSpec:
    """Return what `random_model` of that seed would be read as."""
    made = getattr(libraries()[0], CONFIGS[family])(**random_config(family, random.Random(f"{family} {seed}")))
    return parse_spec(made.to_dict() | {"architectures": None})


def modules_of(family: str) -> list[str]:
    """Name the linear modules of a layer, without what they are within."""
    model_type = getattr(libraries()[0], CONFIGS[family]).model_type
    modules = next(one.modules for one in SERVED if one.model_type == model_type)
    return [name.rpartition(".")[2] for name in modules]


def random_config(family: str, rng: random.Random) -> dict[str, Any]:
    """Draw a configuration: sizes are multiples of 16, windows shorter than 48 tokens."""
    kv_heads, group, layers = rng.choice((1, 2, 3)), rng.choice((1, 2, 4)), rng.choice((2, 3))
    config: dict[str, Any] = {
        "vocab_size": rng.choice((112, 144, 160)),
        "hidden_size": 16 * kv_heads * group * rng.choice((1, 2)),
        "intermediate_size": 16 * rng.randint(2, 9),
        "num_hidden_layers": layers,
        "num_attention_heads": kv_heads * group,
        "num_key_value_heads": kv_heads,
        "head_dim": rng.choice((16, 32)),
        "max_position_embeddings": 256,
        "rms_norm_eps": rng.choice((1e-5, 1e-6)),
        "tie_word_embeddings": rng.random() < 0.5,
        "rope_parameters": random_rope(family, rng),
    }
    if family in ("qwen2", "phi3"):  # the head size always follows from the hidden size
        config["hidden_size"] = config["head_dim"] * kv_heads * group
    if family == "phi3" and rng.random() < 0.6:
        config["rope_parameters"] |= random_factors(config["head_dim"], config["rope_parameters"], rng)
    if family in ("qwen2", "phi3"):
        del config["head_dim"]
    return config | random_windows(family, rng, layers) | random_extras(family, rng, layers)


def random_rope(family: str, rng: random.Random) -> dict[str, Any]:
    rope = {"rope_theta": rng.choice((500.0, 10_000.0, 1_000_000.0)), "rope_type": "default"}
    yarn = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 32}
    if family in ("olmo3", "gemma3"):
        other = {"rope_type": "default", "rope_theta": rng.choice((100.0, 3000.0))}
        return {"full_attention": rope | (yarn if family == "olmo3" else {}), "sliding_attention": other}
    if family == "ministral3":
        return rope | yarn | {"llama_4_scaling_beta": rng.choice((0.1, 0.7))}
    match rng.choice(("default", "linear", "llama3", "yarn")) if family in ("llama", "olmo2") else "default":
        case "linear":
            return rope | {"rope_type": "linear", "factor": 2.0}
        case "llama3":
            return rope | {"rope_type": "llama3", "factor": 8.0, **LLAMA3}
        case "yarn":
            return rope | yarn
        case _:
            return rope | ({"partial_rotary_factor": rng.choice((0.5, 0.75))} if family == "phi3" else {})


def random_factors(head_dim: int, rope: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    """Draw LongRoPE's factors, of texts of up to 40 tokens and of longer ones."""
    count = int(head_dim * rope["partial_rotary_factor"]) // 2
    short, long = ([rng.uniform(*bounds) for _ in range(count)] for bounds in ((1.0, 1.5), (2.0, 6.0)))
    return {"rope_type": "longrope", "short_factor": short, "long_factor": long}


def random_windows(family: str, rng: random.Random, layers: int) -> dict[str, Any]:
    window = rng.choice((1, 5, 16, 23))
    match family:
        case "mistral" | "phi3" | "starcoder2" | "ministral3":
            return {"sliding_window": rng.choice((None, window, window))}
        case "gemma2" | "gemma3" | "olmo3":
            kinds = [rng.choice(("full_attention", "sliding_attention")) for _ in range(layers)]
            return {"sliding_window": window, "layer_types": kinds}
        case "qwen2" | "qwen3":
            used = {"use_sliding_window": True, "sliding_window": window}
            kinds = [rng.choice(("full_attention", "sliding_attention")) for _ in range(layers)]
            return rng.choice(({}, used | {"max_window_layers": rng.randint(0, layers)}, used | {"layer_types": kinds}))
        case _:
            return {}


def random_extras(family: str, rng: random.Random, layers: int) -> dict[str, Any]:
    match family:
        case "granite" | "granite4":
            numbers = {"embedding": (0.5, 6.0), "attention": (0.05, 0.4), "residual": (0.3, 1.4)}
            drawn = {f"{name}_multiplier": rng.uniform(*bounds) for name, bounds in numbers.items()}
            drawn |= {"logits_scaling": rng.choice((0.7, 1.0, 2.0)), "attention_bias": rng.random() < 0.5}
            if family == "granite":
                return drawn | {"mlp_bias": rng.random() < 0.5}
            hybrid = {"layer_types": ["full_attention"] * layers, "num_local_experts": 0, "mamba_n_heads": 2}
            inner, rope = 16 * rng.randint(2, 9), rng.choice(("rope", None))
            return drawn | hybrid | {"shared_intermediate_size": inner, "position_embedding_type": rope}
        case "gemma2" | "gemma3":
            caps = {"final_logit_softcapping": rng.choice((None, 8.0, 30.0))}
            caps |= {"attn_logit_softcapping": rng.choice((None, 2.0, 50.0))} if family == "gemma2" else {}
            return caps | {"query_pre_attn_scalar": rng.choice((8, 24)), "attention_bias": rng.random() < 0.3}
        case "ministral3":
            return {"pad_token_id": None}
        case "phi3":
            return {"pad_token_id": None, "original_max_position_embeddings": 40}
        case "starcoder2":
            return {"norm_epsilon": rng.choice((1e-5, 1e-3)), "use_bias": rng.random() < 0.7}
        case "llama":
            return {"attention_bias": rng.random() < 0.5, "mlp_bias": rng.random() < 0.5}
        case "smollm3":
            flags = [1, *(rng.randint(0, 1) for _ in range(layers - 1))]
            return {"pad_token_id": None} | rng.choice(({"no_rope_layer_interval": 2}, {"no_rope_layers": flags}))
        case _:
            return {}


def random_adapter(rng: random.Random, index: int, modules: list[str]) -> dict[str, Any]:
    """Draw an adapter: the first targets everything by one rank; others any subset, with patterns, in some layers."""
    targets = rng.sample(modules, rng.randint(1, len(modules))) if index else modules
    rank = rng.choice(RANKS)
    config: dict[str, Any] = {"r": rank, "lora_alpha": rng.choice((rank, 2 * rank)), "use_rslora": rng.random() < 0.3}
    match rng.choice(("list", "regex", "patterns", "layers")) if index else "list":
        case "regex":
            return config | {"target_modules": rf".*\.({'|'.join(targets)})"}
        case "patterns":
            # no module in two keys: PEFT sorts them when it saves, and the first that matches counts
            ranks = {targets[0]: rng.choice(RANKS)} | {rf"layers\.0\..*\.{t}": rng.choice(RANKS) for t in targets[1:2]}
            return config | {"target_modules": targets, "rank_pattern": ranks, "alpha_pattern": {targets[-1]: 7}}
        case "layers":
            return config | {"target_modules": targets, "layers_to_transform": [rng.randint(0, 1)]}
        case _:
            return config | {"target_modules": targets}


def write_base(
    folder: Path, family: str, seed: int, *, shard_size: str = "50GB", dtype: str = "float32", **config: Any
) -> None:
    """Write `random_base` as transformers saves it, in the dtype."""
    model = random_base(family, seed, **config)
    model.to(getattr(torch, dtype)).save_pretrained(folder, max_shard_size=shard_size)


def random_base(family: str, seed: int, **config: Any) -> Any:
    """Draw weights so large that answers differ from token to token; biases and norms that a mistake would show."""
    transformers, _ = libraries()
    torch.manual_seed(seed)
    made = getattr(transformers, CONFIGS[family])(initializer_range=0.15, **config)
    model = transformers.AutoModelForCausalLM.from_config(made, attn_implementation="eager")
    spread(model)
    return model


def spread(model: Any) -> None:
    """Draw norms and biases, which would be all alike."""
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("norm.weight"):
                weight.copy_(1.0 + 0.3 * torch.randn_like(weight))
            elif name.endswith(".bias"):
                weight.copy_(0.5 * torch.randn_like(weight))


def write_adapters(folder: Path, adapters: Iterable[Mapping[str, Any]], seed: int) -> OracleModel:
    """Write adapters a0, a1, .. of the base in `folder`, whose effects are as large as the base's own projections."""
    transformers, peft = libraries()
    base = transformers.AutoModelForCausalLM.from_pretrained(folder / "base", dtype=torch.float32)
    names: list[str] = []
    for i, config in enumerate(adapters):
        names.append(f"a{i}")
        torch.manual_seed(1000 + seed + i)
        made = peft.get_peft_model(base, peft.LoraConfig(task_type="CAUSAL_LM", init_lora_weights=False, **config))
        spread_adapter(made)
        made.create_or_update_model_card = lambda _: None  # a third of the time, and nothing reads it
        made.save_pretrained(folder / names[-1])
        base = made.unload()
    return OracleModel(folder, tuple(names))


def spread_adapter(made: Any) -> None:
    """Draw an adapter's weights, whose effects are as large as the base's own projections."""
    with torch.no_grad():
        for key, weight in made.named_parameters():
            if "lora_B" in key:
                weight.copy_(torch.randn_like(weight) * 0.3 / weight.shape[1] ** 0.5)
            elif "lora_A" in key:
                weight.copy_(torch.randn_like(weight) / weight.shape[1] ** 0.5)


def load_peft(folder: Path, adapters: Sequence[str]) -> Any:
    transformers, peft = libraries()
    base = transformers.AutoModelForCausalLM.from_pretrained(
        folder / "base", dtype=torch.float32, attn_implementation="eager"
    ).eval()
    if not adapters:
        return base
    made = peft.PeftModel.from_pretrained(base, str(folder / adapters[0]), adapter_name=adapters[0])
    for name in adapters[1:]:
        made.load_adapter(str(folder / name), adapter_name=name)
    return made.eval()


def reference_executor(model: OracleModel, pages: int, page_tokens: int) -> Executor:
    """Any executor is made by a function of this form."""
    flags = {"kv_pages": pages, "page_tokens": page_tokens, "max_adapters": len(model.adapters) or 1}
    return make_executor(settings_of(**flags), base_of(model.files))


def native_executor(model: OracleModel, pages: int, page_tokens: int, dtype: str = "fp32") -> Executor:
    """Make the cpu executor; skip the test where there is no compiler."""
    sizes = {"pages": pages, "page_tokens": page_tokens, "slots": len(model.adapters) or 1}
    return cpu_executor(model.files, native_library(), dtype=dtype, threads=2, **sizes)


def cuda_executor(
    model: OracleModel, pages: int, page_tokens: int, dtype: torch.dtype = torch.float32, *, pack: Pack | None = None,
    **sizes: Any,
) -> CudaExecutor:  # fmt: skip
    """Make the cuda executor: on a GPU, or under Triton's interpreter; decode steps of up to 6 rows are recorded."""
    device = find_gpu().device
    if device.type == "cpu":
        interpreter.hurry()
    slots = len(model.adapters) or 1
    made = Sizes(pages, page_tokens, slots, max_rank=64, rows=6, context=256, graphs=True, **sizes)
    return CudaExecutor(model.spec, load_weights(model.files, model.spec, dtype, device=device, pack=pack), made)


@dataclass
class _Sequence:
    tokens: list[int]
    slot: int | None
    pages: tuple[int, ...]
    long: bool
    position: int = 0


class Rows:
    """Sequences of given tokens on an executor; adapter i of the model is in slot i, pages are dealt out at random."""

    def __init__(self, model: OracleModel, executor: Executor, pages: int, page_tokens: int, seed: int = 0) -> None:
        self._model, self._executor, self._page_tokens = model, executor, page_tokens
        self._free = list(range(pages))
        random.Random(seed).shuffle(self._free)
        self._ranks: dict[int, int] = {}
        self._sequences: dict[str, _Sequence] = {}
        for slot, name in enumerate(model.adapters):
            self._load(slot, model.folder / name)

    def add(self, key: str, tokens: Sequence[int], adapter: str = "", room: int = 0) -> None:
        """Add a sequence. `room`: how many tokens may be added to these later."""
        n_pages = -(-(len(tokens) + room) // self._page_tokens)
        pages = tuple(self._free.pop() for _ in range(n_pages))
        slot = self._model.adapters.index(adapter) if adapter else None
        long = self._model.is_long(len(tokens) + room)
        self._sequences[key] = _Sequence(list(tokens), slot, pages, long)

    def left(self, key: str) -> int:
        sequence = self._sequences[key]
        return len(sequence.tokens) - sequence.position

    def extend(self, key: str, token: int) -> None:
        self._sequences[key].tokens.append(token)

    def step(self, counts: Mapping[str, int]) -> dict[str, torch.Tensor]:
        """Feed `counts[key]` tokens of each sequence, in this order; the logits [V] after the last token of each."""
        tokens: list[int] = []
        rows: list[StepRow] = []
        slots: list[int | None] = []
        for key, count in counts.items():
            sequence = self._sequences[key]
            here = sequence.tokens[sequence.position : sequence.position + count]
            end, position = len(tokens) + count, sequence.position
            rows.append(StepRow(len(tokens), end, position, sequence.pages, samples=True, long=sequence.long))
            tokens += here
            slots += [sequence.slot] * count
            sequence.position += count
        step = StepInput(tuple(tokens), tuple(rows), plan_rows(slots, self._ranks))
        check_step(step, self._page_tokens)
        logits = as_tensor(self._executor.run(step)).cpu()
        return {key: logits[i].clone() for i, key in enumerate(counts)}

    def _load(self, slot: int, folder: Path) -> None:
        scales = parse_adapter_config((folder / "adapter_config.json").read_bytes())
        store, tensors = self._executor.adapters, map_tensors(folder / "adapter_model.safetensors")
        n_pages = -(-store.device_bytes(tensors, scales) // store.page_bytes) if store.page_bytes else 0
        adapter = store.build(tensors, scales, [self._free.pop() for _ in range(n_pages)])
        store.put(slot, adapter)
        self._ranks[slot] = adapter.site_rank
