"""Sequences that begin from a plan: reserve, lease, admit, compute, publish, give back.

    prompt --> plan_prefix --lease, reserve--> hold --> seat --tiles--> publish --decode--> finish
                  |              |                       |      |
              Miss: cold   NoRoom: wait         block table   snapshots at tile boundaries

One thread calls a runner. It owns the cache and the snapshots, which every step replaces, and all
bookkeeping. Nothing that it does to restore, miss, evict or publish compiles anything.
"""

import dataclasses
import time
from collections.abc import Callable, Mapping
from collections.abc import Sequence as List

import jax
import numpy as np

from hybridkv.arithmetic import cdiv
from hybridkv.blocks.entries import Form, Tier
from hybridkv.blocks.pools import NeverFits
from hybridkv.engine import calibration
from hybridkv.engine.books import empty_books
from hybridkv.engine.cache_side import CacheSide
from hybridkv.engine.generate import check_prompt
from hybridkv.engine.holds import drop_hold, take_hold, take_snapshot
from hybridkv.engine.lanes import next_tile, next_tokens, require_decodes
from hybridkv.engine.loads import bring, loading_options, turn_mover
from hybridkv.engine.numerics import identify
from hybridkv.engine.options import RunnerOptions
from hybridkv.engine.protocol import StepModel
from hybridkv.engine.publisher import Publisher
from hybridkv.engine.sequence import Hold, Sequence
from hybridkv.engine.slots import Slots
from hybridkv.engine.steps import LaneTile, Steps, tile_batch
from hybridkv.errors import UserError
from hybridkv.prefixes.checks import byte_alignment
from hybridkv.prefixes.cost import BY_TILES, CostModel
from hybridkv.prefixes.hashing import TokenChain
from hybridkv.prefixes.identity import Identity
from hybridkv.prefixes.ledger import Ledger
from hybridkv.prefixes.needs import snapshot_kinds
from hybridkv.prefixes.plan import Miss, Plan, PlanOptions, plan_prefix, reuse_is_off
from hybridkv.prefixes.policy import SnapshotPolicy
from hybridkv.state import leaf
from hybridkv.state.batch import StepOptions
from hybridkv.state.cache import Cache
from hybridkv.state.snapshot import Snapshots, snapshot_bytes
from hybridkv.tiers.mover import Mover

__all__ = ["Runner", "RunnerOptions"]


class Runner:
    """Runs sequences one tile or one decode step at a time over one cache with prefix reuse."""

    def __init__(
        self,
        model: StepModel,
        options: StepOptions,
        sizes: RunnerOptions,
        *,
        identity: Identity | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Allocates, compiles, and starts with an empty directory.

        Args:
          model: the model.
          options: of its steps.
          sizes: of the pools, and policies.
          identity: what stored bytes depend on; computed where it is not given.
          clock: seconds, for eviction; never goes back.

        Raises:
          UserError: the device cannot address blocks of this model.
        """
        geometry, capacity = model.geometry, sizes.capacity
        byte_alignment(geometry, capacity.blocks, jax.default_backend())
        self.model, self.options, self.sizes = model, options, sizes
        self.steps = Steps(model, options)
        self.identity = identity or identify(model, options, sizes.capacity)
        self.plan_options = PlanOptions(
            tile=options.tile,
            snapshot_bytes=sum(snapshot_bytes(geometry).values()),
            cost=sizes.cost,
            replay=sizes.replay,
        )
        self._clock = clock
        self.on_reset: list[Callable[[], None]] = []
        """Told when allocator and directory are new and still empty."""
        self.mover: Mover | None = None
        here = leaf.placement()
        cache = self.steps.warm_up(Cache.init(geometry, capacity, here))
        snapshots = Snapshots.init(geometry, max(sizes.snapshots, 1), here)
        cache, self.snapshots = self.steps.warm_up_snapshots(cache, snapshots)
        self.cache = self.steps.warm_up_moves(cache)
        if sizes.tiers is not None and sizes.cost is BY_TILES:
            cost = self.measure_cost(repeats=3)
            self.plan_options = dataclasses.replace(self.plan_options, cost=cost)
        self.reset()
        if sizes.tiers is not None:
            self.mover = Mover(CacheSide(self), sizes.tiers, self.identity, clock=clock)

    def reset(self) -> None:
        """Forgets every prefix and sequence; compiles nothing and clears no bytes.

        What a store has stays, and is found again.
        """
        geometry, sizes = self.model.geometry, self.sizes
        if self.mover is not None:
            self.mover.drop()
        self.allocator, self.directory = empty_books(
            geometry, sizes, self.plan_options, self.identity, clock=self._clock
        )
        self.publisher = Publisher(self.allocator, self.directory, geometry)
        self.ledger = Ledger() if sizes.ledger else None
        self.slots = Slots(sizes.capacity.slots)
        for tell in self.on_reset:
            tell()
        if self.mover is not None:
            self.mover.bind()

    @property
    def capacity_tokens(self) -> int:
        """Tokens of the longest sequence."""
        return self.sizes.capacity.tokens(self.model.geometry)

    @property
    def free_slots(self) -> int:
        """Slots that no sequence has."""
        return len(self.slots.free)

    # From a prompt to a seat.

    def chain(self, prompt: np.ndarray, *, namespace: str = "") -> TokenChain:
        """The prompt with its hashes; extend it and pass it again when a conversation grows."""
        chain = self.directory.chain(namespace, vocab_size=self.model.vocab_size)
        chain.extend(prompt)
        return chain

    def plan(self, chain: TokenChain, *, namespace: str = "", loads: bool = False) -> Plan | Miss:
        """What would be reused now. Changes nothing.

        Args:
          chain: the prompt.
          namespace: of the chain.
          loads: count what other tiers have; the plan then names what has to be brought first.

        Raises:
          UserError: the chain is of another namespace.
        """
        if chain.root != self.identity.root(namespace):
            raise UserError(
                f"the chain is not of namespace {namespace!r}: pass the namespace it was made for"
            )
        ideal = None
        if self.ledger is not None:
            ideal = min(self.ledger.longest(namespace, chain.tokens), chain.length - 1)
        if not self.sizes.reuse:
            return reuse_is_off(chain.length, self.plan_options, ideal)
        options = self.plan_options
        if loads and self.mover is not None:
            options = loading_options(options, self.mover, snapshots=self.sizes.snapshots > 0)
        return plan_prefix(self.directory, chain, self.model.geometry, options, ideal=ideal)

    def require_fits(self, tokens: int) -> int:
        """Blocks of a sequence of ``tokens`` tokens.

        Raises:
          NeverFits: the pool is smaller; shared blocks count too, since nothing frees them.
        """
        total, capacity = cdiv(tokens, self.model.geometry.block_tokens), self.sizes.capacity.blocks
        if total > capacity:
            raise NeverFits(tier=Tier.DEVICE, form=Form.BLOCK, needed=total, capacity=capacity)
        return total

    def hold(
        self, chain: TokenChain, *, tokens: int, namespace: str = "", loads: bool = False
    ) -> Hold:
        """Plans a prompt, leases what is shared and reserves the rest, or nothing.

        Args:
          chain: the prompt.
          tokens: room that it needs, new tokens included.
          namespace: of the chain.
          loads: as in ``plan``; room for what has to be brought is reserved with the rest.

        Raises:
          NoRoom: too little room now; nothing is held.
          NeverFits: the pool is too small for it.
        """
        total = self.require_fits(tokens)
        plan = self.plan(chain, namespace=namespace, loads=loads)
        return take_hold(
            self.allocator, chain, plan, namespace=namespace, tokens=tokens, blocks=total
        )

    def drop(self, hold: Hold) -> None:
        """Gives back what ``hold`` took."""
        drop_hold(self.allocator, hold)

    def seat(
        self,
        hold: Hold,
        *,
        policy: SnapshotPolicy | None = None,
        generated_from: int | None = None,
    ) -> Sequence:
        """Gives a held prompt a slot; computes nothing yet.

        Args:
          hold: what it holds.
          policy: where it writes snapshots, instead of the runner's.
          generated_from: where an earlier output begins in it, when it is computed again to be
            published: it then does not count as a prompt that finds something.

        Raises:
          NoSlot: no slot is free; the hold stays as it is.
        """
        self.slots.require_free()
        assert isinstance(hold.plan, Miss) or not len(hold.plan.loads), "not brought yet"
        allocator, generated = self.allocator, self.publisher.generated
        if generated_from is None:
            generated.found(hold.shared.entries)
        own = allocator.take(hold.reservation, Form.BLOCK, hold.blocks)
        allocator.cancel(hold.reservation)
        sequence = self.slots.take(
            lambda slot: Sequence.of(
                hold,
                slot=slot,
                own=own,
                exact=generated.exact(hold.read),
                policy=policy or self.sizes.policy,
                generated_from=generated_from,
            )
        )
        if self.writes_snapshots:
            sequence.snapshots_at = sequence.snapshot_positions(self.options.tile)
        self._admit(sequence)
        allocator.touch(hold.shared.entries)
        if hold.snapshot is not None:
            allocator.touch(hold.snapshot.entries)
            # Reading it is dispatched before anything that could overwrite it.
            allocator.release(hold.snapshot)
        return sequence

    @property
    def writes_snapshots(self) -> bool:
        """Whether prompts may leave snapshots: the model has states, and reuse is on."""
        return bool(snapshot_kinds(self.model.geometry)) and self.sizes.reuse

    def start(
        self,
        prompt: np.ndarray,
        *,
        max_new_tokens: int = 1,
        namespace: str = "",
        chain: TokenChain | None = None,
        policy: SnapshotPolicy | None = None,
    ) -> Sequence:
        """Plans, reserves and seats a prompt; computes nothing yet.

        Args:
          prompt: integer ``[tokens]``.
          max_new_tokens: tokens that may be decoded after it; room for them is reserved.
          namespace: prompts of different namespaces never share anything.
          chain: the prompt's hashes from ``chain``, to hash a grown conversation only once.
          policy: where this prompt writes snapshots, instead of the runner's.

        Raises:
          UserError: the prompt is not one this model takes, or can never fit.
          NoSlot: no slot is free.
          NoRoom: too little room now: finish a sequence and try again. Nothing is held.

        Where there are tiers this waits for what they have; an engine does not.
        """
        prompt = check_prompt(
            self.model,
            prompt,
            max_new_tokens=max_new_tokens,
            capacity_tokens=self.capacity_tokens,
        )
        self.slots.require_free()
        chain = chain or self.chain(prompt, namespace=namespace)
        if not np.array_equal(chain.tokens, prompt):
            raise UserError(
                f"the chain's {chain.length} tokens are not the prompt's {len(prompt)}: extend the "
                "chain by the new tokens first"
            )
        tokens = len(prompt) + max_new_tokens
        if self.mover is not None:
            hold = self.hold(chain, tokens=tokens, namespace=namespace, loads=True)
            try:
                bring(self.mover, hold)
            finally:
                self.drop(hold)
        hold = self.hold(chain, tokens=tokens, namespace=namespace)
        return self.seat(hold, policy=policy)

    def turn(self, *, decode_seconds: float = 0.0) -> bool:
        """Lets the tiers get on: once a turn of whoever runs sequences; whether anything moved.

        Args:
          decode_seconds: what the last decode step took, to be slowed by no more than
            ``TierOptions.decode_share``; 0 where nothing decodes.
        """
        if self.mover is None:
            return False
        return turn_mover(
            self.mover,
            self.plan_options.cost,
            block_bytes=self.model.geometry.block_bytes,
            decode_seconds=decode_seconds,
        )

    def prefetch(self, chain: TokenChain, *, namespace: str = "") -> None:
        """Starts to read what a prompt that waits would load from disk."""
        if self.mover is not None and self.mover.store is not None:
            plan = self.plan(chain, namespace=namespace, loads=True)
            if isinstance(plan, Plan):
                self.mover.wanted(plan)

    def close(self, *, timeout_s: float = 30.0) -> bool:
        """Stores what waits, within a time, and ends the tiers; see ``Mover.close``."""
        return self.mover is None or self.mover.close(timeout_s=timeout_s)

    def table(self, sequence: Sequence) -> np.ndarray:
        """Its block table, int32 ``[blocks_per_sequence]``."""
        capacity = self.sizes.capacity
        entries = np.concatenate([sequence.shared.entries, sequence.own.entries])
        table = np.full(capacity.blocks_per_sequence, capacity.blocks, np.int32)
        table[: len(entries)] = self.allocator.entries.place[Tier.DEVICE][entries]
        return table

    def _admit(self, sequence: Sequence) -> None:
        plan, place = sequence.plan, max(self.sizes.snapshots, 1)  # past the pool: none
        if isinstance(plan, Plan) and plan.snapshot >= 0:
            place = int(self.allocator.entries.place[Tier.DEVICE][plan.snapshot])
        self.cache = self.steps.admit(
            self.cache,
            self.snapshots,
            slot=sequence.slot,
            table=self.table(sequence),
            length=sequence.start,
            place=place,
        )

    # Computing.

    def measure_cost(self, *, repeats: int = 5) -> CostModel:
        """Times a tile step and the reading of a snapshot on this device, medians of ``repeats``.

        Pass it as ``RunnerOptions.cost`` to the next runner. Changes nothing.
        """
        cost, self.cache = calibration.measure_cost(
            self.steps, self.cache, self.snapshots, repeats=repeats
        )
        return cost

    def prefill(self, sequence: Sequence) -> np.ndarray:
        """Computes the prompt's remaining tokens, publishes them, and returns logits.

        Returns:
          float32 ``[vocab]`` of the last token; with ``options.all_logits``
          ``[tokens, vocab]`` of all from ``sequence.exact_from`` on.
        """
        first, parts = sequence.computed, []
        while sequence.computed < sequence.prompt_tokens:
            parts.append(self.tile(sequence))
        logits = [np.asarray(part)[0] for part in parts]
        self.publish(sequence)
        if not self.options.all_logits:
            return logits[-1]
        exact = max(sequence.exact_from - first, 0)
        return np.concatenate(logits)[exact : sequence.prompt_tokens - first]

    def tile(self, sequence: Sequence) -> jax.Array:
        """Computes the next tile of a prompt; its logits, as the tile step gives them."""
        return self.tiles((sequence,))

    def tiles(self, sequences: List[Sequence]) -> jax.Array:
        """Computes the next tile of each prompt, one a lane, in one step.

        Returns the step's logits; lane ``i`` is that of ``sequences[i]``.
        """
        lanes = [self._lane(sequence) for sequence in sequences]
        batch = tile_batch(lanes, self.options, self.sizes.capacity.slots)
        logits, self.cache = self.steps.tile(batch, self.cache)
        for sequence, lane in zip(sequences, lanes, strict=True):
            sequence.computed += len(lane.tokens)
            if sequence.computed in sequence.snapshots_at:
                self.store_snapshot(sequence)
        return logits

    def _lane(self, sequence: Sequence) -> LaneTile:
        self.slots.require_running(sequence)
        return next_tile(sequence, self.options.tile)

    def store_snapshot(self, sequence: Sequence) -> None:
        """Copies the state, which stands at a tile boundary, if there is room for a snapshot."""
        receipt = take_snapshot(self.allocator)
        if receipt is None:
            sequence.skipped_snapshots += 1
            return
        place = int(self.allocator.entries.place[Tier.DEVICE, receipt.entries[0]])
        self.snapshots = self.steps.write_snapshot(
            self.snapshots, self.cache, slot=sequence.slot, place=place
        )
        sequence.stored.append((sequence.computed, receipt))

    def decode(self, tokens: Mapping[Sequence, int]) -> dict[Sequence, np.ndarray]:
        """Consumes one token of each sequence; float32 logits ``[vocab]`` of each."""
        rows = np.asarray(self.advance(tokens))
        return {sequence: rows[sequence.slot] for sequence in tokens}

    def advance(self, tokens: Mapping[Sequence, int]) -> jax.Array:
        """Consumes one token of each sequence; the step's logits, float32 ``[slots, vocab]``."""
        for sequence in tokens:
            self.slots.require_running(sequence)
            require_decodes(sequence, self.model.geometry.block_tokens)
        batch = next_tokens(tokens, self.sizes.capacity.slots)
        for sequence, token in tokens.items():
            sequence.generated.append(token)
            sequence.computed += 1
        logits, self.cache = self.steps.decode(batch, self.cache)
        return logits

    # Publishing and giving back.

    def publish(self, sequence: Sequence) -> None:
        """Publishes every complete block of the prompt so far, then the snapshots on them."""
        if self.sizes.reuse:
            self.publisher.prompt(sequence, tile=self.options.tile)
            if self.mover is not None:
                self.mover.published(sequence.chain)
        computed = min(sequence.computed, sequence.prompt_tokens)
        self._note(sequence.namespace, sequence.chain.tokens[:computed])

    def publish_as_decoded(self, sequence: Sequence) -> None:
        """Publishes the blocks of generated tokens too, as decode steps made them.

        Marks them: a sequence that reads them is not ``exact``.
        """
        self.slots.require_running(sequence)
        if self.sizes.reuse and sequence.generated and not sequence.tokens_left:
            self.publisher.as_decoded(sequence)

    def finish(self, sequence: Sequence) -> None:
        """Gives everything back. What was published stays; the rest is free at once.

        Also ends a sequence whose prompt is only partly computed: its whole blocks are published.
        """
        self.slots.require_running(sequence)
        self.publish(sequence)
        computed = np.concatenate(
            [
                sequence.chain.tokens[: min(sequence.computed, sequence.prompt_tokens)],
                np.asarray(sequence.generated, np.uint32),
            ]
        )
        self._note(sequence.namespace, computed)
        self.release(sequence)

    def release(self, sequence: Sequence) -> None:
        """Gives slot and claims back and publishes nothing; ``finish`` is what ends a sequence."""
        self.slots.require_running(sequence)
        for receipt in (sequence.shared, sequence.own, *(r for _, r in sequence.stored)):
            self.allocator.release(receipt)
        sequence.stored = []
        self.slots.give_back(sequence)

    def _note(self, namespace: str, tokens: np.ndarray) -> None:
        if self.ledger is not None:
            self.ledger.add(namespace, tokens)
