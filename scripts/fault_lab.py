"""One compiled engine of the toy model for many stores and many faults; see ``verify_faults``.

    compile once --attach(options)--> empty bookkeeping, new mover, maybe a store
                 --cold(request)----> what it gives alone, without tiers; kept

Bits are those of cold runs of the same executables. The clock is the machine's, but can be pushed
on, so that nothing is waited for that only needs time to pass. One thread.
"""

import contextlib
import dataclasses
import shutil
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from hybridkv.blocks.entries import Form, Tier
from hybridkv.blocks.invariants import InvariantError, check
from hybridkv.blocks.pools import PoolSizes
from hybridkv.blocks.transitions import TierState
from hybridkv.engine.cache_side import CacheSide
from hybridkv.engine.counters import EngineCounters
from hybridkv.engine.engine import Engine, EngineOptions
from hybridkv.engine.handle import Handle
from hybridkv.engine.requests import Finish, Output, Request
from hybridkv.engine.runner import RunnerOptions
from hybridkv.engine.steps import MOVED_BLOCKS
from hybridkv.prefixes.cost import BY_TILES
from hybridkv.prefixes.identity import Identity
from hybridkv.prefixes.policy import DENSE
from hybridkv.state.batch import StepOptions
from hybridkv.state.capacity import Capacity
from hybridkv.state.packing import block_spans, snapshot_spans
from hybridkv.tiers.faults import NO_FAULTS, Faults
from hybridkv.tiers.mover import Mover
from hybridkv.tiers.options import TierOptions
from hybridkv.tiers.store.records import StoreLayout
from models.deepseek_v4.runtime import DeepseekV4Runtime
from models.deepseek_v4.toy import toy_model

TILE, SLOTS, LANES, BLOCKS, SNAPSHOTS = 16, 3, 2, 24, 8
HOST = PoolSizes(blocks=64, snapshots=32)
DISK = PoolSizes(blocks=200, snapshots=100)
NEW = 6
"""Tokens that each request asks for."""
WAIT_S = 20.0
"""A request that has not ended after so long hangs."""


class Clock:
    """Seconds of the machine, and what was added."""

    def __init__(self) -> None:
        self.added = 0.0

    def __call__(self) -> float:
        """Never goes back."""
        return time.monotonic() + self.added


class Hung(AssertionError):  # noqa: N818 - reads as what happened
    """A request did not end in time."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Conversation:
    """A prompt by name."""

    name: str
    ids: np.ndarray
    namespace: str = ""


def conversations(vocab: int) -> dict[str, Conversation]:
    """Two that share a beginning, one alone, and one of another tenant."""

    def ids(blocks: int, beyond: int, seed: int) -> np.ndarray:
        count = blocks * TILE + beyond
        return np.random.default_rng(seed).integers(0, vocab, count).astype(np.int32)

    first = ids(7, 3, 1)
    fork = np.concatenate([first[: 4 * TILE], ids(2, 5, 2)])
    made = (
        Conversation(name="first", ids=first),
        Conversation(name="fork", ids=fork),
        Conversation(name="alone", ids=ids(5, 1, 3)),
        Conversation(name="tenant", ids=first[: 5 * TILE + 2], namespace="tenant"),
    )
    return {each.name: each for each in made}


class Lab:
    """The engine, and what its requests give cold."""

    def __init__(self, engine: Engine | None = None) -> None:
        """Compiles an engine, or takes one of the toy model that is like it."""
        self.clock = Clock()
        self.engine = engine or self._compiled()
        model = self.engine.runner.model
        self.talks = conversations(model.vocab_size)
        # Snapshots everywhere, so that prefixes come from other tiers whole.
        self._sizes = dataclasses.replace(self.engine.runner.sizes, policy=DENSE)
        self._cold: dict[str, Output] = {}
        self.attach(None)
        for talk in self.talks.values():
            (self._cold[talk.name],) = self.engine.run([self.request(talk)])
            self.engine.reset()

    def _compiled(self) -> Engine:
        options = StepOptions(
            tile=TILE,
            lanes=LANES,
            key_block=8,
            index_block=16,
            expert_rows=4,
            sequential=jax.default_backend() == "cpu",
        )
        model = DeepseekV4Runtime(toy_model())
        capacity = Capacity(blocks=BLOCKS, slots=SLOTS, blocks_per_sequence=12)
        sizes = RunnerOptions(
            capacity=capacity,
            snapshots=SNAPSHOTS,
            cost=BY_TILES,  # a tile is dear, so that what can be loaded is
            debug=True,
        )
        return Engine(
            model,
            options,
            sizes,
            EngineOptions(digests=True, strict=True, restore_s=5.0),
            identity=Identity.of_geometry(model.geometry, weights="toy", numerics="this process"),
            clock=self.clock,
        )

    @property
    def layout(self) -> StoreLayout:
        """Of this model's stores."""
        geometry = self.engine.runner.model.geometry
        return StoreLayout(
            block_tokens=geometry.block_tokens,
            block_spans=block_spans(geometry),
            snapshot_spans=snapshot_spans(geometry),
            segment_blocks=MOVED_BLOCKS,
        )

    def request(self, talk: Conversation) -> Request:
        """What is asked for a conversation, always the same."""
        return Request(prompt=talk.ids, max_new_tokens=NEW, namespace=talk.namespace)

    def options(self, path: Any, faults: Faults = NO_FAULTS, **more: Any) -> TierOptions:
        """Host and disk, both large enough."""
        if path is not None:
            more |= {"path": path, "disk": DISK}
        return TierOptions(host=HOST, faults=faults, **more)

    def attach(self, options: TierOptions | None) -> None:
        """Empties the engine and gives it other tiers, as a restart would."""
        engine = self.engine
        runner = engine.runner
        self.detach()
        runner.sizes = dataclasses.replace(self._sizes, tiers=options)
        engine.reset()
        engine.counters = EngineCounters()
        if options is not None:
            runner.mover = Mover(CacheSide(runner), options, runner.identity, clock=self.clock)
            engine.seating.restores = runner.mover

    def detach(self) -> bool:
        """Ends the tiers; whether all was stored."""
        engine = self.engine
        whole = engine.close(timeout_s=WAIT_S)
        engine.runner.mover = engine.seating.restores = None
        return whole

    @property
    def mover(self) -> Mover:
        """The engine's tiers."""
        assert self.engine.runner.mover is not None
        return self.engine.runner.mover

    # Running.

    def submit(self, name: str) -> Handle:
        """Asks for a conversation."""
        return self.engine.submit(self.request(self.talks[name]))

    def until(self, what: str, condition: Callable[[], bool], seconds: float = WAIT_S) -> None:
        """Steps until it holds.

        Raises:
          Hung: it does not in time.
        """
        end = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > end:
                raise Hung(f"{what} after {seconds:g} s: {self.engine.stages()}")
            self.engine.step()

    def finish(self, handles: dict[str, Handle]) -> list[str]:
        """Runs to the end; what is wrong with the outputs, a line each."""
        self.until("requests run", lambda: all(handle.done for handle in handles.values()))
        return [line for name, handle in handles.items() for line in self.differs(name, handle)]

    def differs(self, name: str, handle: Handle, *, logits: bool = True) -> list[str]:
        """Whether an output is not that of the cold run, bit for bit; a line each.

        Args:
          name: of the conversation.
          handle: of the request, which has ended.
          logits: compare those too; what was taken over has none of before.
        """
        cold, output = self._cold[name], handle.output
        if output.finish is not Finish.LENGTH:
            return [f"{name} ended as {output.finish}: {output.reason}"]
        if output.tokens != cold.tokens:
            return [f"{name} has wrong tokens"]
        if not output.exact:
            return [f"{name} says that it is not exact"]
        same = output.logits_digest == cold.logits_digest or not logits
        return [] if same else [f"{name} has the digest of other logits"]

    def ask(self, *names: str) -> list[str]:
        """Submits together and runs to the end; what is wrong."""
        return self.finish({name: self.submit(name) for name in names})

    def forget(self, *tiers: Tier, blocks: int | None = None) -> None:
        """Evicts published blocks, all by default, from tiers."""
        allocator = self.engine.runner.allocator
        for tier in tiers:
            can_go = allocator.evictable(Form.BLOCK, tier)
            allocator.evict(blocks=can_go if blocks is None else min(blocks, can_go), tier=tier)

    def flush(self) -> bool:
        """Stores what waits; idle work first, which publishes more."""
        end = time.monotonic() + WAIT_S
        while self.engine._idle.pending and time.monotonic() < end:
            if not self.engine.step():
                break
        whole = self.mover.flush(timeout_s=WAIT_S)
        self.mover._writer.submit(lambda: None).result(WAIT_S)  # removals too
        return whole

    def held(self) -> list[str]:
        """What is not at rest; a line each."""
        runner = self.engine.runner
        allocator, wrong = runner.allocator, []
        try:
            check(allocator)
        except InvariantError as error:
            wrong.append(str(error))
        state = allocator.entries.state
        counts = {
            "requests": self.engine.waiting,
            "open leases": len(allocator.leases.open),
            "leased entries": int(np.count_nonzero(allocator.entries.leases)),
            "reservations": len(allocator.reservations.left),
            "filling": int(np.count_nonzero(state == TierState.FILLING)),
            "draining": int(np.count_nonzero(state == TierState.DRAINING)),
            "slots in use": runner.sizes.capacity.slots - runner.free_slots,
            "loads": len(runner.mover._loads) if runner.mover is not None else 0,
            "compilations": self.engine.counters.compilations,
        }
        return wrong + [f"{count} {name} are left" for name, count in counts.items() if count]


@contextlib.contextmanager
def removed_after(path: Any) -> Iterator[Any]:
    """A folder that is deleted at the end."""
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
