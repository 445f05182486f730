"""What a request may hold beside the parameters that are served (a tolerant reader: Fowler, 2011).

Accepted without effect is what asks for what happens anyway (`NEUTRAL`), what holds nothing (`null`, `[]`, `{}`, `""`,
false), and what concerns the caller's own books (`ACCEPTED`). Any other parameter would change the meaning of the
request if it were ignored, so it is refused by name, with an advice.
"""

from collections.abc import Collection, Mapping
from typing import Any

ACCEPTED = frozenset(
    "metadata prompt_cache_key prompt_cache_options prompt_cache_retention request_id moderation".split()
)
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "length_penalty": (1.0,),
    "service_tier": ("auto", "default"),
    "modalities": (["text"],),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "detokenize": (True,),
    "best_of": (1,),
    "verbosity": ("medium",),
    "chat_template_content_format": ("auto", "string"),
}
_PARAMETERS = {
    "it is for reasoning models of OpenAI: ask for it in a message, or by chat_template_kwargs": "verbosity",
    "answers are text: leave it out": "modalities audio",
    "answers are not searched for on the web: leave it out": "web_search_options",
    "it is the older form of tools: send tools and tool_choice": "functions function_call",
    "answers are not stored: leave it out": "store",
    "answers are always generated token by token: leave it out": "prediction",
    "there is one: leave it out": "service_tier",
    "text is generated after a prompt, never between two: put what follows into the prompt": "suffix",
    "it belongs to POST /v1/chat/completions": "messages",
    "it belongs to POST /v1/completions": "prompt",
    "it belongs to POST /v1/completions; a chat has n": "best_of",
    "completions call it max_tokens": "max_completion_tokens",
    "completions call it logprobs, a number": "top_logprobs",
    "the model's own chat template is used; chat_template_kwargs sets its variables": "chat_template",
    "answers are sampled: leave it out": "use_beam_search length_penalty early_stopping",
    "special tokens are never part of the text; return_token_ids has them": (
        "skip_special_tokens spaces_between_special_tokens"
    ),
}
_ADVICE = {parameter: text for text, parameters in _PARAMETERS.items() for parameter in parameters.split()}


def tolerated(value: Mapping[str, Any], known: Collection[str]) -> dict[str, Any]:
    """The parameters that have an effect, or that have to be refused; `known`: those that are served."""
    return {name: item for name, item in value.items() if item is not None and not _ineffective(name, item, known)}


def _ineffective(name: str, item: Any, known: Collection[str]) -> bool:
    if name in known:
        return False
    return name in ACCEPTED or item in ("", [], {}) or item is False or item in NEUTRAL.get(name, ())


def advice(parameter: str) -> str:
    """What to do about a parameter that is not served; "" for an unknown one."""
    return _ADVICE.get(parameter, "")
