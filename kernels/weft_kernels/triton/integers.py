"""Plain arithmetic of launchers: Triton's own helpers, which kernels call too, take the host 2 us each."""


def next_power_of_2(n: int) -> int:
    """The least one that is not below n >= 1."""
    return 1 << (n - 1).bit_length()


def cdiv(a: int, b: int) -> int:
    """How many times b, to be no less than a."""
    return -(-a // b)
