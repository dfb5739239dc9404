"""One prompt on its way: what it holds before it has a slot, and while it has one."""

import dataclasses

import numpy as np

from hybridkv.blocks.leases import Receipt
from hybridkv.blocks.pools import Reservation
from hybridkv.prefixes.hashing import TokenChain
from hybridkv.prefixes.plan import Miss, Plan
from hybridkv.prefixes.policy import DEFAULT, SnapshotPolicy


class NoSlot(RuntimeError):  # noqa: N818 - a condition to wait out, not a fault
    """Every slot is taken: finish a sequence first."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Hold:
    """Everything that a sequence needs but a slot. Made by ``Runner.hold``; seat it or drop it."""

    chain: TokenChain
    namespace: str
    plan: Plan | Miss
    tokens: int
    """Room that was asked for: prompt and new tokens."""
    shared: Receipt
    """Leased blocks that the plan shares."""
    snapshot: Receipt | None
    """The leased snapshot that the plan reads."""
    reservation: Reservation
    blocks: int
    """Blocks in the reservation."""

    @property
    def read(self) -> np.ndarray:
        """Entries that it reads, int32: the shared blocks, then the snapshot."""
        if self.snapshot is None:
            return self.shared.entries
        return np.concatenate([self.shared.entries, self.snapshot.entries])


@dataclasses.dataclass(kw_only=True, eq=False)
class Sequence:
    """One prompt in its slot. Made by ``Runner``; only its runner changes it."""

    slot: int
    chain: TokenChain
    namespace: str
    prompt_tokens: int
    plan: Plan | Miss
    shared: Receipt
    own: Receipt
    computed: int
    """Tokens in the cache."""
    policy: SnapshotPolicy = DEFAULT
    """Where its prompt writes snapshots, and which of them go again."""
    snapshots_at: tuple[int, ...] = ()
    generated: list[int] = dataclasses.field(default_factory=list)
    stored: list[tuple[int, Receipt]] = dataclasses.field(default_factory=list)
    """Snapshots that are written and not yet published, with their positions."""
    skipped_snapshots: int = 0
    """Snapshots that found no room."""
    exact: bool = True
    """Whether its logits are those of a cold run: not where it reads rows of decode steps that
    were published as they were, or went on after its state was lost."""
    forks: tuple[int, ...] = ()
    """Tile boundaries where another prompt is known to leave this one: published when reached."""
    generated_from: int | None = None
    """Where the tokens of an earlier request's output begin in this prompt, if they do."""
    finished: bool = False

    @classmethod
    def of(
        cls,
        hold: Hold,
        *,
        slot: int,
        own: Receipt,
        exact: bool,
        policy: SnapshotPolicy,
        generated_from: int | None,
    ) -> "Sequence":
        """A held prompt in a slot, with the blocks of its reservation as its ``own``."""
        return cls(
            slot=slot,
            chain=hold.chain,
            namespace=hold.namespace,
            prompt_tokens=hold.chain.length,
            plan=hold.plan,
            shared=hold.shared,
            own=own,
            computed=hold.plan.start if isinstance(hold.plan, Plan) else 0,
            exact=exact,
            generated_from=generated_from,
            policy=policy,
        )

    @property
    def start(self) -> int:
        """First position that is computed."""
        return self.plan.start if isinstance(self.plan, Plan) else 0

    @property
    def exact_from(self) -> int:
        """First position whose logits are those of a cold run; see ``Plan.exact_from``."""
        return self.plan.exact_from if isinstance(self.plan, Plan) else 0

    @property
    def shared_tokens(self) -> int:
        """Position up to which blocks are shared."""
        return self.plan.shared if isinstance(self.plan, Plan) else 0

    @property
    def tokens_left(self) -> int:
        """Prompt tokens that are not computed yet."""
        return max(self.prompt_tokens - self.computed, 0)

    def snapshot_positions(self, tile: int) -> tuple[int, ...]:
        """Tile boundaries of its prompt where its policy writes snapshots."""
        return self.policy.positions(
            tokens=self.prompt_tokens,
            start=self.start,
            exact_from=self.exact_from,
            shared=self.shared_tokens,
            tile=tile,
        )
