"""The parameters accepted in a request besides the served parameters (a tolerant reader: Fowler, 2011).

`null` is accepted without effect. So are parameters of further servers asking for the default behaviour: the values
of `NEUTRAL`, and false, 0 and empty values of the names in `OFF`. `hints` has already removed the ignored hints. Any
further parameter would change the meaning of the request if it were ignored. So it is refused by name, with advice, at
any value: even false asks for a change if the default is true.
"""

from collections.abc import Collection, Mapping
from typing import Any

from weft_gateway.errors import ParameterError

NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "length_penalty": (1.0,),
    "service_tier": ("auto", "default", "standard_only"),
    "speed": ("standard",),
    "modalities": (["text"],),
    "best_of": (1,),
    "mm_payload": ("tensors",),
    "padding": ("do_not_pad",),
    "verbosity": ("medium",),
    "chat_template_content_format": ("auto", "string"),
    "function_call": ("none", "auto"),  # without functions
    "spaces_between_special_tokens": (True, False),  # no decoder puts any there
    "stream_options": ({"include_obfuscation": False},),  # of responses
    "stream_interval": (1,),
    **dict.fromkeys("id_slot slot_id".split(), (-1,)),
    **dict.fromkeys("typical_p tfs_z repeat_penalty".split(), (1.0,)),
    **dict.fromkeys(
        "detokenize do_sample include_reasoning separate_reasoning stream_reasoning cache_prompt "
        "parse_tool_calls add_special_tokens return_mm_kwargs use_activation".split(),
        (True,),
    ),
}
_OFF = {
    "OpenAI and Anthropic": "audio background container functions mcp_servers modalities prediction store "
    "stream_options suffix web_search_options",
    "vLLM": "chat_template early_stopping ec_transfer_params kv_transfer_params logits_processors logprob_token_ids "
    "max_tokens_per_doc max_tokens_per_query media_io_kwargs mm_processor_kwargs prompt_embeds repetition_detection "
    "return_prompt_text return_token_offsets routed_experts_prompt_start use_beam_search vllm_xargs watermarking",
    "SGLang": "custom_logit_processor custom_params ebnf extra_key images_config input_ids json_schema lora_path "
    "ngram_corpus_id no_stop_trim regex return_cached_tokens_details return_hidden_states return_meta_info "
    "return_prompt_token_ids return_routed_experts routed_experts_start_len session_params stop_regex "
    "use_audio_in_video",
    "TGI": "decoder_input_details details return_full_text top_n_tokens watermark",
    "llama.cpp": "dry_multiplier dynatemp_range grammar image_data lora mirostat n_keep n_probs post_sampling_probs "
    "return_progress return_tokens timings_per_token top_a xtc_probability",
    "others": "plugins provider safe_prompt transforms",
}
OFF = frozenset(name for names in _OFF.values() for name in names.split())
_PARAMETERS = {
    "it is for reasoning models of OpenAI: ask for it in a message, or by chat_template_kwargs": "verbosity",
    "answers are text: leave it out": "modalities audio image",
    "prompts are text: leave it out": "media_io_kwargs mm_payload mm_processor_kwargs return_mm_kwargs",
    "prompts are texts or token ids": "prompt_embeds",
    "answers are not searched for on the web: leave it out": "web_search_options",
    "it is the older form of tools: send tools and tool_choice": "functions function_call",
    "answers are not stored: leave it out": "store",
    "there is a single tier: leave it out": "service_tier speed inference_geo",
    "there are none: leave it out": "access_programs",
    "Weft runs no tools: leave it out": "container mcp_servers",
    "responses are answered while the caller waits; POST /v1/batches runs requests later": (
        "background background_options"
    ),
    "previous_response_id continues a conversation": "conversation",
    "conversations are not stored under a name: send all messages": "thread",
    "conversations are not summarised: ask for a summary in a message": "compaction",
    "another model does not stand in: send the request to another model": "fallbacks",
    "send earlier messages as input": "previous_input_messages",
    "rendered messages are not returned; POST /tokenize has the tokens of a chat's prompt": "enable_response_messages",
    "ask for it in instructions": "personality",
    "runners move caches between them: leave it out": "ec_transfer_params kv_transfer_params",
    "it is for plugins of vLLM: leave it out": "vllm_xargs data",
    "answers have no watermark: leave it out": "watermark watermarking",
    "frequency_penalty, presence_penalty and repetition_penalty act against repetitions": "repetition_detection",
    "routes of experts are not reported: leave it out": "routed_experts_prompt_start return_routed_experts",
    "no spaces stand between special tokens: leave it out": "spaces_between_special_tokens",
    "a stream has a chunk for each step, without padding: leave it out": "stream_interval stream_options",
    "the header x-weft-model-digest names the weights": "return_weight_versions",
    "it goes with messages": "add_generation_prompt continue_final_message tools",
    "texts are never padded: leave it out": "padding",
    "write it into the query": "instruction",
    "truncate_prompt_tokens bounds each text": "max_tokens_per_doc max_tokens_per_query",
    "vectors have length 1 here: leave it out": "use_activation",
    "files stay until they are deleted": "expires_after output_expires_after",
    "lora_name names the adapter": "lora_int_id",
    "text is generated after a prompt, never inside it: put all text into the prompt": "suffix",
    "it belongs to POST /v1/chat/completions": (
        "messages enable_thinking chat_template_kwargs reasoning_effort include_reasoning prediction"
    ),
    "it belongs to POST /v1/completions": "prompt",
    "it belongs to POST /v1/completions; a chat has n": "best_of",
    "it is called max_tokens": "max_completion_tokens max_new_tokens n_predict",
    "completions call it logprobs, a number": "top_logprobs",
    "the model's chat template is used; chat_template_kwargs sets its variables": "chat_template",
    "enable_thinking and chat_template_kwargs set the chat template's variables": ("thinking think thinking_budget"),
    "reasoning_effort, enable_thinking and chat_template_kwargs set the chat template's variables": "reasoning",
    "answers are sampled: leave it out": "use_beam_search length_penalty early_stopping",
    "temperature 0 is greedy": "do_sample",
    "answers are texts; return_token_ids has the tokens, too": "detokenize",
    "reasoning is reasoning_content, next to the content": "separate_reasoning stream_reasoning",
    "prompts are reused inside a cache_salt: send your cache_salt": "cache_prompt extra_key",
    "return_token_ids has them": "return_prompt_token_ids",
    "POST /tokenize has the tokens of a chat's prompt": "return_prompt_text return_token_offsets",
    "the sampled and the likeliest tokens are reported: logprobs, or top_logprobs, asks for them": "logprob_token_ids",
    "POST /v1/completions takes token ids as its prompt": "input_ids",
    "model names the adapter": "lora_path",
    "it is called structured_outputs": "regex ebnf json_schema grammar guided_decoding_backend",
    "it is called repetition_penalty": "repeat_penalty",
    "it is called use_activation": "normalize",
    "it is called seed": "random_seed",
}
_STRUCTURED = "json regex choice grammar json_object whitespace_pattern"  # vLLM's names before 0.12: guided_json, ...
_ADVICE = {
    **{parameter: text for text, parameters in _PARAMETERS.items() for parameter in parameters.split()},
    **{f"guided_{name}": f"it is called structured_outputs.{name}" for name in _STRUCTURED.split()},
}


def tolerated(value: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    """Return the parameters with an effect, or to be refused; `names`: the served parameters."""
    return {name: item for name, item in value.items() if item is not None and not _ineffective(name, item, names)}


def _ineffective(name: str, item: Any, names: Collection[str]) -> bool:
    if name in names:
        return False
    return item in NEUTRAL.get(name, ()) or (name in OFF and not item)


def unknown_of(value: Mapping[str, Any], names: Collection[str]) -> str | None:
    """Return the first unknown name of an object inside a request, shortened; null counts as absent."""
    return next((name[:64] for name, item in value.items() if item is not None and name not in names), None)


def check_names(subject: str, value: Mapping[str, Any], names: Collection[str]) -> None:
    """Check that all names of an object inside a request are known. Raises ParameterError."""
    if unknown := unknown_of(value, names):
        rule = f"; {', '.join(names)} {'is' if len(names) == 1 else 'are'}." if names else ": leave it out."
        text = f"{subject}.{unknown} is not supported{rule}"
        raise ParameterError(text, param=f"{subject}.{unknown}", code="unsupported_parameter")


def advice(parameter: str) -> str:
    """Return the remedy for an unserved parameter; "" for an unknown parameter."""
    return _ADVICE.get(parameter, "")
