r"""A trace through the real directory, allocator, eviction and planner; only bytes are imagined.

    request --plan_prefix--> lease, load --> reserve (evicts) --> commit --> publish --> copy down
                 |                                                  snapshots as the policy says
              losses by cause

Requests are served one after the other, in order of arrival: each finds what all before it have
computed. That is what an engine with one queue for prompts does; when their tokens come, the
queueing model says (``queueing``). A trace has no ids for generated tokens. They fill the last
block of their prompt, which is kept and found by nobody, and no further ones. One owner, one
thread.

Of the tiers in use, a slower one also keeps what a faster one has, as the movers of
``hybridkv.tiers`` do: what is pushed out of a tier is lost only where no other has it.
"""

import contextlib
import dataclasses
from collections.abc import Mapping

import numpy as np
from jaxtyping import Bool, Int32, Int64

from hybridkv.blocks.entries import NONE, Form, Tier, kind_bits
from hybridkv.blocks.eviction import EvictionPolicy
from hybridkv.blocks.leases import Receipt
from hybridkv.blocks.pools import NeverFits, NoRoom, PoolSizes
from hybridkv.blocks.transitions import TierState
from hybridkv.prefixes.cost import CostModel
from hybridkv.prefixes.directory import Directory
from hybridkv.prefixes.identity import Identity
from hybridkv.prefixes.losses import Cause
from hybridkv.prefixes.needs import block_kinds, snapshot_kinds
from hybridkv.prefixes.plan import Miss, Plan, PlanOptions, plan_prefix
from hybridkv.prefixes.policy import SnapshotPolicy
from hybridkv.replay.chains import BlockChain, BlockHashes
from hybridkv.replay.schemes import Scheme
from hybridkv.replay.trace import BLOCK, Trace
from hybridkv.replay.trusted import CheckedAllocator, TrustedAllocator, TrustedDirectory
from hybridkv.replay.uses import Uses

AHEAD = 16
"""A tier that only holds copies is cleared by this part of it at a time."""
STEP = 1e-6
"""Seconds between requests that a trace gives the same time: the later one is used later."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class CacheOptions:
    """One way to run the cache."""

    pools: Mapping[Tier, PoolSizes]
    """Places of the tiers in use, the device always among them."""
    policy: SnapshotPolicy
    eviction: EvictionPolicy | Mapping[Tier, EvictionPolicy]
    cost: CostModel
    tile: int = BLOCK
    """Tokens of a tile: resume positions are its multiples. A multiple of ``BLOCK``."""
    replay: bool = True
    """Whether a lost state may be recomputed."""
    checked: bool = False
    """Whether every call checks what it is handed: several times slower, with the same numbers."""
    debug: bool = False
    """Walk all bookkeeping after every event; checked too."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class CacheResult:
    """What became of each request: arrays over them, in tokens where nothing else is said."""

    ideal: Int64[np.ndarray, " n"]
    reused: Int64[np.ndarray, " n"]
    """Not computed again."""
    replayed: Int64[np.ndarray, " n"]
    """Computed again to rebuild the state, although their rows are stored."""
    found: Int64[np.ndarray, " n"]
    """In whole blocks that were published, wherever they were."""
    restorable: Int64[np.ndarray, " n"]
    """Up to the last stored state on blocks that were found: what needs no replay."""
    snapshot: Bool[np.ndarray, " n"]
    """Whether it resumed from a snapshot."""
    depth: Mapping[Form, Int64[np.ndarray, " n"]]
    """Entries of the form that were used since what it reused was: with fewer places, and the least
    recently used going first, it would not have been there. 0 where it reused none."""
    loaded: Mapping[Tier, Int64[np.ndarray, " n"]]
    """Bytes that were brought from a tier."""
    stored: Mapping[tuple[Tier, Form], Int32[np.ndarray, " n"]]
    """Entries of each tier after the request."""
    written: int
    """Snapshots."""
    not_written: int
    """Snapshots that found no room."""
    lost: Mapping[str, int]
    """Tokens by cause, as ``evicted(compressed)`` where a kind is to blame."""


class Cache:
    """The bookkeeping of one scheme, without the bytes."""

    def __init__(self, scheme: Scheme, options: CacheOptions, trace: Trace) -> None:
        self.scheme, self.options, self.trace = scheme, options, trace
        self._now = 0.0
        kinds = (*block_kinds(scheme.geometry), *snapshot_kinds(scheme.geometry))
        checked = options.checked or options.debug
        self.allocator = (CheckedAllocator if checked else TrustedAllocator)(
            options.pools, policy=options.eviction, clock=lambda: self._now, debug=options.debug
        )
        self.directory = (Directory if checked else TrustedDirectory)(
            self.allocator,
            Identity.of_geometry(scheme.geometry, weights="", numerics=""),
            block_tokens=BLOCK,
            required_kinds=kind_bits(kinds),
            ghosts=4 * max(trace.distinct, 1),
        )
        self._hashes = BlockHashes(self.directory.identity.root(), trace.distinct)
        self._below = tuple(tier for tier in options.pools if tier != Tier.DEVICE)
        self._last = next(reversed(tuple(options.pools)))
        self._plan = PlanOptions(
            tile=options.tile,
            snapshot_bytes=scheme.snapshot_bytes,
            loads=bool(self._below),
            load_snapshots=options.pools[Tier.DEVICE].snapshots > 0,
            cost=options.cost,
            replay=options.replay,
        )
        self._kinds = {
            Form.BLOCK: kind_bits(block_kinds(scheme.geometry)),
            Form.SNAPSHOT: kind_bits(snapshot_kinds(scheme.geometry)),
        }
        self._has_states = scheme.has_snapshots
        self._clock = trace.arrival + np.arange(len(trace)) * STEP
        self._uses = Uses(self.allocator, self._clock)
        self._computed = np.zeros(trace.distinct, bool)
        """By block: whether it was ever."""
        self._next = np.full(trace.distinct, NONE, np.int32)
        """By block: the first whole one that followed it."""
        self._forked = np.zeros(trace.distinct, bool)
        """By block: whether another one followed it too."""
        self.written = self.not_written = 0

    def ideal(self, request: int) -> int:
        """Tokens of its longest prefix that was computed before, in whole blocks; never all."""
        tokens = int(self.trace.prompt[request])
        known = self._computed[self.trace.of(request)[: tokens // BLOCK]]
        run = len(known) if known.all() else int(known.argmin())
        return min(run * BLOCK, tokens - 1)

    def plan(self, request: int) -> tuple[BlockChain, Plan | Miss]:
        """What the next request finds. Changes nothing."""
        tokens = int(self.trace.prompt[request])
        self._now = float(self._clock[request])
        blocks = self.trace.of(request)
        chain = BlockChain(self._hashes, blocks, tokens=tokens, block=BLOCK)
        self.directory.register(chain)
        plan = plan_prefix(
            self.directory, chain, self.scheme.planned, self._plan, ideal=self.ideal(request)
        )
        return chain, plan

    def restorable(self, chain: BlockChain) -> int:
        """See ``CacheResult.restorable``; right after its plan."""
        tile = self.options.tile // BLOCK
        last = (chain.length - 1) // self.options.tile * tile
        ends = self.directory.last_match(chain).entries[:last][tile - 1 :: tile]
        if not self._has_states:
            return len(ends) * self.options.tile
        held = np.flatnonzero(self.directory.snapshot_at(ends) != NONE)
        return int(held[-1] + 1) * self.options.tile if held.size else 0

    def depth(self, plan: Plan) -> dict[Form, int]:
        """See ``CacheResult.depth``."""
        if self.options.debug:
            self._uses.check()
        found = {Form.BLOCK: self._uses.since(Form.BLOCK, plan.entries)}
        if plan.snapshot >= 0:
            found[Form.SNAPSHOT] = self._uses.since(Form.SNAPSHOT, np.array([plan.snapshot]))
        return found

    def serve(
        self, request: int, chain: BlockChain, plan: Plan | Miss
    ) -> Int32[np.ndarray, " loads"]:
        """Carries out a plan that was just made and publishes what the request computed.

        Returns:
          The tier that each of the plan's loads came from.
        """
        trace, allocator = self.trace, self.allocator
        blocks, tokens = trace.of(request), int(trace.prompt[request])
        held, sources = None, np.empty(0, np.int32)
        if isinstance(plan, Plan):
            held, sources = self._claim(plan)
        shared = len(plan.entries) if isinstance(plan, Plan) else 0
        own = self._new(Form.BLOCK, len(blocks) - shared)
        states = self._make_snapshots(plan, tokens)
        chain.complete()
        run = self._publish(chain, plan, own, states)
        self._computed[blocks] = True
        if self._below:
            self._copy_down(run)
        mine = [own] if states is None else [own, states[1]]
        if held is not None:
            allocator.touch(held.entries)
        for receipt in mine if held is None else [held, *mine]:
            self._uses.note(receipt.entries, request)
            allocator.release(receipt)
        if self.options.policy.thin:
            self._note_forks(blocks[: tokens // BLOCK])
            self._thin(run, blocks, tokens)
        return sources

    def _claim(self, plan: Plan) -> tuple[Receipt, Int32[np.ndarray, " loads"]]:
        """Leases what a plan names and brings to the device what is not there."""
        allocator, entries, generations = self.allocator, plan.entries, plan.generations
        if plan.snapshot >= 0:
            entries = np.append(entries, np.int32(plan.snapshot))
            generations = np.append(generations, np.uint32(plan.snapshot_generation))
        receipt = allocator.lease(entries, generations)
        sources = np.empty(0, np.int32)
        if len(plan.loads):
            states = allocator.entries.state[:, plan.loads] == TierState.PRESENT
            sources = states.argmax(axis=0).astype(np.int32)
            self._fill(plan.loads, Tier.DEVICE)
        return receipt, sources

    def _fill(self, entries: Int32[np.ndarray, " n"], tier: Tier) -> None:
        """Copies entries that are whole somewhere to a tier that can make room for all."""
        is_snapshot = self.allocator.entries.form[entries] == Form.SNAPSHOT
        blocks, snapshots = entries[~is_snapshot], entries[is_snapshot]
        self._make_room(Form.BLOCK, len(blocks), tier)
        self._make_room(Form.SNAPSHOT, len(snapshots), tier)
        self.allocator.copy(blocks, snapshots, tier, self._kinds)

    def _new(self, form: Form, count: int) -> Receipt:
        """New whole entries on the device: as many as are asked for, or as can be."""
        self._make_room(form, count, Tier.DEVICE)
        try:
            return self.allocator.make(form, count, self._kinds[form])
        except (NoRoom, NeverFits):
            count = min(count, self._room(form, Tier.DEVICE))
            return self.allocator.make(form, count, self._kinds[form])

    def _make_room(self, form: Form, count: int, tier: Tier) -> None:
        """Pushes copies out of a tier above the last by the dozen: each time all are looked at."""
        pool = self.allocator.pools[tier][form]
        if tier == self._last or count <= pool.available:
            return
        count = min(max(count, pool.capacity // AHEAD), pool.capacity) - pool.available
        with contextlib.suppress(NoRoom):
            counts = {Form.BLOCK: 0, Form.SNAPSHOT: 0, form: count}
            self.allocator.evict(
                blocks=counts[Form.BLOCK], snapshots=counts[Form.SNAPSHOT], tier=tier
            )

    def _room(self, form: Form, tier: Tier) -> int:
        """Places that are free or can be made so."""
        return self.allocator.available(form, tier) + self.allocator.evictable(form, tier)

    def _make_snapshots(
        self, plan: Plan | Miss, tokens: int
    ) -> tuple[tuple[int, ...], Receipt] | None:
        """The positions at which this prompt's computation leaves a state, and their entries."""
        if not self._has_states:
            return None
        start = exact_from = shared = 0
        if isinstance(plan, Plan):
            start, exact_from, shared = plan.start, plan.exact_from, plan.shared
        positions = self.options.policy.positions(
            tokens=tokens,
            start=start,
            exact_from=exact_from,
            shared=shared,
            tile=self.options.tile,
        )
        if not positions:
            return None
        # As in an engine, which reaches the first position first; it then finds no room for others.
        receipt = self._new(Form.SNAPSHOT, len(positions))
        count = len(receipt.entries)
        self.written += count
        self.not_written += len(positions) - count
        return positions[:count], receipt

    def _publish(
        self,
        chain: BlockChain,
        plan: Plan | Miss,
        own: Receipt,
        states: tuple[tuple[int, ...], Receipt] | None,
    ) -> Int32[np.ndarray, " run"]:
        """Makes what a request computed visible; the entries of all its blocks."""
        before = plan.entries if isinstance(plan, Plan) else np.empty(0, np.int32)
        stands = self.directory.publish(chain, len(before), own.entries)
        run = np.concatenate([before, stands])
        if states is not None:
            positions, receipt = np.asarray(states[0]), states[1]
            shown = positions <= len(run) * BLOCK
            self.directory.publish_snapshots(chain, positions[shown], receipt.entries[shown])
        return run

    def _copy_down(self, run: Int32[np.ndarray, " run"]) -> None:
        """Lets slower tiers have what is published of a prompt, its beginning first."""
        allocator, columns = self.allocator, self.allocator.entries
        states = self.directory.snapshot_at(run)
        both = np.concatenate([run, states[states != NONE]])
        held = allocator.lease(both)
        for tier in self._below:
            absent = both[columns.state[tier, both] == TierState.ABSENT]
            if not len(absent):
                continue
            try:
                self._fill(absent, tier)
            except (NoRoom, NeverFits):
                self._fill(self._what_fits(absent, tier), tier)
        allocator.release(held)

    def _what_fits(self, entries: Int32[np.ndarray, " n"], tier: Tier) -> Int32[np.ndarray, " fit"]:
        """Of a prompt that is larger than a tier can take, its first blocks and last states."""
        is_snapshot = self.allocator.entries.form[entries] == Form.SNAPSHOT
        blocks, snapshots = entries[~is_snapshot], entries[is_snapshot]
        left = len(snapshots) - self._room(Form.SNAPSHOT, tier)
        return np.concatenate([blocks[: self._room(Form.BLOCK, tier)], snapshots[max(left, 0) :]])

    def _note_forks(self, blocks: Int32[np.ndarray, " n"]) -> None:
        """Where whole blocks of different prompts follow the same one. What an answer fills is no
        fork: the conversation goes on through it, under another id.
        """
        before, after = blocks[:-1], blocks[1:]
        known = self._next[before]
        self._forked[before[(known != NONE) & (known != after)]] = True
        self._next[before[known == NONE]] = after[known == NONE]

    def _thin(
        self, run: Int32[np.ndarray, " run"], blocks: Int32[np.ndarray, " n"], tokens: int
    ) -> None:
        """Withdraws states that the policy can spare, but for those where prompts parted."""
        columns, directory = self.allocator.entries, self.directory
        states = directory.snapshot_at(run)
        spare = states[(states != NONE) & ~self._forked[blocks[: len(run)]]]
        positions = columns.position[spare].tolist()
        gone = self.options.policy.superseded(positions, tokens=tokens, tile=self.options.tile)
        going = np.isin(positions, gone)
        if going.any():
            self._uses.forget(spare[going])
            directory.withdraw(spare[going], Cause.POLICY.value)


def run(scheme: Scheme, options: CacheOptions, trace: Trace) -> CacheResult:
    """Serves every request of a trace."""
    cache, count = Cache(scheme, options, trace), len(trace)
    ideal, reused, replayed, found, restorable = (np.zeros(count, np.int64) for _ in range(5))
    snapshot = np.zeros(count, bool)
    depth = {form: np.zeros(count, np.int64) for form in Form}
    below = [tier for tier in options.pools if tier != Tier.DEVICE]
    loaded: dict[Tier, np.ndarray] = {tier: np.zeros(count, np.int64) for tier in below}
    pools = {
        (tier, form): cache.allocator.pools[tier][form] for tier in options.pools for form in Form
    }
    stored = {key: np.zeros(count, np.int32) for key in pools}
    lost: dict[str, int] = {}
    sizes = {Form.BLOCK: scheme.block_bytes, Form.SNAPSHOT: scheme.snapshot_bytes}
    for request in range(count):
        chain, plan = cache.plan(request)
        restorable[request] = cache.restorable(chain)
        if isinstance(plan, Plan) and plan.reused:
            for form, count_used in cache.depth(plan).items():
                depth[form][request] = count_used
        sources = cache.serve(request, chain, plan)
        ideal[request] = plan.ideal or 0
        for loss in plan.losses:
            name = f"{loss.cause.value}({loss.kind.value})" if loss.kind else loss.cause.value
            lost[name] = lost.get(name, 0) + int(loss.tokens)
        if isinstance(plan, Plan):
            reused[request], replayed[request] = plan.reused, plan.replayed
            found[request] = plan.shared
            snapshot[request] = plan.snapshot >= 0
            if len(plan.loads):
                forms = cache.allocator.entries.form[plan.loads]
                for tier in below:
                    for form, size in sizes.items():
                        loaded[tier][request] += size * int(
                            ((sources == tier) & (forms == form)).sum()
                        )
        for key, pool in pools.items():
            stored[key][request] = pool.used
    return CacheResult(
        ideal=ideal,
        reused=reused,
        replayed=replayed,
        found=found,
        restorable=restorable,
        snapshot=snapshot,
        depth=depth,
        loaded=loaded,
        stored=stored,
        written=cache.written,
        not_written=cache.not_written,
        lost=lost,
    )
