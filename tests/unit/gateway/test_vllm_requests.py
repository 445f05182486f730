"""The list of vLLM's tests as requests: the documents have its counts and its reasons. tests/e2e sends the requests."""

from pathlib import Path

from harness.vllm_requests import CHECKS, COMMITS, DIFFERENT, counts, left_out, table

REFERENCE = (Path(__file__).parents[3] / "docs" / "reference" / "openai-api.md").read_text()
SHARE = 0.95  # of the requests that are answered alike


def test_the_reference_has_the_counts_and_every_reason() -> None:
    assert counts() in REFERENCE
    assert table() in REFERENCE
    assert left_out() in REFERENCE


def test_nearly_all_requests_are_answered_as_in_vllm() -> None:
    assert len(CHECKS) - len(DIFFERENT) >= SHARE * len(CHECKS)


def test_each_check_is_of_a_file_that_was_read_and_has_a_name_of_its_own() -> None:
    assert {check.test.partition("::")[0] for check in CHECKS} == set(COMMITS)
    assert len({check.test for check in CHECKS}) == len(CHECKS)
