"""Parameters that clients know from OpenAI or vLLM and that Weft does not serve: what to do instead.

An ignored parameter would change the meaning of the request, so each is refused by name, with an advice.
"""

_PARAMETERS = {
    "tools are not served: describe them in a message and read the answer's text": (
        "tools tool_choice parallel_tool_calls functions function_call web_search_options"
    ),
    "answers are plain text: ask for the form in a message, and check it": "response_format",
    "answers are text: leave it out": "modalities audio",
    "it is for reasoning models of OpenAI: ask for it in a message": "reasoning_effort verbosity",
    "requests are distinguished by their API key and `x-request-id`: leave it out": "user safety_identifier metadata",
    "answers are not stored: leave it out": "store",
    "answers are always generated token by token: leave it out": "prediction",
    "there is one: leave it out": "service_tier",
    "prompts are reused by themselves, within a namespace: leave it out": (
        "prompt_cache_key prompt_cache_options prompt_cache_retention"
    ),
    "texts are not judged: leave it out": "moderation",
    "the answer alone is returned: put the prompt before it": "echo",
    "text is generated after a prompt, never between two: put what follows into the prompt": "suffix",
    "it belongs to POST /v1/chat/completions": "messages",
    "it belongs to POST /v1/completions": "prompt",
    "it belongs to POST /v1/completions; a chat has n": "best_of",
    "completions call it max_tokens": "max_completion_tokens",
    "completions call it logprobs, a number": "top_logprobs",
    "top_p bounds what is sampled from": "top_k min_p",
    "frequency_penalty and presence_penalty discourage repetition": "repetition_penalty",
    "the model's end of sequence and `stop` end an answer": "ignore_eos stop_token_ids min_tokens",
    "leave it out": "use_beam_search",
}
_ADVICE = {parameter: text for text, parameters in _PARAMETERS.items() for parameter in parameters.split()}


def advice(parameter: str) -> str:
    """What to do about a parameter that is not served; "" for an unknown one."""
    return _ADVICE.get(parameter, "")
