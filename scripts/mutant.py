"""What a seeded fault is."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Mutant:
    """One fault: in ``file``, ``old`` (which stands there once) becomes ``new``."""

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
