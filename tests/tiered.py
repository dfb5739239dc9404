"""A compiled runner that gets tiers for a while, and where in them things are."""

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np

from hybridkv.blocks.entries import NONE, Tier
from hybridkv.blocks.invariants import check
from hybridkv.blocks.pools import PoolSizes
from hybridkv.blocks.transitions import TierState
from hybridkv.engine.cache_side import CacheSide
from hybridkv.engine.runner import Runner
from hybridkv.tiers.mover import Mover
from hybridkv.tiers.options import TierOptions

PLACES = PoolSizes(blocks=400, snapshots=200)


def give_tiers(runner: Runner, options: TierOptions) -> Mover:
    """Other tiers and an empty directory, as after a restart; compiles nothing."""
    take_tiers(runner)
    runner.sizes = dataclasses.replace(runner.sizes, tiers=options)
    runner.reset()
    runner.mover = Mover(CacheSide(runner), options, runner.identity)
    return runner.mover


def take_tiers(runner: Runner) -> None:
    """Back to the device alone, with an empty directory."""
    if runner.mover is not None:
        runner.close(timeout_s=60)  # False after a write that failed
        assert not runner.mover.busy
    runner.mover = None
    runner.sizes = dataclasses.replace(runner.sizes, tiers=None)
    runner.reset()


@contextlib.contextmanager
def with_tiers(runner: Runner, path: Any, **more: Any) -> Iterator[Mover]:
    """All three, the disk's at ``path``."""
    options = TierOptions(**({"host": PLACES, "disk": PLACES, "path": path} | more))
    try:
        yield give_tiers(runner, options)
    finally:
        take_tiers(runner)


def place(runner: Runner, entries: np.ndarray, tier: Tier, *, alone: bool = False) -> None:
    """Takes stored entries from every faster tier, and from slower ones if ``alone``."""
    state = runner.allocator.entries.state
    for other in Tier:
        if other < tier or (alone and other > tier):
            here = entries[state[other, entries] == TierState.PRESENT]
            if here.size:
                runner.allocator.drain(here, other)
    assert (state[tier, entries] == TierState.PRESENT).all()


def stored(runner: Runner, ids: np.ndarray, namespace: str) -> tuple[np.ndarray, np.ndarray]:
    """Entries of a published prompt: its blocks, and its snapshots in their order."""
    run = runner.directory.find(runner.chain(ids, namespace=namespace)).entries.copy()
    standing = runner.directory.snapshot_at(run)
    return run, standing[standing != NONE]


def assert_tiers_at_rest(runner: Runner) -> None:
    """Nothing is leased, promised or under way, and every place used is of something published."""
    allocator, columns = runner.allocator, runner.allocator.entries
    check(allocator)
    assert not allocator.leases.open
    assert not allocator.reservations.left
    assert not columns.leases.any()
    assert np.isin(columns.state, (TierState.ABSENT, TierState.PRESENT)).all()
    assert columns.published[columns.state.any(axis=0)].all()
