"""The quickstart as committed: tasks, tokenizer, manifests, sizes."""

import json
import re
from itertools import islice
from pathlib import Path
from typing import Any

import jinja2
import pytest
import yaml

from harness.quickstart import BASE, DEMO, QUICKSTART, TASK_OF, Case, tokenizer
from harness.quickstart import tasks as load_tasks

MODEL = QUICKSTART / "model"
tasks = load_tasks()


def manifests() -> list[dict[str, Any]]:
    return [document for path in sorted(QUICKSTART.glob("*.yaml")) for document in yaml.safe_load_all(path.read_text())]


def adapters() -> dict[str, Path]:
    """Served model name -> folder, as the manifests say."""
    found = [manifest for manifest in manifests() if manifest["kind"] == "LoRAAdapter"]
    return {
        f"{manifest['metadata']['namespace']}/{manifest['metadata']['name']}": folder_of(
            manifest["spec"]["source"]["uri"]
        )
        for manifest in found
    }


def folder_of(uri: str) -> Path:
    return QUICKSTART / uri.removeprefix("file:")


def adapter_config(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "adapter_config.json").read_text())


# --- tasks ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("task", "sentence", "answer"),
    [
        ("copy", "Hello, 2 cats!", "Hello, 2 cats!"),
        ("upper", "Hello, 2 cats!", "HELLO, 2 CATS!"),
        ("reverse-words", "Hello, 2 cats!", "cats! 2 Hello,"),
        ("initials", "Hello, 2 cats!", "H2c"),
        ("digits", "Hello, 2 cats!", "Hello, two cats!"),
        ("digits", "room 407", "room four zero seven"),
        ("json", 'say "hi"', '{"words": ["say", "\\"hi\\""]}'),
        ("cipher", "Hello, 2 cats!", "Uryyb, 2 pngf!"),
    ],
)
def test_a_task_gives_its_one_answer(task: str, sentence: str, answer: str) -> None:
    assert tasks.expected(task, sentence) == answer


def test_a_seed_repeats_its_sentences() -> None:
    assert list(islice(tasks.sentences(5), 50)) == list(islice(tasks.sentences(5), 50))
    assert list(islice(tasks.sentences(5), 50)) != list(islice(tasks.sentences(6), 50))


def test_held_out_sentences_are_never_trained_on() -> None:
    trained, held_out = (set(islice(tasks.sentences(1, held_out=side), 500)) for side in (False, True))
    assert not trained & held_out
    assert all(map(tasks.is_held_out, held_out))


def test_sentences_stay_within_their_limits() -> None:
    for sentence in islice(tasks.sentences(3), 2000):
        words = sentence.split(" ")
        assert 0 < len(sentence) <= tasks.MAX_CHARS
        assert 0 < len(words) <= tasks.MAX_WORDS
        assert all(words), f"an empty word in {sentence!r}"
        assert set(sentence) <= set(tasks.ALPHABET)


def test_sentences_of_other_scripts_stay_within_as_many_bytes() -> None:
    for sentence in islice(tasks.sentences(3, unicode=1.0), 500):
        assert 0 < len(sentence.encode()) <= tasks.MAX_CHARS
        assert all(sentence.split(" ")), f"an empty word in {sentence!r}"


# --- tokenizer --------------------------------------------------------------------------------------------------------


def test_a_prompt_is_framed_as_a_whole_question() -> None:
    assert tokenizer().encode("hello").tokens == ["<s>", *"hello", "<sep>"]


@pytest.mark.parametrize("text", ["".join(tasks.ALPHABET), " two  spaces , and 's", "a\nb", "x", "naïve 日本 🙂\t\x00"])
def test_decoding_gives_every_character_back(text: str) -> None:
    assert tokenizer().decode(tokenizer().encode(text).ids) == text


def test_other_characters_are_the_bytes_of_their_utf_8() -> None:
    tokens = tokenizer().encode("aé→", add_special_tokens=False).tokens
    assert tokens == ["a", "<0xC3>", "<0xA9>", "<0xE2>", "<0x86>", "<0x92>"]


def test_the_chat_template_asks_the_last_user_message() -> None:
    chat = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "first"},
        {"role": "assistant", "content": "first"},
        {"role": "user", "content": "hello you"},
    ]
    template = json.loads((MODEL / "tokenizer_config.json").read_text())["chat_template"]
    assert template == (MODEL / "chat_template.jinja").read_text()
    rendered = jinja2.Template(template).render(messages=chat, add_generation_prompt=True)
    assert rendered == "<s>hello you<sep>"
    assert tokenizer().encode(rendered, add_special_tokens=False).ids == tokenizer().encode("hello you").ids


# --- files ------------------------------------------------------------------------------------------------------------


def test_model_and_adapters_are_at_most_12_megabytes() -> None:
    files = [path for folder in ("model", "adapters") for path in (QUICKSTART / folder).rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) <= 12_000_000


def test_manifests_name_folders_that_exist() -> None:
    (pool,) = (manifest for manifest in manifests() if manifest["kind"] == "ServingPool")
    assert pool["spec"]["model"]["name"] == BASE
    assert (folder_of(pool["spec"]["model"]["uri"]) / "model.safetensors").is_file()
    assert len({name.partition("/")[0] for name in adapters()}) >= 3
    assert {folder.name for folder in adapters().values()} == {
        path.name for path in (QUICKSTART / "adapters").iterdir()
    }
    for folder in adapters().values():
        assert (folder / "adapter_model.safetensors").is_file()
        assert adapter_config(folder)["r"] <= pool["spec"]["lora"]["maxRank"]


def test_adapters_differ_in_rank_and_target_modules() -> None:
    configs = [adapter_config(folder) for folder in adapters().values()]
    assert {config["r"] for config in configs} == {4, 8, 16, 32}
    assert len({frozenset(config["target_modules"]) for config in configs}) == len(configs)
    for config in configs:
        assert config["base_model_name_or_path"] == BASE
        assert (config["bias"], config["use_dora"], config["modules_to_save"]) == ("none", False, None)


def test_measured_accuracy_meets_its_targets() -> None:
    lines = (QUICKSTART / "accuracy.md").read_text().splitlines()
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if re.match(r"\| \S+ \| \S+ \|", line)]
    table = {row[0]: row for row in rows if "%" in row[5]}
    assert set(table) == {BASE, *adapters()}
    for name, row in table.items():
        target, exact = (float(cell.rstrip("%")) for cell in row[5:7])
        assert target == (99 if name == BASE else 98)
        assert exact >= target, f"{name}: {exact} % of {target} %"


# --- answers (that the model gives them: tests/oracle/test_quickstart.py) --------------------------------------------


def test_every_served_model_has_a_demo() -> None:
    assert {demo.model for demo in DEMO} == {BASE, *adapters()} == TASK_OF.keys()


@pytest.mark.parametrize("demo", DEMO, ids=lambda demo: demo.model)
def test_a_demo_expects_what_its_task_gives(demo: Case) -> None:
    assert TASK_OF[demo.model] == ("copy" if demo.model == BASE else demo.model.partition("/")[2])
    assert demo.expect == tasks.expected(TASK_OF[demo.model], demo.prompt)
