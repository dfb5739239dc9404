"""What became of the tokens of prompts, added up: ideal = reused + lost, in every total.

    plan of a prompt that got its seat --plus--> new totals (the old ones are never changed)

Totals are immutable, so that another thread that takes the reference has numbers of one moment.
"""

import dataclasses
from collections.abc import Mapping
from typing import TypeVar

import numpy as np

from hybridkv.blocks.entries import Entries, Form, Tier
from hybridkv.blocks.transitions import TierState
from hybridkv.geometry import Geometry
from hybridkv.kinds import Kind
from hybridkv.prefixes.losses import Cause
from hybridkv.prefixes.needs import block_kinds, snapshot_kinds
from hybridkv.prefixes.plan import Miss, Plan

_Key = TypeVar("_Key")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Brought:
    """What loads have brought to the device for one request."""

    blocks: Mapping[Tier, int] = dataclasses.field(default_factory=dict)
    """By where they were."""
    snapshot: Tier | None = None
    """Where the state that was brought was."""

    def plus(self, entries: Entries, plan: Plan | Miss) -> "Brought":
        """With what a plan is about to have brought from where it is now."""
        if not isinstance(plan, Plan):
            return self
        blocks, snapshot = dict(self.blocks), self.snapshot
        on_host = entries.state[Tier.HOST, plan.loads] == TierState.PRESENT
        tiers = np.where(on_host, Tier.HOST, Tier.DISK)
        of_blocks = entries.form[plan.loads] == Form.BLOCK
        for tier in (Tier.HOST, Tier.DISK):
            count = int(np.count_nonzero(of_blocks & (tiers == tier)))
            blocks[tier] = blocks.get(tier, 0) + count
        if not of_blocks.all():
            snapshot = Tier(int(tiers[~of_blocks][-1]))
        return Brought(blocks=blocks, snapshot=snapshot)


NOTHING_BROUGHT = Brought()


@dataclasses.dataclass(frozen=True, kw_only=True)
class PromptTotals:
    """Sums over prompts, each counted once: when it got its first seat, by the plan it began with.

    What is computed again after a preemption is not counted, nor are idle publishing and requests
    that another engine handed over.
    """

    prompts: int = 0
    tokens: int = 0
    """Of the prompts."""
    without_ideal: int = 0
    """Prompts whose ideal nobody knew, because no ledger is kept: in no sum of ``ideal``, ``lost``
    and ``reused_of_ideal``."""
    ideal: int = 0
    reused: int = 0
    """Not computed."""
    reused_of_ideal: int = 0
    """``reused`` of prompts whose ideal is known: ``ideal`` minus all ``lost``."""
    lost: Mapping[tuple[Cause, Kind | None], int] = dataclasses.field(default_factory=dict)
    hit: Mapping[Kind, int] = dataclasses.field(default_factory=dict)
    """Tokens up to which each kind was found, whether or not the others were."""
    restored: Mapping[tuple[Kind, Tier], int] = dataclasses.field(default_factory=dict)
    """Tokens up to which each kind was taken from where it was instead of being computed."""
    replayed: Mapping[Kind, int] = dataclasses.field(default_factory=dict)
    """Tokens that were computed again only to rebuild a kind."""
    hits: int = 0
    """Prompts of which anything was reused or read."""
    rebuilt: int = 0
    """Those whose sequence state was recomputed, all or in part."""
    looked_up: int = 0
    """Blocks that were asked for."""
    refused: int = 0
    """Blocks that were found and not used because of their index rows."""

    def plus(
        self, plan: Plan | Miss, geometry: Geometry, brought: Brought = NOTHING_BROUGHT
    ) -> "PromptTotals":
        """With one more prompt."""
        planned = isinstance(plan, Plan)
        ideal = plan.ideal
        reused = plan.reused if isinstance(plan, Plan) else 0
        replayed = plan.replayed if isinstance(plan, Plan) else 0
        lost = {(loss.cause, loss.kind): loss.tokens for loss in plan.losses}
        restored = _restored(plan, geometry, brought) if isinstance(plan, Plan) else {}
        again = dict.fromkeys(snapshot_kinds(geometry), replayed) if replayed else {}
        return PromptTotals(
            prompts=self.prompts + 1,
            tokens=self.tokens + plan.tokens,
            without_ideal=self.without_ideal + (ideal is None),
            ideal=self.ideal + (ideal or 0),
            reused=self.reused + reused,
            reused_of_ideal=self.reused_of_ideal + (reused if ideal is not None else 0),
            lost=_sum(self.lost, lost),
            hit=_sum(self.hit, plan.found.tokens),
            restored=_sum(self.restored, restored),
            replayed=_sum(self.replayed, again),
            hits=self.hits + planned,
            rebuilt=self.rebuilt + bool(replayed),
            looked_up=self.looked_up + plan.found.looked_up,
            refused=self.refused + plan.found.refused,
        )


def _restored(plan: Plan, geometry: Geometry, brought: Brought) -> dict[tuple[Kind, Tier], int]:
    """Rows of shared blocks from their tiers; the state from the tier of its snapshot."""
    found: dict[tuple[Kind, Tier], int] = {}
    left, parts = plan.shared, {}
    for tier in (Tier.DISK, Tier.HOST):  # what was brought and pushed out again counts no more
        parts[tier] = min(brought.blocks.get(tier, 0) * geometry.block_tokens, left)
        left -= parts[tier]
    parts[Tier.DEVICE] = left
    for kind in block_kinds(geometry):
        found |= {(kind, tier): tokens for tier, tokens in parts.items() if tokens}
    if plan.snapshot >= 0:
        tier = Tier.DEVICE if brought.snapshot is None else brought.snapshot
        found |= {(kind, tier): plan.start for kind in snapshot_kinds(geometry)}
    if parts[Tier.DISK]:
        found[Kind.DISK_PREFIX, Tier.DISK] = parts[Tier.DISK]
    return found


def _sum(one: Mapping[_Key, int], other: Mapping[_Key, int]) -> dict[_Key, int]:
    return {**one, **{key: one.get(key, 0) + count for key, count in other.items()}}
