"""PEFT's `adapter_config.json` -> AdapterConfig: which modules, which ranks, which scales. Data only, never executed.

Selection follows PEFT (`tuners_utils.check_target_module_exists`, `utils.other.get_pattern_key`): a list matches whole
names or endings after a dot, a text is a regular expression for the whole name; `rank_pattern` and `alpha_pattern`
match endings after a dot, first key wins. Scale of a module: alpha / r; with rsLoRA (Kalajdzievski, 2023) it is
alpha / sqrt(r).

A field that changes what the adapter computes and is not known here is refused: serving something else than was trained
is worse than not serving.
"""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

from weft.artifacts.pattern import Budget, PatternError, compile_pattern
from weft.domain.model.errors import Reason, Refused
from weft.domain.strict_json import JsonError, JsonObject, is_int, parse_object
from weft.domain.text import quoted

MAX_CONFIG_BYTES = 1 << 18
MAX_RANK = 1 << 14
MAX_ALPHA = 1 << 20
MAX_NAMES = 8192
MAX_PATTERN_KEYS = 1024

# Fields that only matter while training, or only record how the weights were made.
_TRAINING = frozenset(
    "auto_mapping base_model_class corda_config ensure_weight_tying eva_config inference_mode lora_dropout "
    "lora_ga_config loftq_config megatron_config megatron_core parent_library peft_version qalora_group_size revision "
    "runtime_config task_type".split()
)
_READ = frozenset(
    "alpha_pattern base_model_name_or_path exclude_modules init_lora_weights layers_pattern layers_to_transform "
    "lora_alpha peft_type r rank_pattern target_modules use_rslora".split()
)
# Fields that change the computation: only these values mean "not used".
_REFUSED: dict[str, tuple[str, tuple[object, ...]]] = {
    "use_dora": ("DoRA", (False, None)),
    "use_qalora": ("QALoRA", (False, None)),
    "use_bdlora": ("BD-LoRA", (False, None)),
    "lora_bias": ("biases inside LoRA", (False, None)),
    "bias": ("trained biases", ("none", None)),
    "fan_in_fan_out": ("transposed (Conv1D) layers", (False, None)),
    "modules_to_save": ("whole trained modules", (None, [])),
    "trainable_token_indices": ("trained token embeddings", (None, [], {})),
    "layer_replication": ("replicated layers", (None, [])),
    "target_parameters": ("LoRA on bare parameters", (None, [])),
    "alora_invocation_tokens": ("activated LoRA", (None, [])),
}
# Initialisations that leave the base's own weights alone. Others (PiSSA, OLoRA, CorDA, LoftQ, LoRA-GA) change them, so
# the adapter only fits the changed base; PEFT can convert it when it is saved, and then writes `true` here.
_PLAIN_INITS = (True, False, None, "gaussian", "orthogonal", "eva")
_EMBEDDINGS = frozenset(("embed_tokens", "lm_head", "wte", "wpe"))

Matches = Callable[[str], bool]
T = TypeVar("T")
_PLAIN = re.compile(r"[A-Za-z0-9_.]+", re.ASCII)


@dataclass(frozen=True, slots=True)
class AdapterConfig:
    """An adapter's configuration. Module names are the model's own: `model.layers.0.self_attn.q_proj`."""

    rank: int
    alpha: float
    rslora: bool
    base_model: str | None  # base_model_name_or_path; None or "" where training did not know it
    target_modules: tuple[str, ...]  # as written; one regular expression when `by_pattern`
    by_pattern: bool
    layers: frozenset[int] | None = None  # None: all
    _targets: Matches = field(default=lambda _: False, repr=False, compare=False)
    _excluded: Matches = field(default=lambda _: False, repr=False, compare=False)
    _ranks: tuple[tuple[Matches, int], ...] = field(default=(), repr=False, compare=False)
    _alphas: tuple[tuple[Matches, float], ...] = field(default=(), repr=False, compare=False)

    @property
    def target_names(self) -> tuple[str, ...]:
        """The names that target_modules lists; none where it is a pattern."""
        return () if self.by_pattern else self.target_modules

    def selects(self, module: str, layer: int) -> bool:
        """Whether the adapter changes this module."""
        if self.layers is not None and layer not in self.layers:
            return False
        return self._targets(module) and not self._excluded(module)

    def rank_of(self, module: str) -> int:
        """The rank of this module's A [r, in] and B [out, r]."""
        return next((rank for matches, rank in self._ranks if matches(module)), self.rank)

    @property
    def largest_rank(self) -> int:
        """Of any module."""
        return max(self.rank, *(rank for _, rank in self._ranks)) if self._ranks else self.rank

    def alpha_of(self, module: str) -> float:
        return next((alpha for matches, alpha in self._alphas if matches(module)), self.alpha)

    def scale_of(self, module: str) -> float:
        """What B (A x) is multiplied by."""
        rank = self.rank_of(module)
        return self.alpha_of(module) / (math.sqrt(rank) if self.rslora else rank)


def parse_adapter_config(raw: bytes) -> AdapterConfig:
    """Raises Refused: ConfigInvalid, UnsupportedAdapter, RankTooLarge."""
    try:
        config = parse_object(raw, max_bytes=MAX_CONFIG_BYTES)
    except JsonError as error:
        raise _invalid(str(error)) from error
    _check_supported(config)
    targets, by_pattern = _targets(config)
    budget = Budget()
    return AdapterConfig(
        rank=_rank("r", config.get("r")),
        alpha=_alpha("lora_alpha", config.get("lora_alpha")),
        rslora=_flag(config, "use_rslora"),
        base_model=_base_model(config),
        target_modules=targets,
        by_pattern=by_pattern,
        layers=_layers(config, by_pattern),
        _targets=_pattern("target_modules", targets[0], budget) if by_pattern else _names(targets),
        _excluded=_exclusion(config, budget),
        _ranks=_pattern_map(config, "rank_pattern", _rank, budget),
        _alphas=_pattern_map(config, "alpha_pattern", _alpha, budget),
    )


def _check_supported(config: JsonObject) -> None:
    if config.get("peft_type") != "LORA":
        raise _unsupported(f"peft_type is {quoted(config.get('peft_type'))}, only LORA is served")
    for name, (what, unused) in _REFUSED.items():
        if config.get(name) not in unused:
            raise _unsupported(f"{name} is set: {what} cannot be served. Train with {name} left at its default")
    if config.get("init_lora_weights") not in _PLAIN_INITS:
        raise _unsupported("init_lora_weights changed the base while training; save with PEFT's weight conversion")
    for name in config.keys() - _TRAINING - _READ - _REFUSED.keys():
        if config[name] not in (None, False, [], {}):
            raise _unsupported(f"{quoted(name)} is set and not known here; it may change what the adapter computes")


def _targets(config: JsonObject) -> tuple[tuple[str, ...], bool]:
    value = config.get("target_modules")
    if isinstance(value, str) and value:
        names, by_pattern = (value,), True
    else:
        names, by_pattern = _name_list("target_modules", value), False
        if not names:
            raise _invalid("target_modules is empty; it names the modules that were trained")
    for name in names:
        if not by_pattern and name.rpartition(".")[2] in _EMBEDDINGS:
            raise _unsupported(f"target_modules holds {quoted(name)}: embeddings and output layers cannot be adapted")
    return names, by_pattern


def _exclusion(config: JsonObject, budget: Budget) -> Matches:
    value = config.get("exclude_modules")
    if isinstance(value, str) and value:
        return _pattern("exclude_modules", value, budget)
    return _names(_name_list("exclude_modules", value or []))


def _layers(config: JsonObject, by_pattern: bool) -> frozenset[int] | None:
    value = config.get("layers_to_transform")
    if config.get("layers_pattern") not in (None, [], "", "layers", ["layers"]):
        raise _unsupported("layers_pattern is not 'layers'")
    if value is None or value == []:
        return None
    if by_pattern:
        raise _invalid("layers_to_transform needs target_modules as a list")
    numbers = cast("list[Any]", value) if isinstance(value, list) else [value]
    if len(numbers) > MAX_NAMES or not all(is_int(number) and 0 <= number < 1 << 16 for number in numbers):
        raise _invalid("layers_to_transform is no layer number and no list of them")
    return frozenset(numbers)


def _base_model(config: JsonObject) -> str | None:
    value = config.get("base_model_name_or_path")
    if value is not None and (not isinstance(value, str) or len(value) > 4096):
        raise _invalid("base_model_name_or_path is no text of at most 4,096 characters")
    return value


def _pattern_map(
    config: JsonObject, name: str, parse: Callable[[str, Any], T], budget: Budget
) -> tuple[tuple[Matches, T], ...]:
    value = config.get(name) or {}
    if not isinstance(value, dict) or len(cast("JsonObject", value)) > MAX_PATTERN_KEYS:
        raise _invalid(f"{name} is no object of at most {MAX_PATTERN_KEYS} entries")
    parsed = [(key, parse(f"{name}[{key[:60]!r}]", item)) for key, item in cast("JsonObject", value).items()]
    return tuple((_ending(name, key, budget), item) for key, item in parsed)


def _rank(name: str, value: object) -> int:
    if not isinstance(value, int) or not is_int(value) or value < 1:
        raise _invalid(f"{name} is {quoted(value)}, not an integer above 0")
    if value > MAX_RANK:
        raise Refused(Reason.RANK_TOO_LARGE, f"{name} is {quoted(value)}; no rank above {MAX_RANK} is read")
    return value


def _alpha(name: str, value: object) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value <= MAX_ALPHA:
        raise _invalid(f"{name} is {quoted(value)}, not a number above 0 and up to {MAX_ALPHA}")
    return float(value)


def _flag(config: JsonObject, name: str) -> bool:
    value = config.get(name, False)
    if not isinstance(value, bool):
        raise _invalid(f"{name} is {quoted(value)}, not true or false")
    return value


def _name_list(name: str, value: object) -> tuple[str, ...]:
    items = cast("list[object]", value) if isinstance(value, list) else None
    if items is None or len(items) > MAX_NAMES or not all(isinstance(item, str) and item for item in items):
        raise _invalid(f"{name} is neither a text nor a list of at most {MAX_NAMES} names")
    return tuple(sorted(set(cast("list[str]", items))))


def _names(names: tuple[str, ...]) -> Matches:
    """Whole names, or endings after a dot."""
    wanted = frozenset(names)

    def matches(module: str) -> bool:
        parts = module.split(".")
        return any(".".join(parts[at:]) in wanted for at in range(len(parts)))

    return matches


def _pattern(name: str, text: str, budget: Budget) -> Matches:
    try:
        return compile_pattern(text, budget)
    except PatternError as error:
        raise _unsupported(f"{name}: {error}") from error


def _ending(name: str, key: str, budget: Budget) -> Matches:
    """PEFT's `(.*\\.)?(key)$`. Most keys are letters, digits and dots; `re` cannot run away with those."""
    whole = rf"(?:.*\.)?(?:{key})"
    if _PLAIN.fullmatch(key):
        plain = re.compile(whole, re.ASCII)
        return lambda module: plain.fullmatch(module) is not None
    return _pattern(name, whole, budget)


def _invalid(what: str) -> Refused:
    return Refused(Reason.CONFIG_INVALID, f"adapter_config.json: {what}")


def _unsupported(what: str) -> Refused:
    return Refused(Reason.UNSUPPORTED_ADAPTER, f"adapter_config.json: {what}")
