"""vLLM's tests of its servers, as requests to ours: which are answered alike, which are not and why.

Counted is what a server of text models with LoRA adapters can be asked: `OUT_OF_SCOPE` says what is left out.
"""

from harness.vllm_requests import chats, completions, others, pooling
from harness.vllm_requests.checks import Check

CHECKS: tuple[Check, ...] = (*completions.CHECKS, *chats.CHECKS, *pooling.CHECKS, *others.CHECKS)
DIFFERENT = tuple(check for check in CHECKS if check.differs)
# Of vLLM's repository, under `tests/`: the commit at which each file was read.
COMMITS = {
    "anthropic/test_messages.py": "20d3f8f29638",
    "instrumentator/test_basic.py": "27bfe5e8a984",
    "instrumentator/test_metrics.py": "20ef9d82bba5",
    "openai/basic/test_return_token_ids.py": "06cb65b596ce",
    "openai/chat_completion/test_batched_chat_completions.py": "00cd9d767248",
    "openai/chat_completion/test_chat.py": "03f5298e5c55",
    "openai/chat_completion/test_chat_completion.py": "006587544afc",
    "openai/chat_completion/test_chat_echo.py": "41c5903d049b",
    "openai/chat_completion/test_chat_error.py": "0a1478aaccab",
    "openai/chat_completion/test_chat_logit_bias_validation.py": "0c292380d466",
    "openai/chat_completion/test_chat_stop_token_ids_validation.py": "37fa82dee586",
    "openai/chat_completion/test_completion_with_function_calling.py": "042807b6623f",
    "openai/chat_completion/test_logprob_token_ids.py": "164670d45cbc",
    "openai/chat_completion/test_non_object_body_validation.py": "5cc615108e90",
    "openai/chat_completion/test_thinking_token_budget_validation.py": "9a00acff307c",
    "openai/chat_completion/test_tool_choice_null.py": "689fb8326cc2",
    "openai/completion/test_completion.py": "10efe9463b0a",
    "openai/completion/test_completion_error.py": "03d1e1ee1fc8",
    "openai/completion/test_completion_text_offset.py": "c3b0b516413e",
    "openai/completion/test_empty_prompt_list.py": "22456d6eab88",
    "openai/completion/test_prompt_validation.py": "6052d63e3d36",
    "openai/completion/test_token_in_token_out.py": "2fb36e4d6e69",
    "openai/responses/test_count_tokens.py": "4b0b1afe0bf8",
    "openai/responses/test_function_call.py": "0e25460586ff",
    "openai/responses/test_simple.py": "01ca842df5b1",
    "openai/responses/test_stateful.py": "41c5903d049b",
    "openai/responses/test_structured_output.py": "0985a564f488",
    "openai/test_completion.py": "0091c9502ffb",
    "pooling/embed/test_online.py": "00bd1493b3e8",
    "pooling/scoring/test_bi_encoder_online.py": "21192869ecc8",
    "pooling/scoring/test_cross_encoder_online.py": "29fda7946ff0",
    "pooling/test_cache_salt_validation.py": "1f11723419f1",
    "serve/exception_handling/test_validation_exception_handler.py": "344e800a9f80",
    "serve/lora/test_lora_adapters.py": "0306474e9d1f",
    "serve/middleware/test_cors_middleware.py": "174bd2da8c77",
    "serve/middleware/test_x_request_id.py": "ace72730fc7e",
    "serve/tokenize/test_tokenization.py": "41c5903d049b",
}
COMMITS = {f"entrypoints/{name}": commit for name, commit in COMMITS.items()} | {
    "tool_use/test_chat_completion_request_validations.py": "0d055b2acd21",
    "tool_use/test_chat_completions.py": "1628e182a28a",
    "tool_use/test_parallel_tool_calls.py": "064ca1f99101",
    "tool_use/test_responses_request_validations.py": "246823a36fb5",
    "tool_use/test_structured_outputs_tool_calling.py": "784f781d1a4c",
    "tool_use/test_tool_calls.py": "1628e182a28a",
    "tool_use/test_tool_choice_required_json_schema.py": "e28357a46745",
    "v1/entrypoints/openai/serving_responses/test_basic.py": "e5fd201ab77b",
}
OUT_OF_SCOPE = {
    "images, audio, video, prompts as embeddings": "models of other kinds",
    "classification, rewards, cross-encoders, late interaction, a vector for each token": "models of other kinds",
    "gpt-oss's channels, the tool parsers of each family, reasoning models": "a model of that family has to answer",
    "loading adapters by request": "`tests/integration/gateway/test_gateway_loading.py` and `tests/e2e/test_serve.py` ask "
    "it: the adapters are the quickstart's",
    "sleep, weights, caches, profiles, snapshots, rendering, disaggregated serving, SageMaker's handlers": "vLLM's own endpoints",
    "more log probabilities, usage nobody asked for, another root path": "a flag of vLLM's server has to be set",
    "tools that the server runs (MCP, files, web), websockets": "not served",
    "keys": "Weft's own are tested in `tests/e2e/test_keys.py`",
    "vLLM's classes without a request; accuracy of its models": "no request is made, or the answer is the model's",
}


def counts() -> str:
    """Say how many are alike."""
    alike = len(CHECKS) - len(DIFFERENT)
    return f"{alike} of {len(CHECKS)} requests are answered as vLLM's tests assert ({alike / len(CHECKS):.1%})"


def table() -> str:
    """Return those that are not alike, by their reasons, in Markdown."""
    by_reason: dict[str, list[str]] = {}
    for check in DIFFERENT:
        by_reason.setdefault(check.differs, []).append(check.test.partition("::")[2])
    rows = [f"| {', '.join(f'`{name}`' for name in names)} | {reason} |" for reason, names in by_reason.items()]
    return "\n".join(["| vLLM's test | why Weft's answer is another |", "|---|---|", *rows])


def left_out() -> str:
    """Return what is not counted, in Markdown."""
    return "\n".join(
        ["| not counted | why |", "|---|---|", *(f"| {what} | {why} |" for what, why in OUT_OF_SCOPE.items())]
    )
