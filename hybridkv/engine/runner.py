"""Sequences that begin from a plan: reserve, lease, admit, compute, publish, give back.

    prompt --chain--> plan_prefix --lease + reserve--> admit --tiles--> publish --decode--> finish
                          |              |                |        |
                        Miss: cold   NoRoom: wait     block table  snapshots at tile boundaries

One thread calls a runner. It owns the cache and the snapshots, which every step replaces, and all
bookkeeping. Nothing that it does to restore, miss, evict or publish compiles anything.
"""

import dataclasses
import time
from collections.abc import Callable, Mapping

import jax
import numpy as np

from hybridkv.arithmetic import cdiv
from hybridkv.blocks.allocator import Allocator
from hybridkv.blocks.entries import Form, Tier, kind_bits
from hybridkv.blocks.eviction import EvictionPolicy, SecondsPerByte
from hybridkv.blocks.leases import LeaseError, Receipt
from hybridkv.blocks.pools import NeverFits, NoRoom, PoolSizes
from hybridkv.blocks.transitions import TierState
from hybridkv.engine.generate import check_prompt
from hybridkv.engine.numerics import numerics_id
from hybridkv.engine.protocol import StepModel
from hybridkv.engine.steps import Steps, prompt_tiles
from hybridkv.errors import UserError
from hybridkv.geometry import Geometry
from hybridkv.prefixes.checks import byte_alignment
from hybridkv.prefixes.cost import BY_TILES, CostModel
from hybridkv.prefixes.directory import Directory
from hybridkv.prefixes.hashing import TokenChain
from hybridkv.prefixes.identity import Identity, weights_digest
from hybridkv.prefixes.ledger import Ledger
from hybridkv.prefixes.needs import block_kinds, snapshot_kinds
from hybridkv.prefixes.plan import Miss, Plan, PlanOptions, plan_prefix
from hybridkv.prefixes.policy import DEFAULT, SnapshotPolicy
from hybridkv.state.batch import DecodeBatch, StepOptions
from hybridkv.state.cache import Cache
from hybridkv.state.capacity import Capacity
from hybridkv.state.snapshot import Snapshots, snapshot_bytes


class NoSlot(RuntimeError):  # noqa: N818 - a condition to wait out, not a fault
    """Every slot is taken: finish a sequence first."""


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
    ledger: bool = True
    """Keep every token ever computed, at 4 bytes each, so that plans know the ideal hit and blame
    what is lost."""
    debug: bool = False
    """Walk all bookkeeping after every event."""


@dataclasses.dataclass(kw_only=True, eq=False)
class Sequence:
    """One prompt in its slot. Made by ``Runner.start``; only its runner changes it."""

    slot: int
    chain: TokenChain
    namespace: str
    prompt_tokens: int
    plan: Plan | Miss
    shared: Receipt
    own: Receipt
    snapshots_at: tuple[int, ...]
    computed: int
    """Tokens in the cache."""
    generated: list[int]
    stored: list[tuple[int, Receipt]]
    """Snapshots that are written and not yet published, with their positions."""
    skipped_snapshots: int = 0
    """Snapshots that found no room."""
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


class Runner:
    """Runs sequences one tile or one decode step at a time over one cache with prefix reuse."""

    def __init__(
        self,
        model: StepModel,
        options: StepOptions,
        sizes: RunnerOptions,
        *,
        identity: Identity | None = None,
    ) -> None:
        """Allocates, compiles, and starts with an empty directory.

        Args:
          model: the model.
          options: of its steps.
          sizes: of the pools, and policies.
          identity: what stored bytes depend on; computed where it is not given.

        Raises:
          UserError: the device cannot address blocks of this model.
        """
        geometry, capacity = model.geometry, sizes.capacity
        byte_alignment(geometry, capacity.blocks, jax.default_backend())
        self.model, self.options, self.sizes = model, options, sizes
        self.steps = Steps(model, options)
        self.identity = identity or identify(model, options)
        pool = PoolSizes(blocks=capacity.blocks, snapshots=sizes.snapshots)
        self.allocator = Allocator(
            {Tier.DEVICE: pool},
            policy=sizes.eviction or seconds_per_byte(geometry, options.tile, sizes.cost),
            clock=time.monotonic,
            debug=sizes.debug,
        )
        self.directory = Directory(
            self.allocator,
            self.identity,
            block_tokens=geometry.block_tokens,
            required_kinds=kind_bits((*block_kinds(geometry), *snapshot_kinds(geometry))),
        )
        self.ledger = Ledger() if sizes.ledger else None
        self.plan_options = PlanOptions(
            tile=options.tile,
            snapshot_bytes=sum(snapshot_bytes(geometry).values()),
            cost=sizes.cost,
            replay=sizes.replay,
        )
        self._free = list(range(capacity.slots))[::-1]
        self._running: dict[int, Sequence] = {}
        cache = self.steps.warm_up(Cache.init(geometry, capacity))
        snapshots = Snapshots.init(geometry, max(sizes.snapshots, 1))
        self.cache, self.snapshots = self.steps.warm_up_snapshots(cache, snapshots)

    @property
    def capacity_tokens(self) -> int:
        """Tokens of the longest sequence."""
        return self.sizes.capacity.tokens(self.model.geometry)

    def chain(self, prompt: np.ndarray, *, namespace: str = "") -> TokenChain:
        """The prompt with its hashes; extend it and pass it again when a conversation grows."""
        chain = self.directory.chain(namespace, vocab_size=self.model.vocab_size)
        chain.extend(prompt)
        return chain

    def plan(self, chain: TokenChain, *, namespace: str = "") -> Plan | Miss:
        """What would be reused now. Changes nothing.

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
        return plan_prefix(
            self.directory, chain, self.model.geometry, self.plan_options, ideal=ideal
        )

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
        """
        prompt = check_prompt(
            self.model,
            prompt,
            max_new_tokens=max_new_tokens,
            capacity_tokens=self.capacity_tokens,
        )
        if not self._free:
            raise NoSlot(f"all {self.sizes.capacity.slots} slots are taken")
        chain = chain or self.chain(prompt, namespace=namespace)
        if not np.array_equal(chain.tokens, prompt):
            raise UserError(
                f"the chain's {chain.length} tokens are not the prompt's {len(prompt)}: extend the "
                "chain by the new tokens first"
            )
        plan = self.plan(chain, namespace=namespace)
        shared, own = self._hold(plan, len(prompt) + max_new_tokens)
        sequence = Sequence(
            slot=self._free.pop(),
            chain=chain,
            namespace=namespace,
            prompt_tokens=len(prompt),
            plan=plan,
            shared=shared,
            own=own,
            snapshots_at=(),
            computed=0,
            generated=[],
            stored=[],
        )
        if snapshot_kinds(self.model.geometry):
            sequence.snapshots_at = (policy or self.sizes.policy).positions(
                tokens=len(prompt),
                start=sequence.start,
                exact_from=sequence.exact_from,
                shared=sequence.shared_tokens,
                tile=self.options.tile,
            )
        sequence.computed = sequence.start
        self._seat(sequence)
        self._running[sequence.slot] = sequence
        return sequence

    def measure_cost(self, *, repeats: int = 5) -> CostModel:
        """Times a tile step and the reading of a snapshot on this device, medians of ``repeats``.

        Pass it as ``RunnerOptions.cost`` to the next runner. Changes nothing: the tile's lane and
        the snapshot's reader sit past the last slot, so that every write is dropped.
        """
        nowhere = self.sizes.capacity.slots
        (batch,) = prompt_tiles(
            np.zeros(self.options.tile, np.int32),
            nowhere,
            self.options,
            nowhere,
            write_from=self.options.tile,
        )
        empty = np.full(self.sizes.capacity.blocks_per_sequence, 0, np.int32)

        def tile() -> None:
            logits, self.cache = self.steps.tile(batch, self.cache)
            logits.block_until_ready()

        def read() -> None:
            self.cache = self.steps.admit(
                self.cache, self.snapshots, slot=nowhere, table=empty, length=0, place=0
            )
            self.cache.lengths.block_until_ready()

        size = self.plan_options.snapshot_bytes
        return CostModel(
            tile_seconds=_median_seconds(tile, repeats),
            bytes_per_second={Tier.DEVICE: max(size, 1) / _median_seconds(read, repeats)},
        )

    def _hold(self, plan: Plan | Miss, tokens: int) -> tuple[Receipt, Receipt]:
        """Leases what the plan shares and reserves the rest, or neither."""
        allocator, empty = self.allocator, np.empty(0, np.int32)
        total = cdiv(tokens, self.model.geometry.block_tokens)
        if total > self.sizes.capacity.blocks:  # shared blocks count too: nothing frees them
            raise NeverFits(
                tier=Tier.DEVICE,
                form=Form.BLOCK,
                needed=total,
                capacity=self.sizes.capacity.blocks,
            )
        if isinstance(plan, Plan):
            shared = allocator.lease(plan.entries, plan.generations)
        else:
            shared = allocator.lease(empty)
        blocks = total - len(shared.entries)
        snapshot = None
        try:
            snapshot = self._lease_snapshot(plan)
            reservation = allocator.reserve(blocks=blocks)
        except (LeaseError, NoRoom, UserError):
            allocator.release(shared)
            raise
        finally:
            if snapshot is not None:
                # Reading it is dispatched before anything that could overwrite it.
                allocator.release(snapshot)
        own = allocator.take(reservation, Form.BLOCK, blocks)
        allocator.cancel(reservation)
        allocator.touch(shared.entries)
        if snapshot is not None:
            allocator.touch(snapshot.entries)
        return shared, own

    def _lease_snapshot(self, plan: Plan | Miss) -> Receipt | None:
        if not isinstance(plan, Plan) or plan.snapshot < 0:
            return None
        entry = np.array([plan.snapshot], np.int32)
        generation = np.array([plan.snapshot_generation], np.uint32)
        return self.allocator.lease(entry, generation)

    def _seat(self, sequence: Sequence) -> None:
        places = self.allocator.entries.place[Tier.DEVICE]
        entries = np.concatenate([sequence.shared.entries, sequence.own.entries])
        table = np.full(
            self.sizes.capacity.blocks_per_sequence, self.sizes.capacity.blocks, np.int32
        )
        table[: len(entries)] = places[entries]
        plan, place = sequence.plan, max(self.sizes.snapshots, 1)  # past the pool: none
        if isinstance(plan, Plan) and plan.snapshot >= 0:
            place = int(places[plan.snapshot])
        self.cache = self.steps.admit(
            self.cache,
            self.snapshots,
            slot=sequence.slot,
            table=table,
            length=sequence.start,
            place=place,
        )

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
        self._check_running(sequence)
        plan = sequence.plan
        end = min(sequence.computed + self.options.tile, sequence.prompt_tokens)
        (batch,) = prompt_tiles(
            sequence.chain.tokens[:end].astype(np.int32),
            sequence.slot,
            self.options,
            self.sizes.capacity.slots,
            start=sequence.computed,
            known_from=plan.known_from if isinstance(plan, Plan) else 0,
            write_from=sequence.shared_tokens,
        )
        logits, self.cache = self.steps.tile(batch, self.cache)
        sequence.computed = end
        if end in sequence.snapshots_at:
            self._store_snapshot(sequence)
        return logits

    def _store_snapshot(self, sequence: Sequence) -> None:
        """Copies the state to a snapshot of its own, if there is room for one."""
        try:
            reservation = self.allocator.reserve(snapshots=1)
        except (NoRoom, UserError):
            sequence.skipped_snapshots += 1
            return
        receipt = self.allocator.take(reservation, Form.SNAPSHOT, 1)
        self.allocator.cancel(reservation)
        place = int(self.allocator.entries.place[Tier.DEVICE, receipt.entries[0]])
        self.snapshots = self.steps.write_snapshot(
            self.snapshots, self.cache, slot=sequence.slot, place=place
        )
        sequence.stored.append((sequence.computed, receipt))

    def publish(self, sequence: Sequence) -> None:
        """Publishes every complete block of the prompt so far, then the snapshots on them.

        Device order makes the bytes final: whoever reads them is dispatched later. Blocks that
        another sequence published meanwhile stay private here.
        """
        block, allocator = self.model.geometry.block_tokens, self.allocator
        shared = sequence.shared_tokens // block
        done = min(sequence.computed, sequence.prompt_tokens) // block
        whole = sequence.own.entries[: max(done - shared, 0)]
        filling = allocator.entries.state[Tier.DEVICE, whole] == TierState.FILLING
        allocator.commit(whole[filling], kind_bits(block_kinds(self.model.geometry)))
        if len(self.directory.find(sequence.chain).entries) >= shared:
            self.directory.publish(sequence.chain, shared, whole)
        self._publish_snapshots(sequence)
        computed = min(sequence.computed, sequence.prompt_tokens)
        self._note(sequence.namespace, sequence.chain.tokens[:computed])

    def _publish_snapshots(self, sequence: Sequence) -> None:
        block = self.model.geometry.block_tokens
        shown = len(self.directory.find(sequence.chain).entries) * block
        for position, receipt in sequence.stored:
            self.allocator.commit(receipt.entries, kind_bits(snapshot_kinds(self.model.geometry)))
            if position <= shown:  # past a collision, or behind what was withdrawn, is nothing
                self.directory.publish_snapshot(sequence.chain, position, int(receipt.entries[0]))
            self.allocator.release(receipt)
        sequence.stored = []

    def decode(self, tokens: Mapping[Sequence, int]) -> dict[Sequence, np.ndarray]:
        """Consumes one token of each sequence; float32 logits ``[vocab]`` of each."""
        slots = self.sizes.capacity.slots
        ids, active = np.zeros(slots, np.int32), np.zeros(slots, bool)
        for sequence, token in tokens.items():
            self._check_running(sequence)
            if sequence.computed < sequence.prompt_tokens:
                raise UserError(
                    f"{sequence.prompt_tokens - sequence.computed} tokens of the prompt are not "
                    "computed yet: call prefill(sequence) first"
                )
            if sequence.computed >= self._room(sequence):
                raise UserError(
                    f"the sequence has no room for another token: it was started for "
                    f"{self._room(sequence)} tokens; give start() a larger max_new_tokens"
                )
            ids[sequence.slot], active[sequence.slot] = token, True
            sequence.generated.append(token)
            sequence.computed += 1
        batch = DecodeBatch(tokens=jax.device_put(ids), active=jax.device_put(active))
        logits, self.cache = self.steps.decode(batch, self.cache)
        rows = np.asarray(logits)
        return {sequence: rows[sequence.slot] for sequence in tokens}

    def _room(self, sequence: Sequence) -> int:
        held = len(sequence.shared.entries) + len(sequence.own.entries)
        return held * self.model.geometry.block_tokens

    def finish(self, sequence: Sequence) -> None:
        """Gives everything back. What was published stays; the rest is free at once.

        Also ends a sequence whose prompt is only partly computed: its whole blocks are published.
        """
        self._check_running(sequence)
        self.publish(sequence)
        computed = np.concatenate(
            [
                sequence.chain.tokens[: min(sequence.computed, sequence.prompt_tokens)],
                np.asarray(sequence.generated, np.uint32),
            ]
        )
        self._note(sequence.namespace, computed)
        self.allocator.release(sequence.shared)
        self.allocator.release(sequence.own)
        sequence.finished = True
        del self._running[sequence.slot]
        self._free.append(sequence.slot)

    def _note(self, namespace: str, tokens: np.ndarray) -> None:
        if self.ledger is not None:
            self.ledger.add(namespace, tokens)

    def _check_running(self, sequence: Sequence) -> None:
        if sequence.finished or self._running.get(sequence.slot) is not sequence:
            raise UserError("this sequence is finished: start a new one")


def _median_seconds(function: Callable[[], None], repeats: int) -> float:
    seconds = []
    for _ in range(repeats):
        began = time.perf_counter()
        function()
        seconds.append(time.perf_counter() - began)
    return float(np.median(seconds))


def seconds_per_byte(geometry: Geometry, tile: int, cost: CostModel) -> SecondsPerByte:
    """The default eviction policy: what a block or a snapshot saves when it is found again."""
    state = max(sum(snapshot_bytes(geometry).values()), 1)
    replay = cdiv(geometry.longest_replay_tokens, tile) * cost.tile_seconds
    return SecondsPerByte(
        block_seconds=cost.tile_seconds * geometry.block_tokens / tile,
        block_bytes=geometry.block_bytes,
        snapshot_seconds=replay,
        snapshot_bytes=state,
    )


def identify(model: StepModel, options: StepOptions) -> Identity:
    """The identity of everything this model stores under these options."""
    return Identity.of_geometry(
        model.geometry,
        weights=weights_digest(model.params),
        numerics=numerics_id(model, options),
    )
