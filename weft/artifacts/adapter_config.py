"""PEFT's `adapter_config.json` -> AdapterConfig: the scaling of the adapter's tensors. Data only, never executed.

The tensors define the changed modules and their ranks. The configuration is a note about them. A contradiction, or a
form that is not evaluated here, becomes a remark. Facts outside the tensors are read as in PEFT. Scale of a module:
alpha / r; with rsLoRA (Kalajdzievski, 2023) alpha / sqrt(r). `alpha_pattern` and `rank_pattern` match endings after a
dot, first key wins (`utils.other.get_pattern_key`).

A field that changes the adapter's computation in a further way is refused: a wrong adapter is worse than none.
"""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar, cast

from weft.artifacts.pattern import Budget, PatternError, compile_pattern
from weft.domain.model.errors import Reason, Refused
from weft.domain.model.tensors import some_of
from weft.domain.strict_json import JsonError, JsonObject, is_int, parse_object
from weft.domain.text import quoted

MAX_CONFIG_BYTES = 1 << 18
MAX_CONFIG_RANK = 1 << 14
MAX_ALPHA = 1 << 20
MAX_NAMES = 8192
MAX_PATTERN_KEYS = 1024
DEFAULT_RANK = DEFAULT_ALPHA = 8  # PEFT's default of a missing field

# Fields for training, and records of training.
_TRAINING = frozenset(
    "auto_mapping base_model_class corda_config ensure_weight_tying eva_config inference_mode lora_dropout "
    "lora_ga_config loftq_config megatron_config megatron_core parent_library peft_version qalora_group_size revision "
    "runtime_config task_type".split()
)
_READ = frozenset(
    "alpha_pattern base_model_name_or_path exclude_modules init_lora_weights layers_pattern layers_to_transform "
    "lora_alpha peft_type r rank_pattern target_modules use_rslora".split()
)
_MERGE = "merge it into the base (PEFT's merge_and_unload) and serve the merged model"
_RETRAIN = "train without it"
# Fields that change the computation: feature and remedy. Any value except an empty one (`_NOTHING`) is refused.
_REFUSED: dict[str, tuple[str, str]] = {
    "use_dora": ("DoRA", _MERGE),
    "use_qalora": ("QALoRA", _RETRAIN),
    "use_bdlora": ("BD-LoRA", _MERGE),
    "lora_bias": ("biases inside LoRA", _RETRAIN),
    "modules_to_save": ("whole trained modules", f"{_MERGE}, or {_RETRAIN}"),
    "trainable_token_indices": ("trained token embeddings", f"{_MERGE}, or {_RETRAIN}"),
    "layer_replication": ("replicated layers", _MERGE),
    "target_parameters": ("LoRA on bare parameters", _MERGE),
    "alora_invocation_tokens": ("activated LoRA (it begins in the middle of a prompt)", _RETRAIN),
    "arrow_config": ("a router of several adapters", "serve its adapters separately"),
    "kasa_config": ("KaSA (it changes the base's weights)", _MERGE),
    "monteclora_config": ("MonteCLoRA", "save it as plain LoRA (PEFT's save_as_lora)"),
    "velora_config": ("VeLoRA", "save it as plain LoRA (PEFT's save_as_lora)"),
}
_NOTHING = (None, False, "", [], {})
# Fields with an effect visible in the tensors, and their value in PEFT without an effect.
_SEEN_IN_TENSORS = {"bias": "none", "fan_in_fan_out": False}
# Initialisations that leave the base's weights unchanged. The rest (PiSSA, OLoRA, CorDA, LoftQ, LoRA-GA) change it, so
# the adapter only fits the changed base. PEFT can convert it on saving, and then writes `true` here.
_PLAIN_INITS = (True, False, None, "gaussian", "orthogonal", "eva", "mica")
_ALL_LINEAR = "all-linear"

Matches = Callable[[str], bool]
Selects = Callable[[str, int], bool]
T = TypeVar("T")
_PLAIN = re.compile(r"[A-Za-z0-9_.]+", re.ASCII)


@dataclass(frozen=True, slots=True)
class Pattern(Generic[T]):
    """An entry of `rank_pattern` or `alpha_pattern`. `matches` is None if the key is not evaluated here."""

    key: str
    matches: Matches | None
    value: T


@dataclass(frozen=True, slots=True)
class AdapterConfig:
    """An adapter's configuration. Module names are the model's: `model.layers.0.self_attn.q_proj`.

    `base_model`: base_model_name_or_path; None or "" if training did not know it. `remarks`: unused settings, for
    people.
    """

    rank: int
    alpha: float
    rslora: bool
    base_model: str | None
    target_names: tuple[str, ...]  # of target_modules; empty if it is a pattern
    remarks: tuple[str, ...] = ()
    ranks: tuple[Pattern[int], ...] = field(default=(), repr=False, compare=False)
    alphas: tuple[Pattern[float], ...] = field(default=(), repr=False, compare=False)
    selects: Selects | None = field(default=None, repr=False, compare=False)
    """Whether training was to change a module (of a layer). None if the selection is not evaluated here."""

    def rank_of(self, module: str) -> int | None:
        """Return the expected rank of a module's tensors, or None if it is not evaluated here."""
        for pattern in self.ranks:
            if pattern.matches is None:
                return None
            if pattern.matches(module):
                return pattern.value
        return self.rank

    @property
    def largest_rank(self) -> int:
        """The largest rank of any module."""
        return max(self.rank, *(pattern.value for pattern in self.ranks)) if self.ranks else self.rank

    def scale_of(self, module: str, rank: int) -> float:
        """Return the factor of B (A x). A has `rank` rows."""
        alphas = (pattern.value for pattern in self.alphas if pattern.matches and pattern.matches(module))
        return next(alphas, self.alpha) / (math.sqrt(rank) if self.rslora else rank)


def parse_adapter_config(raw: bytes) -> AdapterConfig:
    """Parse an adapter_config.json. Raises Refused: ConfigInvalid, UnsupportedAdapter, RankTooLarge."""
    try:
        config = parse_object(raw, max_bytes=MAX_CONFIG_BYTES)
    except JsonError as error:
        raise _invalid(str(error)) from error
    remarks, budget = _check_supported(config), Budget()
    alphas = _patterns(config, "alpha_pattern", _alpha, budget)  # first, while the budget is full
    if unread := [pattern.key for pattern in alphas if pattern.matches is None]:
        raise _unsupported(
            f"alpha_pattern: {quoted(unread[0])} is not evaluated here, and the tensors do not show the alphas; "
            "write its modules by name"
        )
    ranks = _patterns(config, "rank_pattern", _rank, budget)
    return AdapterConfig(
        rank=_rank("r", config.get("r", DEFAULT_RANK)),
        alpha=_alpha("lora_alpha", config.get("lora_alpha", DEFAULT_ALPHA)),
        rslora=_flag(config, "use_rslora"),
        base_model=_base_model(config),
        target_names=_target_names(config),
        selects=_selection(config, budget, remarks),
        remarks=tuple(remarks),
        ranks=ranks,
        alphas=alphas,
    )


def _check_supported(config: JsonObject) -> list[str]:
    """List unused settings. Raises Refused for settings that would change the computation."""
    if config.get("peft_type") != "LORA":
        raise _unsupported(
            f"peft_type is {quoted(config.get('peft_type'))}, only LORA is served; {_MERGE}, or convert it with PEFT's "
            "save_as_lora"
        )
    for name, (feature, remedy) in _REFUSED.items():
        if config.get(name) not in _NOTHING:
            raise _unsupported(f"{name} is set: {feature} cannot be served; {remedy}")
    if config.get("init_lora_weights") not in _PLAIN_INITS:
        raise _unsupported(
            f"init_lora_weights is {quoted(config['init_lora_weights'])}, which changes the base in training; save "
            "it with PEFT's path_initial_model_for_weight_conversion, which converts it to plain LoRA"
        )
    remarks = [
        f"{name} is {quoted(config[name])}, without a trace in the tensors"
        for name, default in _SEEN_IN_TENSORS.items()
        if config.get(name) not in (default, None)
    ]
    known_fields = _TRAINING | _READ | _REFUSED.keys() | _SEEN_IN_TENSORS.keys()
    if unknown := [quoted(name) for name in config.keys() - known_fields if config[name] not in _NOTHING]:
        remarks.append(f"unknown fields, not used: {some_of(unknown)}")
    return remarks


def _target_names(config: JsonObject) -> tuple[str, ...]:
    value = config.get("target_modules")
    return () if value is None or isinstance(value, str) else _name_list("target_modules", value)


def _selection(config: JsonObject, budget: Budget, remarks: list[str]) -> Selects | None:
    """Return the modules that training was to change, as PEFT reads them (`tuners_utils.check_target_module_exists`). A
    list has whole names or endings after a dot. A text is a regular expression for the whole name."""
    layers, names = _layers(config), frozenset(_target_names(config))
    try:
        targets = _matcher(config, "target_modules", budget)
        excluded = _matcher(config, "exclude_modules", budget)
    except PatternError as error:
        remarks.append(f"{error}; its selection was not compared with the tensors")
        return None
    if not targets or (layers is not None and config.get("layers_pattern") not in (*_NOTHING, "layers", ["layers"])):
        return None
    return lambda module, layer: (
        (module in names or (targets(module) and (layers is None or layer in layers)))
        and not (excluded and excluded(module))
    )


def _matcher(config: JsonObject, name: str, budget: Budget) -> Matches | None:
    """Compile the option `name` of a configuration, or return None if it is not set. Raises PatternError."""
    value = config.get(name)
    if value is None or value == "":
        return None
    if not isinstance(value, str):
        return _names(_name_list(name, value))
    if name == "target_modules" and value.lower() == _ALL_LINEAR:
        return lambda _: True
    try:
        return compile_pattern(value, budget)
    except PatternError as error:
        raise PatternError(f"{name}: {error}") from error


def _layers(config: JsonObject) -> frozenset[int] | None:
    value = config.get("layers_to_transform")
    if value is None or value == []:
        return None
    numbers = cast("list[Any]", value) if isinstance(value, list) else [value]
    if len(numbers) > MAX_NAMES or not all(is_int(number) and 0 <= number < 1 << 16 for number in numbers):
        raise _invalid("layers_to_transform is neither a layer number nor a list of layer numbers")
    return frozenset(numbers)


def _base_model(config: JsonObject) -> str | None:
    value = config.get("base_model_name_or_path")
    if value is not None and (not isinstance(value, str) or len(value) > 4096):
        raise _invalid("base_model_name_or_path is not a text of at most 4,096 characters")
    return value


def _patterns(config: JsonObject, name: str, parse: Callable[[str, Any], T], budget: Budget) -> tuple[Pattern[T], ...]:
    value = config.get(name) or {}
    if not isinstance(value, dict) or len(cast("JsonObject", value)) > MAX_PATTERN_KEYS:
        raise _invalid(f"{name} is not an object of at most {MAX_PATTERN_KEYS} entries")
    parsed = [(key, parse(f"{name}[{key[:60]!r}]", item)) for key, item in cast("JsonObject", value).items()]
    return tuple(Pattern(key, _ending(key, budget), item) for key, item in parsed)


def _rank(name: str, value: object) -> int:
    if not isinstance(value, int) or not is_int(value) or value < 1:
        raise _invalid(f"{name} is {quoted(value)}, not an integer above 0")
    if value > MAX_CONFIG_RANK:
        raise Refused(Reason.RANK_TOO_LARGE, f"{name} is {quoted(value)}; the largest rank is {MAX_CONFIG_RANK}")
    return value


def _alpha(name: str, value: object) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value <= MAX_ALPHA:
        raise _invalid(f"{name} is {quoted(value)}, not a number above 0 and up to {MAX_ALPHA}")
    return float(value)


def _flag(config: JsonObject, name: str) -> bool:
    value = config.get(name) or False
    if not isinstance(value, bool):
        raise _invalid(f"{name} is {quoted(value)}, not true or false")
    return value


def _name_list(name: str, value: object) -> tuple[str, ...]:
    items = cast("list[object]", value) if isinstance(value, list) else None
    if items is None or len(items) > MAX_NAMES or not all(isinstance(item, str) and item for item in items):
        raise _invalid(f"{name} is neither a text nor a list of at most {MAX_NAMES} names")
    return tuple(sorted(set(cast("list[str]", items))))


def _names(names: tuple[str, ...]) -> Matches:
    """Match whole names, or endings after a dot."""
    listed_names = frozenset(names)

    def matches(module: str) -> bool:
        parts = module.split(".")
        return any(".".join(parts[at:]) in listed_names for at in range(len(parts)))

    return matches


def _ending(key: str, budget: Budget) -> Matches | None:
    r"""Compile PEFT's `(.*\.)?(key)$`. Most keys are letters, digits and dots, on which `re` cannot run away."""
    expression = rf"(?:.*\.)?(?:{key})"
    if _PLAIN.fullmatch(key):
        plain = re.compile(expression, re.ASCII)
        return lambda module: plain.fullmatch(module) is not None
    try:
        return compile_pattern(expression, budget)
    except PatternError:
        return None


def _invalid(problem: str) -> Refused:
    return Refused(Reason.CONFIG_INVALID, f"adapter_config.json: {problem}")


def _unsupported(problem: str) -> Refused:
    return Refused(Reason.UNSUPPORTED_ADAPTER, f"adapter_config.json: {problem}")
