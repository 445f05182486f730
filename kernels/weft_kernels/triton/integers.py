"""Plain arithmetic of launchers: Triton's own helpers, which kernels call too, take the host 2 us each."""


def next_power_of_2(n: int) -> int:
    """The least power of 2 that is not below n >= 1."""
    return 1 << (n - 1).bit_length()


def cdiv(a: int, b: int) -> int:
    """The quotient a / b, rounded up."""
    return -(-a // b)
