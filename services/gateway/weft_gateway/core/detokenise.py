"""Tokens to text, one token at a time: whole characters only, O(1) a token, independent of how tokens are chunked.

A token stands for bytes; the bytes of an answer run through one incremental UTF-8 decoder. A character that is split
over tokens waits for its last byte; bytes that are no UTF-8 become U+FFFD, one per maximal subpart (Unicode, section
3.9), which is what `Tokenizer.decode` does for byte-level tokenizers.

An answer continues its prompt, so the space that sentence decoders strip at the *beginning of a text* is kept.
"""

from codecs import utf_8_decode

from weft_gateway.core.events import BytesOf


class Detokeniser:
    """The text of one answer. `bytes_of(token id)` gives a token's bytes, b"" for a special token."""

    def __init__(self, bytes_of: BytesOf) -> None:
        self._bytes_of = bytes_of
        self.begun = b""  # of a character that needs more bytes; empty where there is none

    def push(self, token: int) -> str:
        """The characters that this token completes."""
        data = self.begun + self._bytes_of(token)
        text, read = utf_8_decode(data, "replace", False)
        self.begun = data[read:]
        return text

    def flush(self) -> str:
        """What an unfinished character leaves at the end: "" or U+FFFD."""
        begun, self.begun = self.begun, b""
        return begun.decode(errors="replace")
