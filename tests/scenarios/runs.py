"""Runners for the field scenarios: the TOY model for bits, one without arithmetic for counts."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from geometries import toy_geometry
from toy import TOY, digest, toy_options, toy_runtime

from hybridkv.blocks.entries import Form, Tier
from hybridkv.blocks.invariants import check
from hybridkv.engine.runner import Runner, RunnerOptions
from hybridkv.engine.sequence import Sequence
from hybridkv.geometry import Geometry
from hybridkv.prefixes.identity import Identity
from hybridkv.prefixes.plan import Miss, Plan, PlanOptions, plan_prefix
from hybridkv.prefixes.policy import NEVER, SnapshotPolicy
from hybridkv.state.batch import DecodeBatch, StepOptions, TileBatch
from hybridkv.state.cache import Cache
from hybridkv.state.capacity import Capacity
from hybridkv.state.tail import CompressorTail

TILE, VOCAB, LONGEST = 16, TOY.vocab_size, 176
GEOMETRY = toy_geometry()


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Run:
    """One prompt and the tokens decoded after it."""

    plan: Plan | Miss
    slot: int
    logits: np.ndarray
    """``[tokens, vocab]`` of the prompt's tokens from ``exact_from`` on."""
    after: np.ndarray
    """``[decoded tokens, vocab]``."""

    @property
    def start(self) -> int:
        return start_of(self.plan)

    @property
    def shared(self) -> int:
        return self.plan.shared if isinstance(self.plan, Plan) else 0

    def continues(self, cold: "Run") -> bool:
        """Whether every logit that counts has the bits of the cold run."""
        at = self.plan.exact_from if isinstance(self.plan, Plan) else 0
        same = digest(self.logits) == digest(cold.logits[at:])
        return same and len(self.logits) > 0 and digest(self.after) == digest(cold.after)


def start_of(plan: Plan | Miss) -> int:
    return plan.start if isinstance(plan, Plan) else 0


@functools.cache
def toy_runner() -> Runner:
    """The TOY model, as ``verify restore`` runs it; one a process, because it takes long."""
    runtime = toy_runtime()
    options = toy_options(tile=TILE, key_block=8, index_block=16)
    each = Capacity.for_tokens(runtime.geometry, tokens=LONGEST + 2 * TILE).blocks
    capacity = Capacity(blocks=400, slots=3, blocks_per_sequence=each)
    identity = Identity.of_geometry(runtime.geometry, weights="toy", numerics="here")
    sizes = RunnerOptions(capacity=capacity, snapshots=100)
    return Runner(runtime, options, sizes, identity=identity)


class Bench:
    """Runs prompts over one runner; every cold run has a namespace of its own."""

    _namespaces = 0

    def __init__(self, runner: Runner, seed: int) -> None:
        self.runner = runner
        self._rng = np.random.default_rng(seed)

    def ids(self, length: int) -> np.ndarray:
        """A random prompt."""
        return self._rng.integers(0, VOCAB, length).astype(np.int32)

    def namespace(self) -> str:
        """A new one: what was stored before is as if it were not."""
        Bench._namespaces += 1
        return f"scenario {Bench._namespaces}"

    def run(
        self,
        ids: np.ndarray,
        after: np.ndarray,
        namespace: str,
        *,
        policy: SnapshotPolicy = NEVER,
        prepare: Callable[[Sequence], None] = lambda sequence: None,
    ) -> Run:
        """A prompt from start to end; ``prepare`` acts between its seat and its first tile."""
        sequence = self.runner.start(
            ids, max_new_tokens=len(after) + 1, namespace=namespace, policy=policy
        )
        prepare(sequence)
        logits = self.runner.prefill(sequence)
        rows = self.decode(sequence, after)
        self.runner.finish(sequence)
        return Run(plan=sequence.plan, slot=sequence.slot, logits=logits, after=rows)

    def decode(self, sequence: Sequence, tokens: np.ndarray) -> np.ndarray:
        """Logits ``[tokens, vocab]`` after each of ``tokens``."""
        rows = [self.runner.decode({sequence: int(token)})[sequence] for token in tokens]
        return np.stack(rows) if rows else np.empty((0, VOCAB), np.float32)

    def cold(self, ids: np.ndarray, after: np.ndarray) -> Run:
        return self.run(ids, after, self.namespace())

    def plan(self, ids: np.ndarray, namespace: str) -> Plan | Miss:
        """What would be reused now."""
        chain = self.runner.chain(ids, namespace=namespace)
        return self.runner.plan(chain, namespace=namespace)

    def token_by_token(self, ids: np.ndarray) -> np.ndarray:
        """Logits of every position, all but the first through the decode step."""
        sequence = self.runner.start(
            ids[:1], max_new_tokens=len(ids), namespace=self.namespace(), policy=NEVER
        )
        first = self.runner.prefill(sequence)
        rest = self.decode(sequence, ids[1:])
        self.runner.finish(sequence)
        return np.concatenate([first, rest])

    def places(self, sequence: Sequence) -> np.ndarray:
        """Where each block of a running sequence lies in the pools."""
        entries = np.concatenate([sequence.shared.entries, sequence.own.entries])
        return self.runner.allocator.entries.place[Tier.DEVICE, entries]

    def rows(self, sequence: Sequence, layer: int, pools: str = "compressed") -> np.ndarray:
        """A copy of the stored rows of a running sequence, ``[rows, width]``."""
        pool = getattr(self.runner.cache, pools).layers[layer]
        rows = np.asarray(pool[jnp.asarray(self.places(sequence))])
        return rows.reshape(-1, rows.shape[-1])

    def spoil_slots(self) -> None:
        """NaN in the state of every slot, while no sequence runs."""
        cache = self.runner.cache
        state = jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), cache.sequence)
        self.runner.cache = dataclasses.replace(cache, sequence=state)

    def spoil_open_cells(self) -> None:
        """NaN in the open cells of every slot; overlaps stay."""
        cache = self.runner.cache
        nan = jnp.nan
        tails = jax.tree.map(
            lambda tail: dataclasses.replace(
                tail, kv=jnp.full_like(tail.kv, nan), gate=jnp.full_like(tail.gate, nan)
            ),
            cache.sequence.tails,
            is_leaf=lambda x: isinstance(x, CompressorTail),
        )
        state = dataclasses.replace(cache.sequence, tails=tails)
        self.runner.cache = dataclasses.replace(cache, sequence=state)

    def spoil_blocks(self, places: np.ndarray) -> None:
        """NaN in these blocks of every pool."""
        at, cache = jnp.asarray(places), self.runner.cache

        def spoil(pools: Any) -> Any:
            return jax.tree.map(lambda x: x.at[at].set(jnp.nan), pools)

        self.runner.cache = dataclasses.replace(
            cache, compressed=spoil(cache.compressed), indexer=spoil(cache.indexer)
        )


class CountingModel:
    """Counts tokens and computes nothing: all bookkeeping at full speed."""

    vocab_size = VOCAB
    pad_token = None
    params = ()

    def __init__(self, geometry: Geometry = GEOMETRY) -> None:
        self.geometry = geometry

    def tile_step(
        self, params: Any, batch: TileBatch, cache: Cache, options: StepOptions
    ) -> tuple[jax.Array, Cache]:
        del params
        lengths = cache.lengths.at[batch.slots].set(batch.ends, mode="drop")
        logits = jnp.zeros((options.lanes, VOCAB), jnp.float32)
        return logits, dataclasses.replace(cache, lengths=lengths)

    def decode_step(
        self, params: Any, batch: DecodeBatch, cache: Cache, options: StepOptions
    ) -> tuple[jax.Array, Cache]:
        del params, options
        lengths = cache.lengths + batch.active.astype(jnp.int32)
        logits = jnp.zeros((cache.slots, VOCAB), jnp.float32)
        return logits, dataclasses.replace(cache, lengths=lengths)


def counting_runner(
    *,
    blocks: int,
    snapshots: int = 32,
    slots: int = 3,
    per_sequence: int = 20,
    tile: int = TILE,
    geometry: Geometry = GEOMETRY,
    debug: bool = True,
    **more: Any,
) -> Runner:
    capacity = Capacity(blocks=blocks, slots=slots, blocks_per_sequence=per_sequence)
    sizes = RunnerOptions(capacity=capacity, snapshots=snapshots, debug=debug, **more)
    identity = Identity.of_geometry(geometry, weights="none", numerics="none")
    return Runner(CountingModel(geometry), StepOptions(tile=tile), sizes, identity=identity)


def request(runner: Runner, ids: np.ndarray, *, decoded: int = 0, **more: Any) -> Plan | Miss:
    """One prompt from start to end; its plan."""
    sequence = runner.start(ids, max_new_tokens=decoded + 1, **more)
    runner.prefill(sequence)
    for token in range(decoded):
        runner.decode({sequence: token % VOCAB})
    runner.finish(sequence)
    return sequence.plan


def tokens(length: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, VOCAB, length).astype(np.int32)


def joined(*parts: np.ndarray) -> np.ndarray:
    return np.concatenate(parts)


def plan_on(
    shelf: Any, ids: np.ndarray, *, tile: int = TILE, ideal: int | None = None, **more: Any
):
    """What would be reused of a shelf (see ``tests/shelves.py``)."""
    options = PlanOptions(tile=tile, **more)
    return plan_prefix(shelf.directory, shelf.chain(ids), shelf.geometry, options, ideal=ideal)


def lost(plan: Plan | Miss) -> dict[tuple[str, str | None], int]:
    return {(x.cause.value, x.kind.value if x.kind else None): x.tokens for x in plan.losses}


def used(runner: Runner, form: Form = Form.BLOCK) -> int:
    return runner.allocator.pools[Tier.DEVICE][form].used


def assert_at_rest(runner: Runner) -> None:
    """Nothing is leased or promised, and what is used is what is published."""
    allocator = runner.allocator
    check(allocator)
    assert not allocator.leases.open
    assert not allocator.reservations.left
    assert not allocator.entries.leases.any()
    for form in Form:
        published = allocator.entries.published & (allocator.entries.form == form)
        assert used(runner, form) == np.count_nonzero(published)


@contextlib.contextmanager
def smaller(runner: Runner, *, blocks: int = 0, snapshots: int = 0) -> Iterator[None]:
    """Promises places to nobody, so that the pools are as much smaller."""
    reservation = runner.allocator.reserve(blocks=blocks, snapshots=snapshots)
    try:
        yield
    finally:
        runner.allocator.cancel(reservation)
