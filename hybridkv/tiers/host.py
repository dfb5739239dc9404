"""The host tier: bytes of entries in pinned host memory, one immutable array an entry.

    staging (device) --worker: device_put--> pinned array, digest a kind --owner: keep--> place
    place --worker: verify, device_put--> staging (device) --owner: scatter--> cache

An array is never written after it was made, so a copy that is on its way can't race anything; a
place that is freed only drops its reference. ``keep``, ``at`` and ``dropped`` belong to the thread
of the allocator; ``pin`` and ``verify`` to any.
"""

import dataclasses
from collections.abc import Mapping

import jax
import numpy as np
from jaxtyping import Int32

from hybridkv.blocks.entries import Form, Tier
from hybridkv.blocks.pools import PoolSizes
from hybridkv.kinds import Kind
from hybridkv.tiers.digests import kind_digests

Spans = Mapping[Form, Mapping[Kind, slice]]
"""Where each kind is in the words of an entry of each form."""


class DamagedHostBytes(RuntimeError):  # noqa: N818 - reads as what happened
    """Bytes of the host tier are not those that were put away."""

    def __init__(self, kind: Kind, form: Form) -> None:
        super().__init__(f"{kind.value} of a {form.name.lower()} on the host")
        self.kind = kind
        """The kind whose bytes are wrong."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class HostWords:
    """One entry's bytes."""

    form: Form
    words: jax.Array | np.ndarray
    """uint32 ``[words]`` in pinned host memory; numpy's where a fault was injected."""
    digests: Mapping[Kind, bytes]


class HostTier:
    """Who holds which array."""

    def __init__(self, sizes: PoolSizes, spans: Spans, device: jax.Device) -> None:
        """Allocates nothing: memory is taken as entries come."""
        self._spans = spans
        self._pinned = jax.sharding.SingleDeviceSharding(device, memory_kind="pinned_host")
        self._held: dict[Form, list[HostWords | None]] = {
            Form.BLOCK: [None] * sizes.blocks,
            Form.SNAPSHOT: [None] * sizes.snapshots,
        }

    @property
    def bytes_used(self) -> int:
        """Bytes of all arrays; walks all places."""
        held = (words for places in self._held.values() for words in places if words is not None)
        return sum(each.words.nbytes for each in held)

    def pin(self, form: Form, words: jax.Array) -> HostWords:
        """Copies words from the device; waits until they are there."""
        pinned = jax.block_until_ready(jax.device_put(words, self._pinned))
        digests = kind_digests(np.asarray(pinned), self._spans[form])
        return HostWords(form=form, words=pinned, digests=digests)

    def verify(self, held: HostWords) -> None:
        """Compares the digests.

        Raises:
          DamagedHostBytes: one differs; names the kind.
        """
        now = kind_digests(np.asarray(held.words), self._spans[held.form])
        for kind, digest in held.digests.items():
            if now[kind] != digest:
                raise DamagedHostBytes(kind, held.form)

    def keep(self, place: int, held: HostWords) -> None:
        """An entry's bytes are at a place from now on."""
        self._held[held.form][place] = held

    def at(self, form: Form, place: int) -> HostWords:
        """What is at a place."""
        held = self._held[form][place]
        assert held is not None, f"nothing at {form.name} {place} of the host"
        return held

    def dropped(self, tier: Tier, form: Form, places: Int32[np.ndarray, " n"]) -> None:
        """The allocator freed places; see ``Allocator.on_freed``."""
        if tier == Tier.HOST:
            for place in places.tolist():
                self._held[form][place] = None
