"""From URI to digest: every bad artifact has its reason, leaves nothing behind and disturbs nobody else."""

import contextlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import numpy as np
import pytest

from tests.unit.artifacts.making import ADAPTER_CONFIG, lora, pack, refused, write_adapter, write_model
from tests.unit.depot.conftest import Bench
from weft.api.chat_template import MAX_INLINE
from weft.artifacts.depot_api import ResolveRequest
from weft.artifacts.digest import digest_of, hex_of
from weft.artifacts.errors import Reason, Refused
from weft.chat_template import MAX_SOURCE, NAMED_FILE, TEMPLATE_FILE
from weft.domain.model.safetensors import MAX_MODEL_HEADER_BYTES, read_header
from weft.telemetry.progress import ByteProgress
from weft_depot.artifact_layout import ArtifactLimits

WEIGHTS = "adapter_model.safetensors"
Q0 = "base_model.model.model.layers.0.self_attn.q_proj"


def test_every_byte_that_is_copied_and_checked_is_counted(bench: Bench) -> None:
    pieces = dict[str, list[int]]()

    class Counted(ByteProgress):
        def add(self, count: int) -> None:
            super().add(count)
            pieces.setdefault(self.now[0], []).append(count)

    request = ResolveRequest(kind="model", uri="file:models/tiny", namespace="default")
    with bench.store.lease() as lease:
        digest = bench.resolver.resolve(request, lease, lambda _: None, lambda: None, Counted()).digest
    manifest = bench.manifest(digest)
    path = bench.store.file(manifest, "model.safetensors")
    with path.open("rb") as file:
        weights = read_header(file, path.stat().st_size, max_bytes=MAX_MODEL_HEADER_BYTES)
    assert sum(pieces["copying"]) == manifest.size_bytes
    assert sum(pieces["checking"]) == sum(tensor.size_bytes for tensor in weights.tensors.values())


def test_a_model_becomes_a_manifest_of_the_files_on_the_list(bench: Bench) -> None:
    digest = bench.base()
    names = [entry.name for entry in bench.manifest(digest).files]
    assert names == ["config.json", "model.safetensors", "tokenizer.json"], "README.md is not taken"
    assert bench.verdicts == [
        {
            "architecture": "LlamaForCausalLM",
            "hiddenSize": 16,
            "layers": 2,
            "vocabSize": 32,
            "maxContext": 64,
            "sizeBytes": bench.manifest(digest).size_bytes,
            "dtype": "float32",
            "chatTemplate": {"from": "None"},
        }
    ]
    bench.check()


def test_an_adapter_becomes_a_manifest_and_a_verdict(bench: Bench) -> None:
    digest = bench.resolve("file:adapters/upper", maxRank=8)
    manifest = bench.manifest(digest)
    assert [entry.name for entry in manifest.files] == ["adapter_config.json", WEIGHTS]
    source = bench.root / "adapters" / "upper"
    assert bench.store.file(manifest, WEIGHTS).read_bytes() == (source / WEIGHTS).read_bytes()
    assert bench.verdicts == [
        {
            "rank": 4,
            "alpha": 8.0,
            "targetModules": ["q_proj", "v_proj"],
            "sizeBytes": manifest.size_bytes,
            "dtype": "float32",
            "baseModel": "some/where/tiny",
            "chatTemplate": {"from": "Base"},
        }
    ]
    bench.check()


def test_a_verdict_says_where_answers_end_how_they_are_sampled_and_what_is_not_used(bench: Bench) -> None:
    base, folder = bench.root / "models" / "tiny", bench.root / "adapters" / "upper"
    tokens = [{"id": 3, "content": "</s>"}, {"id": 5, "content": "<|im_end|>"}]
    (base / "tokenizer.json").write_text(json.dumps({"added_tokens": tokens}))
    (base / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    (base / "generation_config.json").write_text('{"eos_token_id": 4, "top_p": 0.5, "max_new_tokens": 9, "top_k": "x"}')
    (folder / "tokenizer_config.json").write_text('{"eos_token": "<|im_end|>"}')
    bench.base()
    (verdict,) = bench.verdicts
    assert (verdict["eosTokenIds"], verdict["generationDefaults"]) == ([3, 4], {"topP": 0.5, "maxTokens": 9})
    assert [warning.partition(",")[0] for warning in verdict["warnings"]] == ["generation_config.json: top_k is 'x'"]
    for text, found, warned in (("<|im_end|>", [5], ()), ("<|eot|>", None, ("'<|eot|>' is no token of the base",))):
        (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": text}))
        digest = bench.resolve("file:adapters/upper")
        assert "tokenizer_config.json" in [entry.name for entry in bench.manifest(digest).files]
        (verdict,) = bench.verdicts
        assert verdict.get("eosTokenIds") == found
        assert (
            tuple(warning.split(" eos_token ")[1].partition(":")[0] for warning in verdict.get("warnings", ()))
            == warned
        )
    edit_config(_note="monday")(folder)
    bench.resolve("file:adapters/upper")
    assert len(bench.verdicts[0]["warnings"]) == 2, "of its configuration, and of its tokenizer"
    bench.check()


@pytest.mark.parametrize(
    ("name", "content", "fault"),
    [
        ("chat_template.jinja", "{{ messages[0].content }}", ""),
        ("chat_template.jinja", "{{ raise_exception('two messages, please') }}", ""),
        ("chat_template.jinja", "{% if %}", "line 1"),
        ("chat_template.jinja", "{{ messages.absent.deeper }}", "no attribute"),
        ("chat_template.jinja", "{% for i in range(900) %}{% for k in range(900) %}{% endfor %}{% endfor %}", "steps"),
        ("tokenizer_config.json", '{"chat_template": "{{ bos_token }}"}', ""),
        ("tokenizer_config.json", '{"chat_template": [{"name": "rag", "template": ""}]}', "none is named default"),
        ("tokenizer_config.json", '{"chat_template": 3}', "neither a text nor"),
        (NAMED_FILE, "", "none is named default"),
    ],
)
def test_a_chat_template_is_checked_where_it_is_taken(bench: Bench, name: str, content: str, fault: str) -> None:
    for owner, folder in (("Base", "models/tiny"), ("Adapter", "adapters/upper")):
        path = bench.root / folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(content)
        digest = bench.base() if owner == "Base" else bench.resolve(f"file:{folder}")
        found = bench.verdicts[-1]["chatTemplate"]
        assert (found["from"], fault in found.get("fault", ""), "fault" in found) == (owner, True, bool(fault)), found
        assert name in [entry.name for entry in bench.manifest(digest).files]
    bench.check()


def test_a_token_that_an_adapters_template_writes_is_one_of_the_base_or_there_is_a_warning(bench: Bench) -> None:
    tokens = [{"id": 3, "content": "<s>"}, {"id": 5, "content": "<|im_end|>"}]
    (bench.root / "models" / "tiny" / "tokenizer.json").write_text(json.dumps({"added_tokens": tokens}))
    bench.base()
    added = {"3": "<s>", "6": "<|im_end|>", "7": "<|im_start|>", "8": "<|unused|>", "9": "<pad>"}
    config = {
        "added_tokens_decoder": {token: {"content": text} for token, text in added.items()},
        "bos_token": "<s>",
        "eos_token": "<eos>",
        "pad_token": "<pad>",
        "chat_template": "{{ bos_token }}{{ eos_token }}<|im_start|>{{ messages[0].content }}<|im_end|>",
    }
    (bench.root / "adapters" / "upper" / "tokenizer_config.json").write_text(json.dumps(config))
    bench.resolve("file:adapters/upper")
    (verdict,) = bench.verdicts
    *_, first, second, third, more = verdict["warnings"]
    written = [warning.partition(" writes ")[2].partition(",")[0] for warning in (first, second, third)]
    assert written == ["'<eos>'", "'<|im_end|>'", "'<|im_start|>'"], "beside what is said of the end"
    assert "ids: '<|unused|>';" in more, "a prompt may write it; none has the padding"
    bench.check()


def test_a_chat_template_alone_is_an_artifact(bench: Bench) -> None:
    (bench.root / "models" / "tiny" / "tokenizer_config.json").write_text('{"bos_token": "<s>"}')
    (bench.root / "models" / "tiny" / NAMED_FILE).parent.mkdir()
    (bench.root / "models" / "tiny" / NAMED_FILE).write_text("{% if %}")
    base = {"digest": bench.base()}
    for text, fault in (
        ("{{ bos_token + messages[0].content }}", ""),
        ("{% if %}", "line 1 of the chat template"),
        ("{% for i in range(900) %}{% for k in range(900) %}{% endfor %}{% endfor %}", "steps"),
    ):
        for _ in range(2):
            digest = bench.resolve("inline:", "template", text=text, base=base)
            assert bench.verdicts == [{"from": "Inline", **({"fault": ANY} if fault else {})}]
            assert fault in bench.verdicts[0].get("fault", "")
            (entry,) = bench.manifest(digest).files
            assert (entry.name, bench.store.read(entry.digest, max_bytes=100).decode()) == (TEMPLATE_FILE, text)
            assert bench.resolver.watches.changed([bench.resolved.watch or ""]) == []
    bench.store.retain([base["digest"]])
    assert bench.resolver.watches.changed([digest]) == [digest]
    bench.check()


def test_a_depot_without_rights_reads_no_config_map(bench: Bench) -> None:
    base = {"digest": bench.base()}
    with pytest.raises(Refused, match="from: Inline") as caught:
        bench.resolve("configmap:chat", "template", base=base)
    assert caught.value.reason == Reason.CONFIG_MAP_FORBIDDEN


@pytest.mark.parametrize(
    "wrong",
    [
        {"base": None},
        {"text": None},
        {"uri": "file:adapters/upper"},
        {"uri": "configmap:chat"},
        {"kind": "adapter"},
        {"text": "a" * (MAX_SOURCE + 1)},
        {"version": "v1"},
    ],
)
def test_a_request_for_a_template_has_all_that_it_needs_and_no_more(wrong: dict[str, Any]) -> None:
    assert MAX_INLINE == MAX_SOURCE
    whole = {
        "kind": "template",
        "uri": "inline:",
        "text": "a",
        "namespace": "team",
        "base": {"digest": f"sha256:{0:064}"},
    }
    assert len(ResolveRequest.parse(json.dumps({**whole, "text": "a" * MAX_SOURCE}).encode()).key) < 1000, (
        "many are remembered"
    )
    with pytest.raises(ValueError, match=r"template|text|version"):
        ResolveRequest.parse(json.dumps({**whole, **wrong}).encode())


TRAINERS_STATE = "training_args.bin optimizer.pt scheduler.pt rng_state_0.pth trainer_state.json README.md".split()
CHAT = {
    "tokenizer_config.json": '{"eos_token": "<|im_end|>", "added_tokens_decoder": {"5": {"content": "<|im_end|>"}}}',
    "special_tokens_map.json": '{"eos_token": {"content": "<|im_end|>", "special": true}}',
    "chat_template.jinja": "{{ messages[0].content }}<|im_end|>",
}
QV = r"^(model(?=\.).*\.(v_proj|q_proj))$"
WRITTEN: dict[str, tuple[dict[str, Any], dict[str, str], list[str]]] = {
    "unsloth": (
        {"base_model_name_or_path": "unsloth/tiny-unsloth-bnb-4bit", "auto_mapping": {"unsloth_fixed": True}},
        {**CHAT, "tokenizer.json": "{}", "added_tokens.json": '{"<|im_end|>": 5}', "tokenizer.model": ""},
        ["trained on 'unsloth/tiny-unsloth-bnb-4bit', taken for tiny"],
    ),
    "axolotl": (
        {"loftq_config": {}, "target_modules": ["v_proj", "q_proj"]},
        {**dict.fromkeys(TRAINERS_STATE, ""), "config.json": "{}", "generation_config.json": "{", "debug.log": "",
         "checkpoint-9/adapter_model.safetensors": "", "checkpoint-9/optimizer.pt": ""},
        [],
    ),
    "LLaMA-Factory": (
        {"base_model_name_or_path": "/mnt/models/base"},
        {**CHAT, **dict.fromkeys(TRAINERS_STATE, ""), "training_loss.png": "", "global_step9/zero_pp_rank_0.pt": "",
         "latest": "global_step9", "zero_to_fp32.py": "raise"},
        ["trained on '/mnt/models/base', a folder without a model's name: taken for the base by its shapes"],
    ),
    "ms-swift": (
        {"base_model_name_or_path": "/root/.cache/modelscope/hub/models/org/tiny", "target_modules": QV,
         "modules_to_save": []},
        {**dict.fromkeys(TRAINERS_STATE, ""), "additional_config.json": '{"lora_dtype": null}', "args.json": "{}"},
        [],
    ),
    "TRL": ({}, {**CHAT, "runs/events.out": "", "adapter_model.bin": "", "training_args.bin": ""}, []),
}  # fmt: skip


@pytest.mark.parametrize("trainer", WRITTEN)
def test_a_folder_is_taken_as_training_writes_it(bench: Bench, trainer: str) -> None:
    config, beside, warnings = WRITTEN[trainer]
    tokens = [{"id": 5, "content": "<|im_end|>"}]
    (bench.root / "models" / "tiny" / "tokenizer.json").write_text(json.dumps({"added_tokens": tokens}))
    folder = write_adapter(bench.root / "out", config=config)
    for name, content in beside.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(content)
    names = [entry.name for entry in bench.manifest(bench.resolve("file:out")).files]
    assert names == sorted(["adapter_config.json", WEIGHTS, *(CHAT if "chat_template.jinja" in beside else ())])
    (verdict,) = bench.verdicts
    assert verdict.get("warnings", []) == warnings
    assert verdict.get("eosTokenIds") == ([5] if "chat_template.jinja" in beside else None)
    bench.check()


@pytest.mark.parametrize(
    ("files", "reason", "says"),
    [
        (("training_args.bin", "checkpoint-9/adapter_config.json"), Reason.MISSING_FILE, "for example checkpoint-500"),
        (
            ("adapter_config.json", "adapters.safetensors", "0000100_adapters.safetensors"),
            Reason.MISSING_FILE,
            "mlx-lm",
        ),
        (("adapter_config.json", "adapter_model-00001-of-00002.safetensors"), Reason.MISSING_FILE, "shards"),
        (("adapter_config.json", "adapter_model.bin", *TRAINERS_STATE), Reason.UNSAFE_FORMAT, "adapter_model.bin is a"),
        (("adapter_config.json", *TRAINERS_STATE), Reason.MISSING_FILE, "adapter_model.safetensors is not there"),
    ],
)
def test_a_folder_that_is_no_adapter_is_refused_by_what_is_in_it(
    bench: Bench, files: tuple[str, ...], reason: Reason, says: str
) -> None:
    for name in files:
        (bench.root / "out" / name).parent.mkdir(parents=True, exist_ok=True)
        (bench.root / "out" / name).write_text("{}")
    with pytest.raises(Refused, match=says) as caught:
        bench.resolve("file:out")
    assert caught.value.reason == reason


def test_equal_contents_have_one_digest_wherever_they_are(bench: Bench) -> None:
    shutil.copytree(bench.root / "adapters" / "upper", bench.root / "copy")
    (bench.root / "copy" / "notes.txt").write_text("not part of it")
    assert bench.resolve("file:copy") == bench.resolve("file:adapters/upper")


def test_weights_that_are_published_twice_are_taken_once(bench: Bench) -> None:
    """Mistral's repositories hold `consolidated.safetensors` beside the shards: other names for the same weights."""
    digest = bench.base()
    (bench.root / "models" / "tiny" / "consolidated.safetensors").write_bytes(pack(lora()))
    assert bench.base() == digest


def test_a_sharded_model_is_taken_with_its_index(bench: Bench) -> None:
    write_model(bench.root / "sharded", shards=3)
    names = [entry.name for entry in bench.manifest(bench.resolve("file:sharded", "model")).files]
    assert len([name for name in names if name.endswith(".safetensors")]) == 3
    assert "model.safetensors.index.json" in names


def edit_config(**change: Any) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        (folder / "adapter_config.json").write_text(json.dumps({**ADAPTER_CONFIG, **change}))

    return edit


def edit_weights(raw: bytes) -> Callable[[Path], None]:
    return lambda folder: (folder / WEIGHTS).write_bytes(raw) and None


def with_tensor(name: str, dtype: str, values: Any) -> bytes:
    return pack(lora() | {name: (dtype, np.asarray(values))})


NAN = np.full((4, 16), np.nan)
# What is wrong with an adapter in detail is in unit/domain and unit/artifacts: here is one of each place that notices.
BAD: dict[str, tuple[Callable[[Path], None], Reason]] = {
    "weights missing": (lambda f: (f / WEIGHTS).unlink(), Reason.MISSING_FILE),
    "only a .bin": (lambda f: (f / WEIGHTS).rename(f / "adapter_model.bin") and None, Reason.UNSAFE_FORMAT),
    "truncated header": (edit_weights(pack(lora())[:100]), Reason.HEADER_TRUNCATED),
    "config is no JSON": (lambda f: (f / "adapter_config.json").write_text("{") and None, Reason.CONFIG_INVALID),
    "rank above the pool's": (edit_weights(pack(lora(rank=16))), Reason.RANK_TOO_LARGE),
    "another base": (edit_config(base_model_name_or_path="org/other"), Reason.BASE_MISMATCH),
    "another shape": (edit_weights(with_tensor(f"{Q0}.lora_A.weight", "F32", np.ones((4, 17)))), Reason.SHAPE_MISMATCH),
    "NaN in float32": (edit_weights(with_tensor(f"{Q0}.lora_A.weight", "F32", NAN)), Reason.NOT_FINITE),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_adapter_has_its_reason_and_nothing_else_is_disturbed(bench: Bench, case: str) -> None:
    spoil, reason = BAD[case]
    good = bench.resolve("file:adapters/upper")
    before = bench.blobs()
    folder = write_adapter(bench.root / "bad")
    if case == "rank above the pool's":
        edit_config(r=16)(folder)
    spoil(folder)
    with refused(reason):
        bench.resolve("file:bad", maxRank=8)
    assert bench.blobs() == before
    bench.check()
    assert bench.resolve("file:adapters/upper") == good
    seen_whole = reason == Reason.NOT_FINITE
    assert len(bench.verdicts) == 1
    with pytest.raises(Refused):
        bench.resolve("file:bad", maxRank=8)
    assert bool(bench.verdicts) == seen_whole, "only what fails after the headers had a verdict"


BAD_MODELS: dict[str, tuple[Callable[[Path], object], Reason]] = {
    "no config": (lambda f: (f / "config.json").unlink(), Reason.MISSING_FILE),
    "no tokenizer": (lambda f: (f / "tokenizer.json").unlink(), Reason.MISSING_FILE),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), Reason.MISSING_FILE),
    "pickle only": (lambda f: (f / "model.safetensors").rename(f / "pytorch_model.bin"), Reason.UNSAFE_FORMAT),
    "another architecture": (
        lambda f: write_model(f, config={"architectures": ["GPT2LMHeadModel"]}),
        Reason.UNSUPPORTED_MODEL,
    ),
    "sizes that are not the weights'": (lambda f: write_model(f, config={"hidden_size": 32}), Reason.SHAPE_MISMATCH),
    "broken tokenizer": (lambda f: (f / "tokenizer.json").write_text("{"), Reason.CONFIG_INVALID),
    "index names a missing shard": (
        lambda f: (f / "model.safetensors.index.json").write_text('{"weight_map": {"a": "gone.safetensors"}}'),
        Reason.MISSING_FILE,
    ),
    "index disagrees": (
        lambda f: (f / "model.safetensors.index.json").write_text('{"weight_map": {"a": "model.safetensors"}}'),
        Reason.CONFIG_INVALID,
    ),
}


@pytest.mark.parametrize("case", BAD_MODELS)
def test_a_bad_model_has_its_reason(bench: Bench, case: str) -> None:
    spoil, reason = BAD_MODELS[case]
    spoil(write_model(bench.root / "bad"))
    with refused(reason):
        bench.resolve("file:bad", "model")
    assert bench.blobs() == set()
    bench.check()


def test_an_adapter_needs_a_base_that_is_here(bench: Bench) -> None:
    with refused(Reason.SOURCE_NOT_FOUND):
        bench.resolve("file:adapters/upper", base={"digest": digest_of(b"?"), "name": "tiny"})
    with refused(Reason.BASE_MISMATCH):
        bench.resolve("file:adapters/upper", base=None)


def test_the_base_goes_by_its_name_its_aliases_and_the_uris_it_came_from(bench: Bench) -> None:
    edit_config(base_model_name_or_path="org/Tiny-bnb-4bit")(bench.root / "adapters" / "upper")
    base = bench.base()
    with pytest.raises(Refused):
        bench.resolve("file:adapters/upper", base={"digest": base, "name": "small"})
    bench.resolve("file:adapters/upper", base={"digest": base, "name": "small", "aliases": ["file:m/tiny"]})
    assert bench.verdicts[0]["warnings"] == ["trained on 'org/Tiny-bnb-4bit', taken for small / tiny"]
    bench.resolve("file:adapters/upper", base={"digest": base})
    bench.at_rest()
    bench.base()
    bench.resolve("file:adapters/upper", base={"digest": base, "name": "small"})


@pytest.mark.parametrize("scheme", ["hf:org/model", "s3:bucket/x", "http://169.254.169.254/"])
def test_another_scheme_is_not_allowed(bench: Bench, scheme: str) -> None:
    with refused(Reason.SCHEME_NOT_ALLOWED):
        bench.resolve(scheme, "model")


def test_a_named_digest_must_be_the_contents(bench: Bench) -> None:
    digest = bench.resolve("file:adapters/upper")
    assert bench.resolve("file:adapters/upper", digest=digest) == digest
    bench.store.retain([bench.base()])
    before = bench.blobs()
    with refused(Reason.DIGEST_MISMATCH):
        bench.resolve("file:adapters/upper", digest=digest_of(b"else"))
    assert bench.blobs() == before


def test_what_is_too_large_is_refused_before_it_is_copied(bench: Bench) -> None:
    bench.limits = ArtifactLimits(adapter_bytes=100)
    bench.open()
    with refused(Reason.TOO_LARGE):
        bench.resolve("file:adapters/upper")


def test_an_unchanged_source_is_not_read_again_even_by_a_new_process(bench: Bench) -> None:
    bench.at_rest()
    digest = bench.resolve("file:adapters/upper")
    bench.open()

    def unexpected() -> None:
        raise AssertionError("the content was read")

    assert bench.resolve("file:adapters/upper", check_cancelled=unexpected) == digest
    assert bench.verdicts[0]["rank"] == 4
    with refused(Reason.RANK_TOO_LARGE):  # a remembered source is still judged against this request
        bench.resolve("file:adapters/upper", check_cancelled=unexpected, maxRank=2)


def test_a_young_source_is_read_again(bench: Bench) -> None:
    read: list[int] = []
    for _ in range(2):
        bench.resolve("file:adapters/upper", check_cancelled=lambda: read.append(1))
    assert len(read) >= 4


def test_an_edited_source_gets_a_new_digest(bench: Bench) -> None:
    bench.at_rest()
    before = bench.resolve("file:adapters/upper")
    edit_config(lora_alpha=16)(bench.root / "adapters" / "upper")
    after = bench.resolve("file:adapters/upper")
    assert after != before
    assert bench.store.holds(before)


def test_a_remembered_source_whose_blobs_are_gone_is_read_again(bench: Bench) -> None:
    bench.at_rest()
    digest = bench.resolve("file:adapters/upper")
    bench.store.path(bench.manifest(digest).file(WEIGHTS).digest).unlink()
    assert bench.resolve("file:adapters/upper") == digest
    assert bench.store.holds(digest)


def test_a_remembered_source_whose_manifest_is_damaged_is_read_again(bench: Bench) -> None:
    bench.at_rest()
    digest = bench.resolve("file:adapters/upper")
    whole = bench.store.path(digest).read_bytes()
    for damaged in (whole[:-1], whole.replace(b"adapter", b"adaptes", 1)):
        bench.store.path(digest).write_bytes(damaged)
        assert bench.resolve("file:adapters/upper") == digest
        bench.check()


@pytest.mark.parametrize("damage", [b"", b"{", b"[]", b'{"kind": "model"}', b"\xff"])
def test_a_damaged_memory_costs_a_reading_and_no_more(bench: Bench, damage: bytes) -> None:
    bench.at_rest()
    digest = bench.resolve("file:adapters/upper")
    for path in (bench.folder / "data" / "resolved").iterdir():
        path.write_bytes(damage)
    bench.open()
    assert bench.resolve("file:adapters/upper") == digest


class Meddler:
    """Edits the source in the middle of the copy, `times` times."""

    def __init__(self, folder: Path, times: int) -> None:
        self._folder, self.left = folder, times

    def __call__(self) -> None:
        if self.left:
            self.left -= 1
            write_adapter(self._folder, config={"lora_alpha": 100 + self.left}, tensors=lora())


def test_a_source_that_changes_once_while_it_is_copied_is_read_again_whole(bench: Bench) -> None:
    bench.base()
    digest = bench.resolve("file:adapters/upper", check_cancelled=Meddler(bench.root / "adapters" / "upper", 1))
    config = json.loads(bench.store.file(bench.manifest(digest), "adapter_config.json").read_text())
    assert config["lora_alpha"] == 100
    assert len(bench.verdicts) == 1
    bench.check()


def test_a_source_that_keeps_changing_is_refused_and_never_served_half_and_half(bench: Bench) -> None:
    bench.base()
    before = bench.blobs()
    with refused(Reason.DIGEST_MISMATCH):
        bench.resolve("file:adapters/upper", check_cancelled=Meddler(bench.root / "adapters" / "upper", 100))
    assert bench.blobs() == before
    bench.check()


def test_a_source_whose_files_get_and_lose_links_all_the_time_is_what_it_is(bench: Bench) -> None:
    """Another name of a file is no other content, though its ctime tells of both."""
    weights = bench.root / "adapters" / "upper" / WEIGHTS
    digest = bench.resolve("file:adapters/upper")

    def link() -> None:
        (other := weights.with_name("another name")).hardlink_to(weights)
        other.unlink()

    assert bench.resolve("file:adapters/upper", check_cancelled=link) == digest
    weights.write_bytes(with_tensor(f"{Q0}.lora_A.weight", "F32", NAN))
    with refused(Reason.NOT_FINITE):
        bench.resolve("file:adapters/upper", check_cancelled=link)
    bench.check()


def test_a_source_that_is_replaced_by_renames_while_it_is_copied_is_noticed(bench: Bench) -> None:
    """The editor's way: new files under old names. Size, content and even times may be equal; the inode is not."""
    base = bench.base()
    folder, spare = bench.root / "adapters" / "upper", bench.root / "spare"
    write_adapter(spare, config={"lora_alpha": 9})
    swapped: list[int] = []

    def swap() -> None:
        if not swapped:
            swapped.append(1)
            for name in ("adapter_config.json", WEIGHTS):
                (spare / name).replace(folder / name)

    digest = bench.resolve("file:adapters/upper", check_cancelled=swap, base={"digest": base})
    assert json.loads(bench.store.file(bench.manifest(digest), "adapter_config.json").read_text())["lora_alpha"] == 9


class Killed(BaseException):
    """The end of a process that was killed at this point."""


@pytest.mark.parametrize("at", range(6))
def test_a_resolve_killed_anywhere_leaves_whole_blobs_or_none(bench: Bench, at: int) -> None:
    base, ticks = bench.base(), [0]

    def kill() -> None:
        ticks[0] += 1
        if ticks[0] > at:
            raise Killed

    with contextlib.suppress(Killed):  # at the last point the resolve has already ended
        bench.resolve("file:adapters/upper", check_cancelled=kill, base={"digest": base})
    bench.open()
    bench.check()
    assert bench.store.holds(bench.resolve("file:adapters/upper"))
    assert hex_of(base) in bench.blobs()
