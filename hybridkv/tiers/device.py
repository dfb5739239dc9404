"""What a mover asks of the owner of the device cache."""

from collections.abc import Callable, Sequence
from typing import Protocol

import jax
import numpy as np

from hybridkv.blocks.allocator import Allocator
from hybridkv.geometry import Geometry
from hybridkv.prefixes.directory import Directory


class DeviceSide(Protocol):
    """Gathers from the cache and scatters to it. Called on the thread that owns it."""

    @property
    def allocator(self) -> Allocator:
        """The bookkeeping of all tiers."""
        ...

    @property
    def directory(self) -> Directory:
        """What is published."""
        ...

    @property
    def geometry(self) -> Geometry:
        """Of the model."""
        ...

    @property
    def moved_blocks(self) -> int:
        """Blocks of one move."""
        ...

    @property
    def device(self) -> jax.Device:
        """Where the cache is."""
        ...

    @property
    def exact(self) -> Callable[[np.ndarray], np.ndarray]:
        """Whether each entry is that of a cold run: bool ``[n]``."""
        ...

    def read_blocks(self, places: np.ndarray) -> Sequence[jax.Array]:
        """Starts to copy ``moved_blocks`` blocks out: uint32 ``[words]`` each."""
        ...

    def write_blocks(self, blocks: Sequence[jax.Array], places: np.ndarray) -> None:
        """Starts to write ``moved_blocks`` blocks; places past the pool are skipped."""
        ...

    def read_snapshot(self, place: int) -> jax.Array:
        """Starts to copy a snapshot out: uint32 ``[words]``."""
        ...

    def write_snapshot(self, words: jax.Array, place: int) -> None:
        """Starts to write a snapshot."""
        ...
