"""Restores against cold runs, bit for bit: the ``restore``, ``poison`` and ``knockout`` checks."""

import dataclasses
import hashlib
from collections.abc import Callable, Iterator
from typing import Any

import command_line
import jax
import jax.numpy as jnp
import numpy as np

from hybridkv.blocks.entries import Form, Tier, kind_bits
from hybridkv.blocks.transitions import TierState
from hybridkv.engine.runner import Runner, RunnerOptions
from hybridkv.engine.sequence import Sequence
from hybridkv.kinds import Kind
from hybridkv.prefixes.needs import replay_start
from hybridkv.prefixes.plan import Miss, Plan
from hybridkv.prefixes.policy import DENSE, NEVER
from hybridkv.state.batch import StepOptions
from hybridkv.state.capacity import Capacity
from hybridkv.state.snapshot import Overlap, Snapshots
from hybridkv.state.tail import CompressorTail
from models.deepseek_v4.cache_formats import CACHE_FORMATS
from models.deepseek_v4.runtime import DeepseekV4Runtime
from models.deepseek_v4.toy import WIDE_TOY, toy_model
from models.llama.runtime import LlamaRuntime
from models.llama.toy import toy_llama

TILE, LONGEST, DECODED, SLOTS = 16, 176, 4, 3
MODES = {"copy": DENSE, "replay": NEVER}
COMPILATION = "/jax/core/compile/backend_compile_duration"


def toy_runtime(model: str) -> Any:
    """A random small model: ``deepseek_v4`` with every part, or ``llama``.

    ``deepseek_v4-NAME`` stores its rows in the cache formats of that name.
    """
    name, _, cache_format = model.partition("-")
    if name == "llama":
        return LlamaRuntime(toy_llama())
    if not cache_format:
        return DeepseekV4Runtime(toy_model())
    return DeepseekV4Runtime(toy_model(WIDE_TOY), format=CACHE_FORMATS[cache_format])


def make_runner(model: str, **more: Any) -> Runner:
    """A runner over a random small model on the default device; ``more`` of its options."""
    runtime = toy_runtime(model)
    options = StepOptions(
        tile=TILE,
        key_block=8,
        index_block=16,
        expert_rows=4,
        sequential=jax.default_backend() == "cpu",
        all_logits=True,
    )
    geometry = runtime.geometry
    each = Capacity.for_tokens(geometry, tokens=LONGEST + 2 * TILE)
    capacity = Capacity(blocks=400, slots=SLOTS, blocks_per_sequence=each.blocks)
    sizes = RunnerOptions(capacity=capacity, snapshots=100, debug=False, **more)
    return Runner(runtime, options, sizes)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """What one run of a prompt gave."""

    digests: tuple[str, ...]
    """Of the logits of each computed tile."""
    after: str
    """Of the logits of the tokens decoded after it."""
    plan: Plan | Miss

    def from_position(self, position: int) -> tuple[tuple[str, ...], str]:
        """Digests from a tile boundary on."""
        start = self.plan.start if isinstance(self.plan, Plan) else 0
        return self.digests[(position - start) // TILE :], self.after


def digest(array: np.ndarray) -> str:
    """A digest of the very bits."""
    return hashlib.blake2b(np.ascontiguousarray(array).tobytes(), digest_size=16).hexdigest()


class Prompts:
    """Random prompts over one runner; each cell has a namespace of its own."""

    def __init__(self, runner: Runner, seed: int) -> None:
        self.runner = runner
        self.rng = np.random.default_rng(seed)
        self.compilations = 0
        self._cells = 0

        def count(event: str, duration_secs: float, **_: str | int) -> None:
            self.compilations += event == COMPILATION

        jax.monitoring.register_event_duration_secs_listener(count)

    def ids(self, length: int) -> np.ndarray:
        """A random prompt."""
        return self.rng.integers(0, self.runner.model.vocab_size, length).astype(np.int32)

    def namespace(self) -> str:
        """A new namespace: what was stored before is as if it were not."""
        self._cells += 1
        return f"cell {self._cells}"

    def write(self, ids: np.ndarray, namespace: str, mode: str) -> None:
        """Computes and publishes a prompt, with snapshots at every tile or without any."""
        sequence = self.runner.start(ids, namespace=namespace, policy=MODES[mode])
        self.runner.prefill(sequence)
        self.runner.finish(sequence)

    def run(
        self,
        ids: np.ndarray,
        after: np.ndarray,
        namespace: str,
        *,
        neighbours: bool = False,
        prepare: Callable[[Sequence], None] | None = None,
    ) -> Run:
        """Runs a prompt and decodes ``after``; ``prepare`` acts between seat and first tile."""
        others = self._neighbours() if neighbours else []
        sequence = self.runner.start(
            ids, max_new_tokens=len(after) + 1, namespace=namespace, policy=NEVER
        )
        if prepare:
            prepare(sequence)
        digests = []
        while sequence.computed < sequence.prompt_tokens:
            before = sequence.computed
            logits = np.asarray(self.runner.tile(sequence))[0]
            digests.append(digest(logits[: sequence.computed - before]))
            self._step(others)
        rows = []
        for token in after:
            rows.append(self.runner.decode({sequence: int(token)})[sequence])
            self._step(others)
        self.runner.finish(sequence)
        for other in others:
            self.runner.finish(other)
        return Run(digests=tuple(digests), after=digest(np.stack(rows)), plan=sequence.plan)

    def _neighbours(self) -> list[Sequence]:
        """One sequence in the middle of its prompt, one that decodes."""
        started = []
        for length in (LONGEST - 10, TILE + 3):
            sequence = self.runner.start(
                self.ids(length), max_new_tokens=2 * TILE, namespace="neighbours", policy=NEVER
            )
            self.runner.tile(sequence)
            started.append(sequence)
        return started

    def _step(self, others: list[Sequence]) -> None:
        for other in others:
            if other.computed < other.prompt_tokens:
                self.runner.tile(other)
            elif len(other.generated) < TILE:
                self.runner.decode({other: int(self.rng.integers(0, 64))})


def cells(prompts: Prompts, count: int) -> Iterator[dict[str, Any]]:
    """Random prompts x every resume point x copy and replay x other neighbours, with digests."""
    done = 0
    while done < count:
        length = int(prompts.rng.integers(TILE + 1, LONGEST))
        ids, after = prompts.ids(length), prompts.ids(DECODED)
        cold = prompts.run(ids, after, prompts.namespace())
        for position in range(TILE, length, TILE):
            for mode in MODES:
                for neighbours in (False, True):
                    yield from _cell(prompts, ids, after, cold, position, mode, neighbours)
                    done += 1


def _cell(
    prompts: Prompts,
    ids: np.ndarray,
    after: np.ndarray,
    cold: Run,
    position: int,
    mode: str,
    neighbours: bool,
    prepare: Callable[[Sequence], None] | None = None,
) -> Iterator[dict[str, Any]]:
    namespace = prompts.namespace()
    other = (ids[position:] + 1) % prompts.runner.model.vocab_size
    prompts.write(np.concatenate([ids[:position], other]), namespace, mode)
    compilations = prompts.compilations
    warm = prompts.run(ids, after, namespace, neighbours=neighbours, prepare=prepare)
    geometry = prompts.runner.model.geometry
    start = position if mode == "copy" else replay_start(geometry, position, TILE)
    plan = warm.plan
    planned = isinstance(plan, Plan) and (plan.shared, plan.start) == (position, start)
    yield {
        "mode": mode,
        "neighbours": neighbours,
        "tokens": len(ids),
        "position": position,
        "planned": planned,
        "equal": warm.from_position(position) == cold.from_position(position),
        "compilations": prompts.compilations - compilations,
    }


def restore(model: str, count: int, seed: int) -> list[dict[str, Any]]:
    """``count`` restore cells of one model."""
    return list(cells(Prompts(make_runner(model), seed), count))


def poison(model: str, count: int, seed: int) -> list[dict[str, Any]]:
    """Restore cells with NaN or 0xFF in every byte that nothing owns when computation begins."""
    prompts = Prompts(make_runner(model), seed)
    rows: list[dict[str, Any]] = []
    while len(rows) < count:
        length = int(prompts.rng.integers(TILE + 1, LONGEST))
        ids, after = prompts.ids(length), prompts.ids(DECODED)
        cold = prompts.run(ids, after, prompts.namespace())
        for position in range(TILE, length, TILE):
            for mode in MODES:
                poison_free_slots(prompts.runner)
                rows += _cell(
                    prompts,
                    ids,
                    after,
                    cold,
                    position,
                    mode,
                    False,
                    prepare=lambda sequence: poison_unused(prompts.runner, sequence),
                )
    for row in rows:
        row["compilations"] = 0  # poisoning compiles, the steps do not
    return rows


def bad(x: jax.Array) -> jax.Array:
    """NaN, or for packed bytes all ones, of the form of ``x``."""
    if jnp.issubdtype(x.dtype, jnp.floating):
        return jnp.full_like(x, jnp.nan)
    return jnp.full_like(x, jnp.iinfo(x.dtype).max)


def _spoil(tree: Any, spoiled: np.ndarray) -> Any:
    """``tree`` with every leaf bad at the leading places that are set in ``spoiled``."""

    def one(x: jax.Array) -> jax.Array:
        mask = jnp.asarray(spoiled).reshape((-1,) + (1,) * (x.ndim - 1))
        return jnp.where(mask, bad(x), x)

    return jax.tree.map(one, tree)


def poison_free_slots(runner: Runner) -> None:
    """Spoils the state of every slot, while no sequence runs."""
    cache = runner.cache
    every = np.ones(cache.slots, bool)
    runner.cache = dataclasses.replace(cache, sequence=_spoil(cache.sequence, every))


def poison_unused(runner: Runner, sequence: Sequence) -> None:
    """Spoils all blocks but those shared, all free snapshots, and the empty open cells."""
    cache, entries = runner.cache, runner.allocator.entries
    whole = entries.state[Tier.DEVICE] == TierState.PRESENT

    def unused(form: Form, places: int) -> np.ndarray:
        mask = np.ones(places, bool)
        mask[entries.place[Tier.DEVICE, whole & (entries.form == form)]] = False
        return mask

    blocks = unused(Form.BLOCK, runner.sizes.capacity.blocks)
    runner.snapshots = _spoil(runner.snapshots, unused(Form.SNAPSHOT, runner.sizes.snapshots))
    tails = jax.tree.map(
        lambda tail: dataclasses.replace(tail, kv=bad(tail.kv), gate=bad(tail.gate)),
        cache.sequence.tails,
        is_leaf=lambda x: isinstance(x, CompressorTail),
    )
    runner.cache = dataclasses.replace(
        cache,
        compressed=_spoil(cache.compressed, blocks),
        indexer=_spoil(cache.indexer, blocks),
        sequence=dataclasses.replace(cache.sequence, tails=tails),
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Knockout:
    """One part of what is stored, taken away."""

    name: str
    kind: Kind
    remove: Callable[[Runner, int], None]
    """Zeroes the part's bytes at a place (of a block or of a snapshot)."""


def _zero(x: jax.Array, place: int) -> jax.Array:
    return x.at[place].set(jnp.zeros((), x.dtype))


def _zero_pool(name: str) -> Callable[[Runner, int], None]:
    def remove(runner: Runner, place: int) -> None:
        pool = jax.tree.map(lambda x: _zero(x, place), getattr(runner.cache, name))
        runner.cache = dataclasses.replace(runner.cache, **{name: pool})

    return remove


def _zero_snapshot(change: Callable[[Snapshots, int], Snapshots]) -> Callable[[Runner, int], None]:
    def remove(runner: Runner, place: int) -> None:
        runner.snapshots = change(runner.snapshots, place)

    return remove


def _without_window(snapshots: Snapshots, place: int) -> Snapshots:
    window = jax.tree.map(lambda x: _zero(x, place), snapshots.window)
    return dataclasses.replace(snapshots, window=window)


def _without_one_row(snapshots: Snapshots, place: int) -> Snapshots:
    """The newest row: at a tile boundary it stands last in the ring, the window dividing tiles."""

    def one(x: jax.Array) -> jax.Array:
        return x.at[place, (TILE - 1) % x.shape[1]].set(jnp.zeros((), x.dtype))

    return dataclasses.replace(snapshots, window=jax.tree.map(one, snapshots.window))


Overlaps = tuple[Overlap | None, ...]


def _without_overlap(overlaps: Overlaps, place: int) -> Overlaps:
    return jax.tree.map(lambda x: _zero(x, place), overlaps)


def _without_main(snapshots: Snapshots, place: int) -> Snapshots:
    return dataclasses.replace(snapshots, main=_without_overlap(snapshots.main, place))


def _without_index(snapshots: Snapshots, place: int) -> Snapshots:
    return dataclasses.replace(snapshots, index=_without_overlap(snapshots.index, place))


KNOCKOUTS = (
    Knockout(name="compressed rows", kind=Kind.COMPRESSED, remove=_zero_pool("compressed")),
    Knockout(name="index rows", kind=Kind.INDEXER, remove=_zero_pool("indexer")),
    Knockout(name="window", kind=Kind.WINDOW, remove=_zero_snapshot(_without_window)),
    Knockout(name="one window row", kind=Kind.WINDOW, remove=_zero_snapshot(_without_one_row)),
    Knockout(name="overlap", kind=Kind.TAIL, remove=_zero_snapshot(_without_main)),
    Knockout(name="index overlap", kind=Kind.TAIL, remove=_zero_snapshot(_without_index)),
)


def knockout(seed: int, repeats: int = 4) -> list[dict[str, Any]]:
    """Each kind, and parts of kinds, removed: with the guard the plan is shorter and blames it and
    the logits are those of a cold run; with the guard off (nobody tells it) they are not.
    """
    prompts = Prompts(make_runner("deepseek_v4"), seed)
    rows = []
    for part in KNOCKOUTS:
        tries = [_knock(prompts, part, guarded=True) for _ in range(repeats)]
        blind = [_knock(prompts, part, guarded=False) for _ in range(repeats)]
        rows.append(
            {
                "part": part.name,
                "kind": part.kind.value,
                "shorter": all(t["shorter"] for t in tries),
                "blamed": all(t["blamed"] for t in tries),
                "equal": all(t["equal"] for t in tries),
                "changed_unguarded": sum(not t["equal"] for t in blind),
                "repeats": repeats,
            }
        )
    return rows


def _knock(prompts: Prompts, part: Knockout, *, guarded: bool) -> dict[str, bool]:
    """Removes a part where a prompt of nine tiles would resume."""
    runner, position = prompts.runner, 8 * TILE
    ids, after = prompts.ids(position + 45), prompts.ids(DECODED)
    cold = prompts.run(ids, after, prompts.namespace())
    namespace = prompts.namespace()
    prompts.write(np.concatenate([ids[:position], ids[:3]]), namespace, "copy")
    entries = runner.allocator.entries
    match = runner.directory.find(runner.chain(ids, namespace=namespace))
    block = int(match.entries[position // runner.model.geometry.block_tokens - 2])
    last = int(match.entries[position // runner.model.geometry.block_tokens - 1])
    of_block = part.kind in (Kind.COMPRESSED, Kind.INDEXER)
    entry = block if of_block else int(entries.snapshot[last])
    part.remove(runner, int(entries.place[Tier.DEVICE, entry]))
    if guarded:
        entries.kinds[entry] &= np.uint8(0xFF ^ kind_bits((part.kind,)))
    warm = prompts.run(ids, after, namespace)
    plan = warm.plan
    assert isinstance(plan, Plan)
    return {
        "shorter": plan.start < position,
        "blamed": any(loss.kind is part.kind for loss in plan.losses),
        "equal": warm.from_position(position) == cold.from_position(position),
    }


def report_cells(title: str, results: dict[str, list[dict[str, Any]]]) -> bool:
    """Prints a table by model and mode; whether everything was equal, planned and compiled."""
    lines = []
    for model, rows in results.items():
        for mode in MODES:
            some = [row for row in rows if row["mode"] == mode]
            lines.append(
                (
                    model,
                    mode,
                    len(some),
                    sum(not row["equal"] for row in some),
                    sum(not row["planned"] for row in some),
                    sum(row["compilations"] for row in some),
                )
            )
    columns = ["model", "mode", "cells", "mismatches", "other plans", "compilations"]
    command_line.print_table(title, columns, lines)
    return all(line[3] == line[4] == line[5] == 0 and line[2] for line in lines)
