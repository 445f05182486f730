from hypothesis import given
from hypothesis import strategies as st

from weft_cli.sse import Lines


@given(st.lists(st.binary(max_size=6)), st.sampled_from([b"\n", b"\r\n"]), st.integers(1, 5))
def test_lines_are_the_same_however_the_bytes_come(texts: list[bytes], end: bytes, size: int) -> None:
    texts = [text.replace(b"\n", b"").replace(b"\r", b"") for text in texts]
    data, lines = b"".join(text + end for text in texts) + b"no end", Lines()
    found = [line for at in range(0, len(data), size) for line in lines.feed(data[at : at + size])]
    assert found == [text.decode(errors="replace") for text in texts]
