"""What common clients send beyond OpenAI's core: prompt batches, evaluation parameters, tokenisation, probes."""

import gzip
from pathlib import Path
from typing import Any

import orjson
import pytest

from weft.domain.request import Priority

from .conftest import HELLO, World, serving
from .test_gateway_refusals import JSON, TEXT, refused


@pytest.fixture
def echoing(world: World) -> World:
    """Each prompt's answer is the prompt, with the choice behind it."""

    def answer(start: Any) -> list[int]:
        return [*start.prompt, *world.tokens(str(start.sampling.choice))]

    world.runner.answer = answer
    return world


async def test_each_prompt_of_a_batch_is_answered_in_its_place_and_all_are_counted(echoing: World) -> None:
    prompts = ["hello", "dear", "reader"]
    answer: Any = await echoing.client().completions.create(model="tiny", prompt=prompts, n=2)
    assert [choice.index for choice in answer.choices] == list(range(6))
    assert [choice.text for choice in answer.choices] == [f"{prompt}{i}" for prompt in prompts for i in range(2)]
    tokens = [len(echoing.tokens(prompt)) + 1 for prompt in prompts]  # with the beginning of sequence
    assert answer.usage.prompt_tokens == sum(tokens)
    assert answer.usage.completion_tokens == sum(2 * (n + 1) for n in tokens)
    assert echoing.gateway.machine.admission.in_flight == 0
    stream = await echoing.client().completions.create(model="tiny", prompt=prompts, stream=True)
    texts = ["", "", ""]
    async for chunk in stream:
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == [f"{prompt}0" for prompt in prompts]


async def test_batches_of_token_ids_are_answered_and_more_prompts_than_the_gateway_takes_are_refused(
    parts: World, tmp_path: Path
) -> None:
    async with serving(parts, parts.settings(tmp_path, max_in_flight=4)) as world, world.http() as http:
        world.runner.answer = lambda start: list(start.prompt)
        many = TEXT | {"prompt": [[270], [271]], "return_token_ids": True}
        choices = (await http.post("/v1/completions", json=many)).json()["choices"]
        assert [choice["token_ids"] for choice in choices] == [[270], [271]]
        assert [choice["prompt_token_ids"] for choice in choices] == [[270], [271]]
        refused(
            await http.post("/v1/completions", json=TEXT | {"prompt": ["a"] * 5}), 400, "invalid_parameter", "prompt"
        )
        wrong = TEXT | {"prompt": ["a", "b" * 9000]}
        refused(await http.post("/v1/completions", json=wrong), 400, "context_length_exceeded", "prompt[1]")
        full = {"model": "tiny", "prompt": [270] * 512}  # no room for an answer of a length that nobody chose
        message = (await http.post("/v1/completions", json=full)).json()["error"]["message"]
        assert "requested 513 tokens (512 in the prompt, 1 in the completion)" in message
        assert world.gateway.machine.admission.in_flight == 0


async def test_every_sampling_parameter_reaches_the_runner_and_nothing_else_does_by_itself(world: World) -> None:
    same: dict[str, Any] = {
        "temperature": 0.5, "top_p": 0.25, "top_k": 3, "min_p": 0.25, "repetition_penalty": 1.5, "min_tokens": 2,
        "ignore_eos": True, "stop_token_ids": [7, 8], "allowed_token_ids": [5, 6], "frequency_penalty": -2,
        "presence_penalty": 0.5, "logprobs": True, "top_logprobs": 20,
    }  # fmt: skip
    other = {
        "seed": -1, "max_completion_tokens": 9, "bad_words": ["dear"], "logit_bias": {"0": -100, "279": 1.5},
        "cache_salt": "mine",
    }  # fmt: skip
    chat = {"model": "acme/upper", "messages": HELLO}
    async with world.http() as http:
        assert (await http.post("/v1/chat/completions", json=chat | same | other)).status_code == 200
        assert (await http.post("/v1/completions", json=TEXT | {"top_k": -1, "priority": 3})).status_code == 200
    start = await world.runner.next("start")
    sampling = start.sampling
    assert {name: type(value)(getattr(sampling, name)) for name, value in same.items()} == same
    assert sampling.seed == 2**64 - 1
    assert [list(word.tokens) for word in sampling.bad_words] == [world.tokens("dear"), world.tokens(" dear")]
    assert {one.token: one.bias for one in sampling.logit_bias} == {0: -100, 279: 1.5}
    assert (start.max_tokens, start.reservation_tokens, list(start.emitted)) == (9, 8, [])
    assert (start.adapter, start.cache_salt.endswith("mine")) == ("sha256:" + "a" * 64, True)
    plain = await world.runner.next("start")
    assert (plain.priority, plain.cache_salt) == (Priority.BATCH, "\n")
    sampling = plain.sampling
    assert (sampling.top_k, sampling.frequency_penalty, sampling.presence_penalty, list(sampling.logit_bias)) == (
        0, 0, 0, [],
    )  # fmt: skip
    assert (sampling.logprobs, sampling.top_logprobs, sampling.choice) == (False, 0, 0)


@pytest.mark.parametrize("chat", [False, True])
async def test_what_a_trainer_samples_has_the_ids_and_log_probabilities_that_it_learns_from(
    world: World, chat: bool
) -> None:
    """TRL's client of a server (`trl/generation/vllm_client.py`), with its defaults."""
    asked: dict[str, Any] = {
        "n": 2, "repetition_penalty": 1.0, "temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "max_tokens": 16,
        "return_token_ids": True, "return_tokens_as_token_ids": True,
    }  # fmt: skip
    if chat:
        tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
        messages = [{"role": "user", "content": "one two"}]
        more = {"messages": messages, "logprobs": True, "top_logprobs": 0, "tools": [tool], "tool_choice": "none"}
    else:
        more = {"prompt": [[270, 271], [272]], "logprobs": 0}
    async with world.http() as http:
        model = (await http.get("/v1/models")).json()["data"][0]["id"]
        answer = await http.post(f"/v1/{'chat/' * chat}completions", json=asked | more | {"model": model})
    choices = answer.json()["choices"]
    assert len(choices) == (2 if chat else 4)
    for choice in choices:
        found = choice["logprobs"]["content"] if chat else choice["logprobs"]["tokens"]
        names = [one["token"] if chat else one for one in found]
        assert names == [f"token_id:{token}" for token in choice["token_ids"]] != []
        values = [one["logprob"] for one in found] if chat else choice["logprobs"]["token_logprobs"]
        assert all(value <= 0 for value in values)
    prompts = [answer.json()] if chat else choices[::2]
    assert all(prompt["prompt_token_ids"] for prompt in prompts)


async def test_a_token_beyond_the_vocabulary_is_refused_by_the_parameter_that_names_it(world: World) -> None:
    async with world.http() as http:
        for name in ("stop_token_ids", "allowed_token_ids"):
            refused(await http.post("/v1/completions", json=TEXT | {name: [5, 400]}), 400, "invalid_parameter", name)


async def test_the_likeliest_of_several_answers_is_returned_and_all_of_them_are_billed(world: World) -> None:
    texts = ["reader dear world", "hello", "hello dear reader"]  # a token is less likely the later it comes
    world.runner.answer = lambda start: world.tokens(texts[start.sampling.choice])
    answer: Any = await world.client().completions.create(**TEXT, best_of=3)
    assert [choice.text for choice in answer.choices] == ["hello"]
    assert answer.choices[0].logprobs is None
    assert answer.usage.completion_tokens == sum(len(world.tokens(text)) for text in texts)


async def test_a_prompt_is_echoed_truncated_or_tokenised_alone_as_the_client_asks(echoing: World) -> None:
    async with echoing.http() as http:
        echo = (await http.post("/v1/completions", json=TEXT | {"echo": True})).json()
        assert echo["choices"][0]["text"] == "hellohello0"
        assert (await http.post("/v1/completions", json=TEXT | {"prompt": ""})).status_code == 200
        last = (
            await http.post("/v1/completions", json=TEXT | {"prompt": "hello dear", "truncate_prompt_tokens": 1})
        ).json()
        assert last["usage"]["prompt_tokens"] == 1
        nothing = await http.post("/v1/completions", json=TEXT | {"truncate_prompt_tokens": 0})
        assert nothing.json()["error"]["param"] == "truncate_prompt_tokens"
        long = TEXT | {"prompt": "dear " * 5000, "truncate_prompt_tokens": -1, "max_tokens": 12}
        assert (await http.post("/v1/completions", json=long)).json()["usage"]["prompt_tokens"] == 500
        plain = TEXT | {"add_special_tokens": False}
        assert (await http.post("/v1/completions", json=plain)).json()["usage"]["prompt_tokens"] == len(
            echoing.tokens("hello")
        )


async def test_a_chat_goes_on_with_its_last_message(world: World) -> None:
    messages = [*HELLO, {"role": "assistant", "content": "dear"}]
    async with world.http() as http:
        body = {"model": "tiny", "messages": messages, "continue_final_message": True}
        assert (await http.post("/v1/chat/completions", json=body)).status_code == 200
        both = body | {"add_generation_prompt": True}
        refused(await http.post("/v1/chat/completions", json=both), 400, "invalid_parameter", "continue_final_message")
    prompt = (await world.runner.next("start")).prompt
    assert world.tokenizer.decode(list(prompt), skip_special_tokens=False) == "<s><|user|>hello</s><|assistant|>dear"


async def test_texts_and_chats_are_tokenised_and_back(world: World) -> None:
    async with world.http() as http:
        text = (await http.post("/tokenize", json=TEXT | {"return_token_strs": True})).json()
        assert text["tokens"] == world.tokenizer.encode("hello").ids
        assert (text["count"], text["max_model_len"]) == (len(text["tokens"]), 512)
        assert text["token_strs"][0] == "<s>"
        bare = (await http.post("/tokenize", json=TEXT | {"add_special_tokens": False})).json()
        assert bare["tokens"] == world.tokens("hello")
        unnamed = {"prompt": "hello", "add_special_tokens": False}  # as lm_eval asks
        assert (await http.post("/tokenize", json=unnamed)).json()["tokens"] == bare["tokens"]
        assert (await http.post("/detokenize", json={"tokens": bare["tokens"]})).json() == {"prompt": "hello"}
        chat = (await http.post("/tokenize", json={"model": "tiny", "messages": HELLO})).json()
        spelled = world.tokenizer.decode(chat["tokens"], skip_special_tokens=False)
        assert spelled == "<s><|user|>hello</s><|assistant|>"
        back = await http.post("/detokenize", json={"model": "acme/upper", "tokens": text["tokens"]})
        assert back.json() == {"prompt": "hello"}
        refused(
            await http.post("/detokenize", json={"model": "tiny", "tokens": [400]}), 400, "invalid_parameter", "tokens"
        )
        refused(await http.post("/tokenize", json={"model": "tiny"}), 400, "missing_parameter", "prompt")
        refused(await http.post("/tokenize", json=TEXT | {"model": "acme/absent"}), 404, "model_not_found", "model")
        info = (await http.get("/tokenizer_info")).json()
        assert "messages" in info["chat_template"]


async def test_probes_and_versions_of_other_servers_are_answered(world: World) -> None:
    async with world.http() as http:
        for path in ("/health", "/ping", "/healthz", "/readyz", "/v1/models"):
            got, head = await http.get(path), await http.head(path)
            assert (head.status_code, head.content) == (200, b""), path
            assert head.headers["content-length"] == str(len(got.content)), path
        assert (await http.post("/ping")).status_code == 200
        assert (await http.get("/load")).json() == {"server_load": 0}
        assert (await http.get("/version")).json()["version"]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"])
async def test_a_slash_at_the_end_of_a_path_changes_no_answer_and_redirects_nobody(world: World, path: str) -> None:
    """Behind a proxy that ends TLS a redirect would name http://."""
    asked = {"model": "tiny", "prompt": "hello"} if path == "/v1/completions" else {"model": "tiny", "messages": HELLO}
    asked |= {"max_tokens": 9} if path == "/v1/messages" else {}
    asked = {"model": "tiny", "input": "hello"} if path == "/v1/responses" else asked
    async with world.http() as http:
        answer = await http.post(f"{path}/", json=asked, headers={"x-forwarded-proto": "https"})
        assert (answer.status_code, answer.json()["model"]) == (200, "tiny")
        beyond = await http.post(f"{path}//", json=asked)
        assert (beyond.status_code in (404, 405), "location" in beyond.headers) == (True, False)
        assert (await http.get("/v1/models/")).json() == (await http.get("/v1/models")).json()


async def test_a_gzip_body_is_unpacked_within_the_bound(parts: World, tmp_path: Path) -> None:
    async with serving(parts, parts.settings(tmp_path, max_body_bytes=2048)) as world, world.http() as http:
        coded = JSON | {"content-encoding": "gzip"}
        packed = gzip.compress(orjson.dumps(TEXT))
        assert (await http.post("/v1/completions", content=packed, headers=coded)).status_code == 200
        bomb = gzip.compress(b" " * 1_000_000)
        assert len(bomb) < 2048
        refused(await http.post("/v1/completions", content=bomb, headers=coded), 413, "request_too_large")
        refused(await http.post("/v1/completions", content=packed[:-1], headers=coded), 400, "invalid_body")
        refused(await http.post("/v1/completions", content=packed + b"x", headers=coded), 400, "invalid_body")
        refused(await http.post("/v1/completions", content=b"{}", headers=coded), 400, "invalid_body")
        other = JSON | {"content-encoding": "br"}
        refused(await http.post("/v1/completions", content=b"{}", headers=other), 415, "unsupported_media_type")


async def test_pages_of_the_origins_that_are_set_may_call_the_api_and_no_others(parts: World, tmp_path: Path) -> None:
    asking = {"access-control-request-method": "POST", "access-control-request-headers": "authorization,content-type"}
    path, app = "/v1/chat/completions", {"origin": "https://app.example.com"}
    async with serving(parts, parts.settings(tmp_path, cors_origins=[app["origin"]])) as world, world.http() as http:
        allowed = await http.options(path, headers=asking | app)
        assert (allowed.status_code, allowed.headers["access-control-allow-origin"]) == (200, app["origin"])
        answer = await http.post(path, json={"model": "tiny", "messages": HELLO}, headers=app)
        assert answer.headers["access-control-allow-origin"] == app["origin"]
        assert {"x-request-id", "weft-ignored"} <= {*answer.headers["access-control-expose-headers"].split(", ")}
        other = await http.options(path, headers=asking | {"origin": "https://other.example.com"})
        assert "access-control-allow-origin" not in other.headers
    async with serving(parts, parts.settings(tmp_path)) as world, world.http() as http:
        assert (await http.options(path, headers=asking | app)).status_code == 405


async def test_every_answer_names_the_weights_that_made_it(world: World) -> None:
    adapter = "sha256:" + "a" * 64
    async with world.http() as http:
        for stream in (False, True):
            for model, digest in (("tiny", world.base_digest), ("acme/upper", adapter)):
                response = await http.post(
                    "/v1/completions", json={"model": model, "prompt": "hello", "stream": stream}
                )
                assert response.headers["x-weft-model-digest"] == digest
                body = response.text.split("\n\n")[0].removeprefix("data: ") if stream else response.text
                assert orjson.loads(body)["system_fingerprint"] == digest[: len("sha256:") + 16]


@pytest.mark.parametrize("asked", [{"prompt": "hello"}, {"messages": HELLO}], ids=["completion", "chat"])
async def test_each_choice_names_the_weights_that_sampled_its_tokens_where_a_client_asks(
    world: World, asked: dict[str, Any]
) -> None:
    """Adapter and base, in the last chunk of a stream. A token without a text counts."""
    adapter = "sha256:" + "a" * 64
    path = "/v1/chat/completions" if "messages" in asked else "/v1/completions"
    world.runner.answer = lambda start: [*world.tokens("hello" * (1 + start.sampling.choice)), 1]
    async with world.http() as http:
        for model, digest in (("tiny", world.base_digest), ("acme/upper", adapter)):
            body = {"model": model, "n": 2, "max_tokens": 9, "return_weight_versions": True, **asked}
            whole = (await http.post(path, json=body)).json()["choices"]
            lines = (await http.post(path, json=body | {"stream": True})).text.split("\n\n")
            events = [orjson.loads(line[6:]) for line in lines if line.startswith("data: {")]
            choices = [choice for event in events for choice in event["choices"]]
            ends = sorted((one for one in choices if one["finish_reason"]), key=lambda one: one["index"])
            about = {"version": digest, "base_version": world.base_digest, "start": 0}
            expected = [[about | {"end": len(world.tokens("hello" * n)) + 1}] for n in (1, 2)]
            assert [choice["weight_versions"] for choice in whole] == expected
            assert [choice["weight_versions"] for choice in ends] == expected
            assert sum("weight_versions" in choice for choice in choices) == 2
