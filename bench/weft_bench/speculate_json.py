"""Compact JSON by a schema, as reports of incidents are made of logs, and a tokenizer that knows its words.

The tokenizer is trained on the Python standard library's sources, byte-level, digits one by one: with 49,152 tokens it
cuts the schema's keys as GPT-2's does. Strings and numbers are bounded, since a random model ends them by chance.
"""

import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from weft_bench.path_shape import SPECIAL
from weft_stage.errors import EngineRefused

if TYPE_CHECKING:
    from llguidance import LLMatcher

PROPERTIES: dict[str, Any] = {
    "server_name": {"type": "string", "maxLength": 16},
    "error_category": {"enum": ["connection_refused", "permission_denied", "invalid_request", "internal_error"]},
    "priority": {"enum": ["low", "normal", "high", "critical"]},
    "response_status_code": {"type": "integer", "minimum": 100, "maximum": 599},
    "retry_count": {"type": "integer", "minimum": 0, "maximum": 9},
    "user_visible": {"type": "boolean"},
    "requires_attention": {"type": "boolean"},
    "recommended_action": {"enum": ["restart_service", "check_permissions", "change_configuration", "contact_user"]},
}
SCHEMA: dict[str, Any] = {
    "type": "object", "properties": PROPERTIES, "required": list(PROPERTIES), "additionalProperties": False,
    "x-guidance": {"whitespace_pattern": ""},
}  # fmt: skip


def tokenizer(vocab_size: int, sources: Sequence[Path] = ()) -> str:
    """Return `tokenizer.json` of `vocab_size` tokens, trained for some seconds.

    `sources`: other texts than the standard library. Raises EngineRefused.
    """
    made = Tokenizer(models.BPE())
    digits, level = pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.pre_tokenizer, made.decoder = pre_tokenizers.Sequence([digits, level]), decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=list(SPECIAL), initial_alphabet=level.alphabet(), show_progress=False
    )
    made.train([str(path) for path in sources or _library()], trainer)
    if (found := made.get_vocab_size()) != vocab_size:
        raise EngineRefused(f"expected {vocab_size} tokens of the texts, got {found}: name a shape of fewer tokens")
    return made.to_str()


def _library() -> list[Path]:
    folder = Path(sysconfig.get_path("stdlib"))
    return sorted(path for path in folder.rglob("*.py") if not {"site-packages", "test"} & {*path.parts})


def forced_share(beginning: "LLMatcher", answers: Sequence[Sequence[int]]) -> float:
    """Return the share of the answers' tokens that the grammar left no choice about."""
    forced = 0
    for answer in answers:
        matcher = beginning.deep_copy()
        for token in answer:
            forced += bool(matcher.compute_ff_tokens())
            matcher.consume_token(token)
    return forced / sum(map(len, answers))
