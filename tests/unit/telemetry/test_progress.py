"""How far a long piece of work is."""

from weft.telemetry.progress import ByteProgress, percent_of


def test_a_text_changes_in_steps_and_is_never_beyond_the_whole() -> None:
    progress = ByteProgress()
    assert str(progress) == ""
    progress.begin("copying", 3 << 30)
    texts = set[str]()
    for _ in range(3000):
        progress.add((1 << 20) + (1 << 19))  # half of it comes twice
        texts.add(str(progress))
    assert "copying 1.5 of 3.0 GiB (50 %)" in texts
    assert str(progress) == "copying 3.0 of 3.0 GiB (100 %)"
    assert sorted(map(percent_of, texts), key=str) == sorted(range(0, 101, 2), key=str)
    progress.begin("loading weights", 0)
    assert str(progress) == "loading weights"
    assert percent_of("loading weights") is None
