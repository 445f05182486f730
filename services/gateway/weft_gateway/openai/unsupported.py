"""Parameters that clients know from OpenAI or vLLM and that Weft does not serve: what to do instead.

Ignoring one would answer another question than was asked, so each is refused by name, with an advice.
"""

_LEAVE_OUT = "leave it out"
_TOOLS = "tools are not served: describe them in a message and read the answer's text"
_SOUND = "answers are text: leave it out"
_THINKING = "it is for reasoning models of OpenAI: ask for it in a message"
_ACCOUNT = "requests are distinguished by their API key and `x-request-id`: leave it out"
_CACHE = "prompts are reused by themselves, within a namespace: leave it out"
_STORE = "answers are not stored: leave it out"
_SHAPE = "answers are plain text: ask for the form in a message, and check it"
_NUCLEUS = "top_p bounds what is sampled from"
_PENALTY = "frequency_penalty and presence_penalty discourage repetition"
_STOP = "the model's end of sequence and `stop` end an answer"

_ADVICE = {
    "tools": _TOOLS,
    "tool_choice": _TOOLS,
    "parallel_tool_calls": _TOOLS,
    "functions": _TOOLS,
    "function_call": _TOOLS,
    "web_search_options": _TOOLS,
    "response_format": _SHAPE,
    "modalities": _SOUND,
    "audio": _SOUND,
    "reasoning_effort": _THINKING,
    "verbosity": _THINKING,
    "user": _ACCOUNT,
    "safety_identifier": _ACCOUNT,
    "metadata": _ACCOUNT,
    "store": _STORE,
    "prediction": "answers are always generated token by token: leave it out",
    "service_tier": "there is one: leave it out",
    "prompt_cache_key": _CACHE,
    "prompt_cache_options": _CACHE,
    "prompt_cache_retention": _CACHE,
    "moderation": "texts are not judged: leave it out",
    "echo": "the answer alone is returned: put the prompt before it",
    "suffix": "text is generated after a prompt, never between two: put what follows into the prompt",
    "messages": "it belongs to POST /v1/chat/completions",
    "prompt": "it belongs to POST /v1/completions",
    "max_completion_tokens": "completions call it max_tokens",
    "top_logprobs": "completions call it logprobs, a number",
    "top_k": _NUCLEUS,
    "min_p": _NUCLEUS,
    "repetition_penalty": _PENALTY,
    "use_beam_search": _LEAVE_OUT,
    "ignore_eos": _STOP,
    "stop_token_ids": _STOP,
    "min_tokens": _STOP,
    "best_of": "it belongs to POST /v1/completions; a chat has n",
}


def advice(parameter: str) -> str:
    """What to do about a parameter that is not served; "" for an unknown one."""
    return _ADVICE.get(parameter, "")
