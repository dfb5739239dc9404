"""A runner as its mover sees it: the bookkeeping, and moves from and to its cache."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import jax
import numpy as np

from hybridkv.blocks.allocator import Allocator
from hybridkv.engine.steps import MOVED_BLOCKS
from hybridkv.geometry import Geometry
from hybridkv.prefixes.directory import Directory

if TYPE_CHECKING:
    from hybridkv.engine.runner import Runner


class CacheSide:
    """Implements ``hybridkv.tiers.device.DeviceSide`` for one runner, on its thread."""

    def __init__(self, runner: "Runner") -> None:
        self._runner = runner

    @property
    def allocator(self) -> Allocator:
        """The bookkeeping of all tiers."""
        return self._runner.allocator

    @property
    def directory(self) -> Directory:
        """What is published."""
        return self._runner.directory

    @property
    def geometry(self) -> Geometry:
        """Of the model."""
        return self._runner.model.geometry

    @property
    def moved_blocks(self) -> int:
        """Blocks of one move."""
        return MOVED_BLOCKS

    @property
    def device(self) -> jax.Device:
        """Where the cache is."""
        (device,) = self._runner.cache.lengths.devices()
        return device

    @property
    def exact(self) -> Callable[[np.ndarray], np.ndarray]:
        """Whether each entry is that of a cold run: bool ``[n]``."""
        return self._runner.publisher.generated.exact_each

    def read_blocks(self, places: np.ndarray) -> Sequence[jax.Array]:
        """Starts to copy ``moved_blocks`` blocks out: uint32 ``[words]`` each."""
        return self._runner.steps.read_blocks(self._runner.cache, places)

    def write_blocks(self, blocks: Sequence[jax.Array], places: np.ndarray) -> None:
        """Starts to write ``moved_blocks`` blocks; places past the pool are skipped."""
        runner = self._runner
        runner.cache = runner.steps.write_blocks(runner.cache, tuple(blocks), places)

    def read_snapshot(self, place: int) -> jax.Array:
        """Starts to copy a snapshot out: uint32 ``[words]``."""
        return self._runner.steps.read_snapshot(self._runner.snapshots, place)

    def write_snapshot(self, words: jax.Array, place: int) -> None:
        """Starts to write a snapshot."""
        runner = self._runner
        runner.snapshots = runner.steps.store_snapshot(runner.snapshots, words, place)
