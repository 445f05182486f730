from harness.subjects import MAX_SUBJECT_CHARS, faults


def test_a_subject_that_fits_and_a_body_are_right():
    assert not list(faults([("1a", "x" * MAX_SUBJECT_CHARS, "because")]))


def test_a_long_subject_and_a_missing_body_are_named():
    long = "y" * (MAX_SUBJECT_CHARS + 1)
    found = list(faults([("1a", long, "because"), ("2b", "Short", "\n")]))
    assert [line.split(":")[0] for line in found] == ["1a", "2b"]
    assert "got 73" in found[0]
    assert "got none" in found[1]
