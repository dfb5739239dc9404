"""What the tiers did, as counts."""

import dataclasses

from hybridkv.blocks.entries import Tier
from hybridkv.kinds import Kind
from hybridkv.tiers.durations import Durations


def _zeros() -> dict[Tier, int]:
    return dict.fromkeys(Tier, 0)


@dataclasses.dataclass(kw_only=True)
class TierCounters:
    """Entries are blocks and snapshots together; a tier is where the bytes were, or went to."""

    stored: dict[Tier, int] = dataclasses.field(default_factory=_zeros)
    """Entries that got a copy on a tier."""
    stored_bytes: dict[Tier, int] = dataclasses.field(default_factory=_zeros)
    loaded: dict[Tier, int] = dataclasses.field(default_factory=_zeros)
    """Entries that were brought to the device."""
    loaded_bytes: dict[Tier, int] = dataclasses.field(default_factory=_zeros)
    loads: int = 0
    """Requests that had something brought."""
    failed_loads: int = 0
    given_up: int = 0
    """Loads that nobody waited for any more."""
    spoiled: dict[Tier, int] = dataclasses.field(default_factory=_zeros)
    """Entries whose bytes on a tier could not be used."""
    refused: dict[Kind, int] = dataclasses.field(default_factory=lambda: dict.fromkeys(Kind, 0))
    """Those of them that were refused for the bytes of one kind."""
    load_seconds: dict[Tier, Durations] = dataclasses.field(
        default_factory=lambda: {tier: Durations() for tier in (Tier.HOST, Tier.DISK)}
    )
    """From the request of a load to its last write, of loads that brought everything, by the
    slowest tier that they read."""
    failed_stores: dict[Tier, int] = dataclasses.field(default_factory=_zeros)
    no_room: dict[Tier, int] = dataclasses.field(default_factory=_zeros)
    """Copies that found no room on a tier."""
    dropped_prefixes: int = 0
    """Prefixes that were given up: too many waited, or they can't be read or written."""
    prefetched: int = 0
    """Segments that were read before they were asked for."""
    failed_prefetches: int = 0
    """Segments, or several, that could not be read before they were asked for."""
    last_error: str = ""
    """The last failure, one line."""

    def note_failed_store(self, tier: Tier, error: BaseException) -> None:
        """Counts one and keeps its line."""
        self.failed_stores[tier] += 1
        self.last_error = f"{type(error).__name__}: {error}"
