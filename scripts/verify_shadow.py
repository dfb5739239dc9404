"""A fault in one kind's restore, and after how many requests it is caught and rolled back.

    request --reuse, faulty restore--> served     --cold run beside--> other bits --> rolled back

The toy model, one faulty restore at a time: what is copied or shared comes with other bytes of that
kind, and no digest and no check says so. Requests go on until the stage is off: at stage shadow,
where the safe path serves and nobody sees the fault, and at stage full. Without a fault the same
traffic must be found equal throughout.
"""

import contextlib
import dataclasses
import itertools
import pathlib
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

import command_line
import jax
import numpy as np

from hybridkv.blocks.entries import Form, Tier
from hybridkv.blocks.pools import PoolSizes
from hybridkv.engine.cache_side import CacheSide
from hybridkv.engine.engine import Engine, EngineOptions
from hybridkv.engine.handle import Handle
from hybridkv.engine.requests import Request
from hybridkv.engine.runner import Runner, RunnerOptions
from hybridkv.engine.sequence import Hold
from hybridkv.observe.rollout import RollbackCause, RolloutStage
from hybridkv.observe.rollout_file import Rollout, RolloutFile
from hybridkv.observe.rollout_schemes import RolloutOptions, RolloutSchemes
from hybridkv.observe.shadow import ShadowOptions, cold_sizes, requests_until_caught
from hybridkv.prefixes.identity import Identity
from hybridkv.prefixes.plan import Plan
from hybridkv.prefixes.policy import DENSE
from hybridkv.state.batch import StepOptions
from hybridkv.state.capacity import Capacity
from hybridkv.tiers.mover import Mover
from hybridkv.tiers.options import TierOptions
from models.deepseek_v4.runtime import DeepseekV4Runtime
from models.deepseek_v4.toy import toy_model

TILE, TILES, NEW = 16, 6, 4
"""Tokens of a tile; tiles that prompts share; new tokens of each."""
RUNS = (("shadow", 1.0), ("full", 1.0), ("full", 0.25))
"""Stages, and shares of requests that are run twice."""
SALT = "check"
ENOUGH = 8
"""Requests for each that is to be affected: a fault need not change every answer."""
ROOM = PoolSizes(blocks=64, snapshots=64)
"""Of a tier."""
Change = Callable[[Runner, Plan], None]


def make_engines() -> dict[str, Engine]:
    """The toy model with reuse, and cold."""
    model = DeepseekV4Runtime(toy_model())
    steps = StepOptions(
        tile=TILE,
        lanes=2,
        key_block=8,
        index_block=16,
        expert_rows=4,
        sequential=jax.default_backend() == "cpu",
    )
    capacity = Capacity(blocks=24, slots=3, blocks_per_sequence=12)
    sizes = RunnerOptions(capacity=capacity, snapshots=16)
    identity = Identity.of_geometry(model.geometry, weights="toy", numerics="this process")
    options = EngineOptions(digests=True)
    return {
        name: Engine(model, steps, each, options, identity=identity)
        for name, each in (("hybrid", sizes), ("cold", cold_sizes(sizes)))
    }


# Faults. Bytes are changed on the host, which compiles nothing.


def _at(tree: Any, place: int, change: Callable[[np.ndarray], np.ndarray]) -> Any:
    def one(x: jax.Array) -> jax.Array:
        values = np.array(x)
        values[place] = change(values[place])
        return jax.device_put(values, x.sharding)

    return jax.tree.map(one, tree)


def _nothing(values: np.ndarray) -> np.ndarray:
    return np.zeros_like(values)


def _next_row(values: np.ndarray) -> np.ndarray:
    return np.roll(values, 1, axis=0)


def _in_block(pool: str, change: Callable[[np.ndarray], np.ndarray]) -> Change:
    def spoil(runner: Runner, plan: Plan) -> None:
        for entry in plan.entries:
            place = int(runner.allocator.entries.place[Tier.DEVICE, entry])
            changed = _at(getattr(runner.cache, pool), place, change)
            runner.cache = dataclasses.replace(runner.cache, **{pool: changed})

    return spoil


def _in_snapshot(*parts: str) -> Change:
    def spoil(runner: Runner, plan: Plan) -> None:
        if plan.snapshot < 0:
            return
        place = int(runner.allocator.entries.place[Tier.DEVICE, plan.snapshot])
        changed = {name: _at(getattr(runner.snapshots, name), place, _nothing) for name in parts}
        runner.snapshots = dataclasses.replace(runner.snapshots, **changed)

    return spoil


FAULTS: Mapping[str, Change] = {
    "window": _in_snapshot("window"),
    "tail": _in_snapshot("main", "index"),
    "compressed": _in_block("compressed", _nothing),
    "indexer": _in_block("indexer", _next_row),
}
"""What goes wrong in the restore of each kind: left behind, or one row off."""


@contextlib.contextmanager
def faulty(engine: Engine, change: Change) -> Iterator[None]:
    """Every restore of this engine brings what ``change`` makes of it."""
    runner = engine.runner
    seat = runner.seat

    def seat_faulty(hold: Hold, **more: Any) -> Any:
        if isinstance(hold.plan, Plan) and hold.plan.reused:
            change(runner, hold.plan)
        return seat(hold, **more)

    with mock.patch.object(runner, "seat", seat_faulty):
        yield


class ZeroSide(CacheSide):
    """What comes from a tier, right by every digest, reaches the cache as zeros."""

    def write_blocks(self, blocks: Sequence[jax.Array], places: np.ndarray) -> None:
        """See ``CacheSide``."""
        super().write_blocks([_zeros(x) for x in blocks], places)

    def write_snapshot(self, words: jax.Array, place: int) -> None:
        """See ``CacheSide``."""
        super().write_snapshot(_zeros(words), place)


def _zeros(x: jax.Array) -> jax.Array:
    return jax.device_put(np.zeros(x.shape, x.dtype), x.sharding)


@contextlib.contextmanager
def tier(engine: Engine, options: TierOptions, side: type[CacheSide]) -> Iterator[None]:
    """A tier behind a compiled engine, for a while, which reaches the cache by ``side``."""
    runner, before = engine.runner, engine.runner.sizes
    runner.sizes = dataclasses.replace(before, tiers=options)
    engine.reset()
    runner.mover = Mover(side(runner), options, runner.identity)
    engine.seating.restores = runner.mover
    try:
        yield
    finally:
        runner.close(timeout_s=30.0)
        runner.mover = engine.seating.restores = None
        runner.sizes = before
        engine.reset()


# Traffic.


@dataclasses.dataclass(kw_only=True)
class Row:
    """What became of one fault."""

    kind: str
    stage: str
    """Before."""
    share: float
    """Of requests that are run twice."""
    bound: int
    """Affected requests within which it is caught with a probability of 0.99."""
    faulty: bool = True
    asked: int = 0
    """Requests."""
    affected: int = 0
    """Those of which reuse gave other bits than a cold run, until it was caught or at all."""
    compared: int = 0
    loaded: int = 0
    """Blocks and snapshots that came from a tier."""
    caught: bool = False
    rolled_back: bool = False
    """By itself, for a mismatch, and the state file says so."""
    safe_after: bool = False
    """The next request was served by the safe path alone."""
    stage_after: str = ""
    reason: str = ""

    @property
    def ok(self) -> bool:
        """Whether a fault was caught and nothing else was."""
        if self.faulty:
            return self.caught and self.rolled_back and self.safe_after
        same = self.compared == self.asked and not self.affected
        return same and not self.caught and self.stage_after == self.stage


class Traffic:
    """Prompts that share all but their last tokens, over engines that are emptied each time."""

    def __init__(self, engines: Mapping[str, Engine], folder: pathlib.Path, seed: int) -> None:
        self.engines, self._folder = engines, folder
        self._rng = np.random.default_rng(seed)
        self._files = 0

    def run(self, row: Row, limit: int, between: Callable[[], None] = lambda: None) -> Row:
        """Requests until the stage is off, at most ``limit``; ``between`` comes after each."""
        for engine in self.engines.values():
            engine.reset()
        self._files += 1
        path = self._folder / f"{self._files}.json"
        rollout = at_stage(path, row.stage)
        shadow = ShadowOptions(share=row.share, salt=SALT)
        schemes = RolloutSchemes(self.engines, rollout, RolloutOptions(shadow=shadow))
        reuse, common = self.engines["hybrid"].counters, self._ids(TILES * TILE)

        def ask() -> bool:
            """Whether what reuse gave, if it was asked at all, has other bits than a cold run."""
            prompt = np.concatenate([common, self._ids(int(self._rng.integers(2, TILE)))])
            request = Request(prompt=prompt, max_new_tokens=NEW, policy=DENSE)
            row.asked += 1
            run: Handle = schemes.submit(request)
            if schemes.stage is RolloutStage.SHADOW:
                run = schemes.shadows()[-1]["hybrid"]
            schemes.drain()
            between()
            (cold,) = self.engines["cold"].run([request])
            return run.output.logits_digest != cold.logits_digest

        ask()  # stores what the others share
        most = row.asked + ENOUGH * limit
        while row.affected < limit and row.asked < most and schemes.stage is not RolloutStage.OFF:
            row.affected += ask()
        state, counters = RolloutFile(path).read(), schemes.counters
        row.compared, row.caught = counters.compared, counters.mismatches > 0
        mover = self.engines["hybrid"].runner.mover
        if mover is not None:
            row.loaded = sum(mover.counters.loaded[tier] for tier in (Tier.HOST, Tier.DISK))
        row.stage_after, row.reason = state.stage.value, state.reason
        row.rolled_back = state.rolled_back and counters.rollbacks[RollbackCause.MISMATCH] == 1
        if row.caught:
            asked, submitted, served = row.asked, reuse.submitted, counters.served["cold"]
            row.safe_after = not ask() and counters.served["cold"] == served + 1
            row.safe_after &= reuse.submitted == submitted
            row.asked = asked
        return row

    def _ids(self, length: int) -> np.ndarray:
        vocab = self.engines["hybrid"].runner.model.vocab_size
        return self._rng.integers(0, vocab, length).astype(np.int32)


def at_stage(path: pathlib.Path, stage: str) -> Rollout:
    """A new rollout that a person brought to a stage."""
    rollout = Rollout(path)
    for to, percent in (("shadow", None), ("percent", 10.0), ("full", None)):
        if rollout.state.stage.value != stage:
            rollout.forward(
                RolloutStage(to), by="the check", reason="faults are planted", percent=percent
            )
    return rollout


def check(engines: Mapping[str, Engine] | None = None, *, seed: int = 0) -> list[Row]:
    """Every fault at every stage and share, then the tiers, then no fault at all.

    Args:
      engines: ``hybrid`` and ``cold``, of the toy model; made where they are not given.
      seed: of the prompts.
    """
    engines = engines or make_engines()
    reuse, rows = engines["hybrid"], []
    with tempfile.TemporaryDirectory() as folder:
        traffic = Traffic(engines, pathlib.Path(folder), seed)
        for kind, change in FAULTS.items():
            for stage, share in RUNS:
                bound = requests_until_caught(share)
                row = Row(kind=kind, stage=stage, share=share, bound=bound)
                with faulty(reuse, change):
                    rows.append(traffic.run(row, bound))
        for name, wrong in itertools.product(("host", "disk"), (True, False)):
            kind = f"{name} tier" if wrong else f"none, {name} tier"
            row = Row(kind=kind, stage="full", share=1.0, bound=1, faulty=wrong)
            options = _tier_options(name, pathlib.Path(folder) / f"store {wrong}")
            with tier(reuse, options, ZeroSide if wrong else CacheSide):
                rows.append(traffic.run(row, 1, lambda: _leave_to_the_tier(reuse)))
        row = Row(kind="none", stage="full", share=1.0, bound=1, faulty=False)
        rows.append(traffic.run(row, 1))
        for engine in engines.values():
            engine.reset()
    return rows


def report(rows: Sequence[Row]) -> bool:
    """Prints a table; whether all is as it has to be."""
    command_line.print_table(
        "a fault in the restore of one kind: affected requests until a cold run beside catches it",
        [
            *("kind", "stage", "twice", "requests", "until caught", "bound"),
            *("stage after", "right"),
        ],
        [
            (
                row.kind,
                row.stage,
                f"{row.share:.0%}",
                row.asked,
                _until_caught(row),
                row.bound if row.faulty else "-",
                row.stage_after,
                "yes" if row.ok else "NO",
            )
            for row in rows
        ],
    )
    return all(row.ok for row in rows)


def _until_caught(row: Row) -> str:
    if row.caught:
        return str(row.affected)
    return f"not in {row.affected}" if row.faulty else "-"


def _tier_options(name: str, path: pathlib.Path) -> TierOptions:
    return TierOptions(host=ROOM) if name == "host" else TierOptions(disk=ROOM, path=path)


def _leave_to_the_tier(engine: Engine) -> None:
    """What is published and stored leaves the device."""
    runner = engine.runner
    if runner.mover is None or not runner.mover.flush(timeout_s=30.0):
        return
    for form, name in ((Form.SNAPSHOT, "snapshots"), (Form.BLOCK, "blocks")):
        count = runner.allocator.evictable(form, Tier.DEVICE)
        runner.allocator.evict(tier=Tier.DEVICE, **{name: count})
