"""How `weft conformance` judges answers, without a server."""

import pytest

from weft_cli.conformance import Answer, Model, Verdict, alike, attributed, discovered, fair, judged, model_of, updated
from weft_cli.errors import BadInput

TEXTS = {"base": "one two three", "a": "ONE TWO THREE", "b": "ONE TWO four"}
REFERENCES = {"p": TEXTS}


@pytest.mark.parametrize(
    ("text", "whose"),
    [
        ("one two three", "base"),
        ("one two 3", "base"),
        ("ONE TWO THR", "a"),
        ("ONE TWO", None),
        ("x", None),
        ("", None),
    ],
)
def test_an_answer_is_of_the_model_whose_reference_begins_like_it(text: str, whose: str | None) -> None:
    assert attributed(text, TEXTS) == whose


def test_answers_pass_when_each_is_its_own_models() -> None:
    right = [Answer(model, "p", text) for model, text in TEXTS.items()]
    late = Answer("a", "p", "ONE TWO THREx")
    outcome = judged([*right, late], REFERENCES)
    assert (outcome.verdict, outcome.detail) == (Verdict.PASS, "4 answers, 3 equal to the references")
    wrong = judged([*right, Answer("a", "p", TEXTS["b"])], REFERENCES)
    assert wrong.verdict is Verdict.FAIL
    assert "1 of 4 answers are not their model's; a gave 'ONE TWO four', which is of b" in wrong.detail


def test_models_that_answer_alike_are_named() -> None:
    assert alike(REFERENCES) == []
    assert alike({"p": TEXTS | {"c": TEXTS["a"]}, "q": {"base": "1", "a": "2", "b": "3", "c": "2"}}) == [("a", "c")]


def test_a_rare_adapter_waits_as_the_flood_does() -> None:
    assert fair([0.5], [0.3], 0.01).verdict is Verdict.PASS
    assert fair([0.7], [0.3], 0.01).verdict is Verdict.FAIL


def test_while_a_content_is_replaced_answers_are_of_either() -> None:
    old, new = {"p": "old text", "q": "same"}, {"p": "new text", "q": "same"}
    during = [Answer("a", "p", "old text"), Answer("a", "p", "new text"), Answer("a", "q", "same")]
    outcome = updated(during, old, new)
    assert (outcome.verdict, outcome.detail) == (Verdict.PASS, "1 answers of the old content, 1 of the new one")
    assert updated([Answer("a", "p", "mixed")], old, new).verdict is Verdict.FAIL
    assert updated(during, old, old).verdict is Verdict.NOT_APPLICABLE


def test_the_base_with_most_adapters_is_found() -> None:
    listed = [{"id": "m"}, {"id": "x", "parent": "n"}, {"id": "a", "parent": "m"}, {"id": "b", "parent": "m"}]
    assert discovered(listed, None) == ("m", ["a", "b"])
    assert discovered(listed, "n") == ("n", ["x"])
    with pytest.raises(BadInput, match="no adapter"):
        discovered([{"id": "m", "parent": None}], None)


def test_a_model_may_be_selected_by_a_field() -> None:
    assert model_of('a={"lora": [{"id": 0}]}') == Model("a", {"lora": [{"id": 0}]})
    assert model_of("acme/upper") == Model("acme/upper")
    for wrong in ("a={", "a=3", '={"x": 1}'):
        with pytest.raises(BadInput):
            model_of(wrong)
