"""Text from outside, made safe to show: on a terminal, in a log line, in an error, in a JSON answer."""


def sanitize(text: str) -> str:
    """Write every character that cannot be printed as its escape: ESC, line ends, half surrogates."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)


def quoted(value: object, max_chars: int = 60) -> str:
    """Quote a value for an error: at most `max_chars` characters of it, all printable."""
    return repr(value[:max_chars]) if isinstance(value, str) else repr(value)[:max_chars]
