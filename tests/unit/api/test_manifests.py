"""Manifests: files and folders in, objects or every problem at once out; YAML bombs stay small."""

import json
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from harness.costs import lines_of, traced_calls
from harness.manifests import load_text
from harness.quickstart import QUICKSTART
from weft.api.loraadapter import LoRAAdapter
from weft.api.manifests import MAX_PROBLEMS, ManifestError, load, parse_object
from weft.api.servingpool import ServingPool
from weft.api.yaml_documents import MAX_DEPTH, BadYaml, documents

POOL = """
apiVersion: serving.weft.dev/v1alpha1
kind: ServingPool
metadata: {name: tiny}
spec: {model: {uri: "file:models/tiny"}}
"""
ADAPTER = """
apiVersion: serving.weft.dev/v1alpha1
kind: LoRAAdapter
metadata: {name: upper, namespace: acme}
spec:
  poolRef: {name: tiny}
  source: {uri: "file:adapters/upper"}
"""


def problems(text: str) -> list[str]:
    with pytest.raises(ManifestError) as caught:
        load_text(text, name="m.yaml")
    return [str(problem) for problem in caught.value.problems]


def test_several_documents_are_read_in_order_and_empty_ones_are_nothing() -> None:
    found = load_text(f"---\n{POOL}---\n---\n# comment\n---{ADAPTER}...\n", namespace="here")
    assert [(type(o), o.key) for o in found] == [(ServingPool, "here/tiny"), (LoRAAdapter, "acme/upper")]
    assert load_text("") == []


def test_files_and_folders_are_read_sorted_without_subfolders(tmp_path: Path) -> None:
    (tmp_path / "b.yaml").write_text(ADAPTER)
    (tmp_path / "a.yml").write_text(POOL)
    (tmp_path / "notes.txt").write_text("not yaml: [")
    (tmp_path / "below").mkdir()
    (tmp_path / "below" / "c.yaml").write_text("broken: [")
    assert [o.key for o in load([tmp_path])] == ["default/tiny", "acme/upper"]
    assert [o.key for o in load([tmp_path / "b.yaml", str(tmp_path / "a.yml")])] == ["acme/upper", "default/tiny"]


def test_all_problems_of_all_files_come_at_once_with_their_places(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(POOL.replace("spec: {", "spec: {replicas: -1, lora: {maxrank: 1}, "))
    (tmp_path / "b.yaml").write_text(f"{ADAPTER}---\n{ADAPTER.replace('upper, name', 'low er, name')}")
    with pytest.raises(ManifestError) as caught:
        load([tmp_path, tmp_path / "gone.yaml"])
    assert [(Path(p.file).name, p.document, p.object, p.field) for p in caught.value.problems] == [
        ("a.yaml", 1, "ServingPool tiny", "spec.replicas"),
        ("a.yaml", 1, "ServingPool tiny", "spec.lora.maxrank"),
        ("b.yaml", 2, "LoRAAdapter low er", "metadata.name"),
        ("gone.yaml", 0, "", ""),
    ]
    lines = str(caught.value).splitlines()
    assert lines[1].endswith(
        "a.yaml, document 1, ServingPool tiny, spec.lora.maxrank: unknown field 'maxrank'; did you mean 'maxRank'?"
    )


URIS = "file:PATH, pvc:CLAIM/PATH, hf:ORG/NAME, s3://BUCKET/PREFIX, oci://HOST/REPOSITORY:TAG, https://HOST/FOLDER"
TWICE = "ServingPool default/tiny is there twice; the first is in m.yaml, document 1"
LAYERS = "\n".join(f"a{n}: &a{n} {'[' * 30}{f'*a{n - 1}' if n else 'x'}{']' * 30}" for n in range(20))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (POOL.replace("ServingPool", "ServingPol"), "1, kind: unknown kind 'ServingPol'; did you mean 'ServingPool'?"),
        (POOL.replace("v1alpha1", "v2"), "it has to be 'serving.weft.dev/v1alpha1'"),
        ("a: 1", "m.yaml, document 1, apiVersion: is 'None'"),
        ("apiVersion: v1\nkind: Secret\nmetadata: {name: s}\n", "apiVersion"),
        (POOL.replace("ServingPool", "Deployment"), "unknown kind 'Deployment'; there are: LoRAAdapter, ServingPool"),
        (
            POOL.replace("file:models/tiny", "/models/tiny"),
            f"1, ServingPool tiny, spec.model.uri: write {URIS} or depot:sha256:...; it is '/models/tiny'",
        ),
        (f"{POOL}---{POOL}", f"2, metadata.name: {TWICE}"),
        *((text, "not a mapping") for text in ("- a", "just words", "5", "[]")),
        ("a: \ud800", "no valid YAML"),
        (f"{POOL}---\na: [\n", "line"),
        (f"{POOL}---\na: [\n", "m.yaml, document 2: "),
        (POOL + "kind: LoRAAdapter\n", "1: the key 'kind' is there twice (line 6)"),
        *((text, "a key is not a plain scalar") for text in ("? [a]\n: b", "? {a: b}\n: c")),
        (LAYERS, f"1: nested deeper than {MAX_DEPTH}"),  # aliases nest no deeper than brackets do
    ],
)
def test_what_is_wrong_is_said_once_with_its_place(text: str, says: str) -> None:
    (problem,) = problems(text)
    assert problem == f"m.yaml, document {says}" if says[0] in "12" else says in problem


def test_two_namespaces_may_have_an_object_of_one_name() -> None:
    assert len(load_text(f"{POOL}---{POOL.replace('{name: tiny}', '{name: tiny, namespace: other}')}")) == 2


@pytest.mark.parametrize(
    "text",
    [
        "a: [", "a: b: c", "\t- x", "a: !!python/object/apply:os.system ['true']", "a: !evil x", "a: !!binary eA==",
        "a: !!set {a}", "*nowhere", "a: \x01",
    ],
)  # fmt: skip
def test_what_is_no_plain_yaml_is_a_problem(text: str) -> None:
    (problem,) = problems(text)
    assert problem.startswith("m.yaml, document 1: no valid YAML: ")


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ("9" * 6000, "is no int"), ("0x" + "f" * 9000, "is no int"), ("0x" + "f" * 17, "beyond 64 bits"),
        ("1" + ":1" * 400_000, "is no int"), (".inf", "is not a JSON number"),
        ("1" + ":1" * 3000 + ".0", "is no float"), ("2020-13-45", "is no timestamp: month must be in 1..12"),
        ("2020-01-01T99:00:00Z", "is no timestamp"), ("!!bool maybe", "is no bool"),
        ("!!timestamp soon", "is no timestamp"), ("0x_", "is no int"),
    ],
)  # fmt: skip
def test_a_scalar_that_is_no_value_is_a_problem_with_its_line(value: str, says: str) -> None:
    text = POOL.replace("model: {", f"lora: {{maxRank: {value}}}, model: {{")
    (problem,) = problems(f"{POOL}---\n{text}")
    assert says in problem
    assert problem.startswith("m.yaml, document 2: ")
    assert problem.endswith("(line 11)")
    assert len(problem) < 300


def test_a_problem_never_steers_a_terminal() -> None:
    (problem,) = problems(POOL + '"\\e[2J": 1\n')
    assert problem.isprintable()


def test_anchors_and_merges_within_reason_work() -> None:
    text = POOL.replace(
        'spec: {model: {uri: "file:models/tiny"}}',
        "spec:\n  model: &m {uri: 'file:models/tiny'}\n  lora: &l {maxRank: 8}\n  advanced: {<<: {kvPages: 9}}",
    )
    (found,) = load_text(text)
    assert isinstance(found, ServingPool)
    assert found.spec.advanced.kv_pages == 9


BOMB = "a0: &a0 [x,x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"a{n}: &a{n} [{','.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 12)
)
MERGE_BOMB = "a0: &a0 {x: 1}\n" + "".join(
    f"a{n}: &a{n} {{<<: [{','.join([f'*a{n - 1}'] * 9)}]}}\n" for n in range(1, 12)
)


BYTES_BOMB = f"a: &a {'x' * 20_000}\napiVersion: [{','.join(['*a'] * 15_000)}]\n"
SMALL_BOMB = "".join(f"a{n}: &a{n} [{','.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 4)).replace("*a0", "x")
MANY_BOMBS = f"---\n{SMALL_BOMB}apiVersion: [{','.join(['*a3'] * 9)}]\n" * 2_000
UNKNOWN_FIELDS = POOL.replace("spec: {", "spec: {" + "".join(f"field{n}: 1, " for n in range(19_000)))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (BOMB, "aliases followed"),
        (MERGE_BOMB, "aliases followed"),
        (BYTES_BOMB, "characters, aliases followed"),
        ("- [1, 2, 3]\n" * 400_000, "more than 20000 values"),
        ("a: &a [*a]", "refers to a node that contains it"),
        ("[" * 5000, "nested deeper"),
        ("{a: " * 5000, "nested deeper"),
        ("- " * 5000 + "a", "nested deeper"),
        ("---\n" * 20_001, "more than 20000 documents"),
        (f"a: [{'1,' * 20_000}]", "more than 20000 values"),
    ],
)
def test_yaml_that_would_grow_is_refused_small(text: str, says: str) -> None:
    (problem,), calls = traced_calls(lambda: problems(text))
    assert says in problem
    assert calls < 500_000


@pytest.mark.parametrize(
    ("bound", "most"),
    [
        ("MAX_TEXT_NODES", 4), ("MAX_TEXT_CHARS", 2), ("MAX_NODES", 2), ("MAX_CHARS", 1), ("MAX_DEPTH", 1),
        ("MAX_DOCUMENTS", 2), ("MAX_SPECIAL_CHARS", 1), ("MAX_INTEGER_BITS", 3),
    ],
)  # fmt: skip
def test_a_text_is_taken_up_to_each_bound(bound: str, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"weft.api.yaml_documents.{bound}", most)
    assert list(documents("[7]\n---\n[7]\n")) == [[7], [7]]
    monkeypatch.setattr(f"weft.api.yaml_documents.{bound}", most - 1)
    with pytest.raises(BadYaml):
        list(documents("[7]\n---\n[7]\n"))


def test_a_report_says_that_there_are_more_problems_only_where_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weft.api.manifests.MAX_PROBLEMS", 2)
    assert len(problems("---\na: 1\n" * 2)) == 2
    *_, last = problems("---\na: 1\n" * 3)
    assert last == "m.yaml: there are more problems"


def test_a_file_that_is_too_large_or_no_text_is_a_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weft.api.manifests.MAX_FILE_BYTES", len(POOL))
    (tmp_path / "large.yaml").write_text(f"{POOL}#")
    (tmp_path / "small.yaml").write_text(POOL)
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ManifestError) as caught:
        load([tmp_path, tmp_path / "empty"])
    assert [(problem.document, problem.message.split(";")[0].split(":")[0]) for problem in caught.value.problems] == [
        (0, "a folder without .yaml, .yml, .json files"),
        (0, "not UTF-8 text"),
        (0, f"more than {len(POOL)} bytes"),
    ]


def test_a_folder_of_too_many_files_is_a_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weft.api.manifests.MAX_FILES", 2)
    for name, text in (("a", POOL), ("b", ADAPTER), ("c", "")):
        (tmp_path / f"{name}.yaml").write_text(text)
    assert len(load([tmp_path / "a.yaml", tmp_path / "b.yaml"])) == 2
    with pytest.raises(ManifestError) as caught:
        load([tmp_path])
    assert [str(problem) for problem in caught.value.problems] == [f"{tmp_path}: 3 files, the limit is 2"]


def test_one_decoded_document_is_parsed() -> None:
    assert parse_object(yaml.safe_load(POOL), namespace="x").key == "x/tiny"
    with pytest.raises(ManifestError):
        parse_object([])


def test_times_written_by_a_server_are_read_back_from_yaml() -> None:
    (found,) = load_text(POOL.replace("{name: tiny}", "{name: tiny, creationTimestamp: 2026-01-02T03:04:05Z}"))
    assert found.to_dict()["metadata"]["creationTimestamp"] == "2026-01-02T03:04:05Z"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (UNKNOWN_FIELDS, "unknown field 'field0'"),
        (MANY_BOMBS, "in a file"),
        (f"---\n{SMALL_BOMB}" * 1_000, "there are more problems"),
        (f"---\nkind: {'x' * 1_000_000}\napiVersion: serving.weft.dev/v1alpha1\n" * 16, "unknown kind"),
    ],
    ids=["unknown fields", "many bombs", "many problems", "long kinds"],
)
def test_many_problems_are_told_in_part_and_soon(text: str, says: str) -> None:
    told, calls = traced_calls(lambda: problems(text))
    assert any(says in problem for problem in told)
    assert len(told) <= MAX_PROBLEMS + 1
    assert calls < 5_000_000


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("kind: [LoRAAdapter]", "kind: unknown kind"),
        ("kind: {a: b}", "kind: unknown kind"),
        ("metadata: {name: tiny, creationTimestamp: 0001-01-01T00:00:00+14:00}", "outside of the calendar"),
        ("metadata: {name: tiny, ownerReferences: [{a: .nan}]}", "is not a JSON number"),
    ],
)
def test_values_that_no_field_has_are_problems(line: str, says: str) -> None:
    field = line.partition(":")[0]
    text = "\n".join(line if old.startswith(f"{field}:") else old for old in POOL.splitlines())
    assert any(says in problem for problem in problems(text))


def test_what_cannot_be_opened_is_a_problem(tmp_path: Path) -> None:
    with pytest.raises(ManifestError) as caught:
        load([tmp_path / ("x" * 5000), tmp_path / "gone.yaml"])
    assert all(problem.message.startswith("cannot be read") for problem in caught.value.problems)
    assert [problem.document for problem in caught.value.problems] == [0, 0]


def test_the_line_of_what_is_no_text_is_told(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_bytes(POOL.encode() + b"# \xff\n")
    with pytest.raises(ManifestError, match=r"a\.yaml: not UTF-8 text: .*\(line 6\)"):
        load([tmp_path])


EXAMPLES = [path.read_bytes() for path in sorted(QUICKSTART.glob("*.yaml"))]
PIECES = [
    b"\x00", b"\xff", b"\xc3", b"&a ", b"*a", b"<<: *a", b"? ", b"!!set ", b"!", b"[", b"{", b"}", b": ", b"- ", b"0x",
]  # fmt: skip
MARKS = [
    b"---\n", b"...\n", b"%TAG ! x\n", b"|\n", b"'", b'"', b"\t", b"\r", b"\xef\xbb\xbf", b".nan", b"1:1", b"!!binary ",
]  # fmt: skip


@st.composite
def mutated(draw: st.DrawFn) -> bytes:
    """An example with some of its bytes changed, lost, repeated or added."""
    data = bytearray(draw(st.sampled_from(EXAMPLES)))
    for _ in range(draw(st.integers(1, 6))):
        at = draw(st.integers(0, len(data)))
        length = draw(st.sampled_from([0, 0, 1, 1, 5, 40]))
        where = draw(st.integers(0, len(data)))
        new = draw(st.sampled_from([b"", bytes(data[where : where + 60]), *PIECES, *MARKS]) | st.binary(max_size=3))
        data[at : at + length] = new
    return bytes(data)


@given(mutated())
def test_a_changed_example_is_taken_or_refused_by_name(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "mutated.yaml"
    path.write_bytes(data)
    try:
        json.dumps([found.to_dict() for found in load([path])], allow_nan=False)
    except ManifestError as error:
        assert all(str(problem).startswith(str(path)) for problem in error.problems)  # noqa: PT017 (either is right)


@given(st.text(max_size=60) | st.text("-:{}[]&*!?|>%@`\"' \nab,#", max_size=40))
def test_no_text_makes_loading_fail_in_another_way(text: str) -> None:
    try:
        assert load_text(text) == []
    except ManifestError as error:
        assert error.problems  # noqa: PT017 (either outcome is right)


def test_the_cost_of_an_adapter_does_not_grow_with_their_number() -> None:
    adapters = [ADAPTER.replace("name: upper", f"name: upper-{n}") for n in range(400)]
    few, many = (lines_of(lambda n=n: load_text("---".join(adapters[:n]))) for n in (100, 400))
    assert many < 5 * few
    assert len(load_text("---".join(adapters))) == 400


def test_namespaces_are_for_clusters_and_left_out() -> None:
    text = f"apiVersion: v1\nkind: Namespace\nmetadata: {{name: acme}}\n---\n{POOL}"
    assert [made.kind for made in load_text(text)] == ["ServingPool"]
