"""One prompt on its way: what it holds before it has a slot, and while it has one."""

import dataclasses

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
