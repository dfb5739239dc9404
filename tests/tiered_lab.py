"""A lab's engine that gets tiers for a while."""

import contextlib
import time
from collections.abc import Iterator
from typing import Any

from engines import Lab
from tiered import with_tiers

from hybridkv.blocks.invariants import check
from hybridkv.tiers.mover import Mover


@contextlib.contextmanager
def lab_with_tiers(lab: Lab, path: Any, *, restore_s: float = 1e9, **more: Any) -> Iterator[Mover]:
    """The engine over three tiers, the disk's below ``path``; what it waits for is real time.

    Afterwards the books must be right and nothing may be reserved.
    """
    engine = lab.engine
    with with_tiers(engine.runner, path / "store", **more) as mover:
        engine.reset()
        lab.change(restores=mover, restore_s=restore_s)
        virtual, engine._sleep = engine._sleep, lambda s: (time.sleep(1e-3), lab.time.sleep(s))
        try:
            yield mover
        finally:
            engine._sleep = virtual
            check(engine.runner.allocator)
            assert not engine.runner.allocator.reservations.left
