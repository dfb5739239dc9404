"""Choices of a runner and of an engine over it."""

import dataclasses

from hybridkv.blocks.eviction import EvictionPolicy
from hybridkv.engine.generated import Publish
from hybridkv.engine.scheduler import SchedulerOptions
from hybridkv.prefixes.cost import BY_TILES, CostModel
from hybridkv.prefixes.policy import DEFAULT, SnapshotPolicy
from hybridkv.state.capacity import Capacity
from hybridkv.tiers.options import TierOptions


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunnerOptions:
    """Sizes and policies of a runner. None of them changes a logit."""

    capacity: Capacity
    snapshots: int
    """Snapshots on the device. One costs ``sum(snapshot_bytes(geometry).values())`` bytes."""
    policy: SnapshotPolicy = DEFAULT
    eviction: EvictionPolicy | None = None
    """What goes first when room is short; None for seconds saved a byte, from ``cost``."""
    cost: CostModel = BY_TILES
    replay: bool = True
    """Whether a lost sequence state may be rebuilt by recomputation."""
    reuse: bool = True
    """Off: nothing is published, and every prompt is computed from its first token."""
    ledger: bool = True
    """Keep every token ever computed, at 4 bytes each, so that plans know the ideal hit and blame
    what is lost."""
    tiers: TierOptions | None = None
    """Host memory and disk beside the device; None keeps everything on the device. Where ``cost``
    is left at its default it is then measured, so that nothing is loaded that is cheaper to
    compute."""
    debug: bool = False
    """Walk all bookkeeping after every event."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """Choices of an engine. Only ``logprobs`` is compiled in."""

    scheduler: SchedulerOptions = dataclasses.field(default_factory=SchedulerOptions)
    publish: Publish = Publish.CANONICAL
    """What becomes of generated tokens, unless a request says otherwise."""
    logprobs: int = 0
    """The most likeliest tokens that a request may ask for."""
    park_bytes: int = 1 << 30
    """Host memory for parked sequences; what does not fit is not preempted."""
    restore_s: float = 1.0
    """Seconds a request waits for its prefix to be loaded before it computes it."""
    digests: bool = False
    """Keep a digest of all logits of each output; costs their transfer and a hash."""
    strict: bool = False
    """Raise where something compiles after warm-up; otherwise it is counted."""
    probe: bool = True
    """Check at warm-up that lanes and neighbours change no bits here, and use one at a time if they
    do."""
