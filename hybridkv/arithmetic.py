"""Integer helpers that exist once."""


def cdiv(a: int, b: int) -> int:
    """The smallest integer not below ``a / b``."""
    return -(-a // b)


def round_up(a: int, multiple: int) -> int:
    """The smallest multiple of ``multiple`` not below ``a``."""
    return cdiv(a, multiple) * multiple


def round_down(a: int, multiple: int) -> int:
    """The largest multiple of ``multiple`` not above ``a``."""
    return a // multiple * multiple
