"""Replays a trace of prompts against a snapshot policy, in numbers: no model, no bytes, no device.

    prompt --> ideal hit (nothing is ever evicted)  --> cheapest exact way to it --> ``Totals``
                                                              |
               ``Shelf``: blocks for ever, snapshots as the policy writes and drops them

Prompts are sequences of block ids; an id stands for all tokens up to its block's end, so that
blocks form a tree by themselves. One owner, one thread.
"""

import collections
import dataclasses
import functools
import gzip
import json
import pathlib
import zlib
from collections.abc import Sequence

import numpy as np

from hybridkv.arithmetic import cdiv, round_down
from hybridkv.blocks.entries import Tier
from hybridkv.errors import UserError
from hybridkv.geometry import Geometry
from hybridkv.prefixes.cost import CostModel
from hybridkv.prefixes.needs import replay_start
from hybridkv.prefixes.policy import SnapshotPolicy
from hybridkv.state.snapshot import snapshot_bytes

BLOCK = 512
"""Tokens of a trace's block, and of a tile here: a trace knows no finer position."""


class TraceError(UserError):
    """A trace that is missing or does not say what it should."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Prompt:
    """One request of a trace."""

    tokens: int
    blocks: np.ndarray
    """int64: ids of its whole blocks; an id stands for all tokens up to its block's end."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class World:
    """What is modelled beside the policy."""

    geometry: Geometry
    cost: CostModel
    """``tile_seconds`` is that of ``BLOCK`` tokens."""
    tier: Tier = Tier.DISK
    replay: bool = True
    """Whether state may be recomputed from stored blocks, as the planner does."""
    gigabytes: float | None = None
    """Most that a million stored tokens may take with their snapshots. Beyond it the snapshots
    least recently used go, those that are guesses first. None: no limit."""

    @functools.cached_property
    def block_bytes(self) -> int:
        """Bytes of ``BLOCK`` tokens."""
        return self.geometry.block_bytes * BLOCK // self.geometry.block_tokens

    @functools.cached_property
    def state_bytes(self) -> int:
        """Bytes of one snapshot."""
        return sum(snapshot_bytes(self.geometry).values())

    @functools.cached_property
    def snapshots_per_block(self) -> float:
        """The limit of ``gigabytes`` as snapshots for each stored block."""
        if self.gigabytes is None:
            return float("inf")
        return (self.gigabytes * 1e9 * BLOCK / 1e6 - self.block_bytes) / self.state_bytes

    def gigabytes_per_million(self, blocks: int, snapshots: int) -> float:
        """GB that a million tokens take, where so many blocks and snapshots are stored."""
        stored = blocks * self.block_bytes + snapshots * self.state_bytes
        return stored / (blocks * BLOCK) * 1e6 / 1e9

    def compute(self, start: int, end: int) -> float:
        """Seconds for the tiles from ``start`` to ``end``."""
        return self.cost.compute(start=start, tokens=end, tile=BLOCK)

    def load(self, position: int, *, state: bool) -> float:
        """Seconds to load the blocks before ``position``, and the snapshot there."""
        size = position // BLOCK * self.block_bytes + state * self.state_bytes
        return self.cost.move(self.tier, size)


def read_trace(path: pathlib.Path) -> list[Prompt]:
    """The prompts of a trace in order of arrival, from JSON lines, compressed with gzip or not.

    Raises:
      TraceError: the file cannot be read, or a line of it is no request of this format.
    """
    try:
        with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as lines:
            prompts = [_prompt(line, f"{path}, line {n}") for n, line in enumerate(lines, 1)]
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise TraceError(f"cannot read the trace {path}: {error}") from error
    if not any(len(prompt.blocks) for prompt in prompts):
        raise TraceError(f"{path} has no prompt of {BLOCK} tokens: nothing can be reused")
    return prompts


def _prompt(line: str, where: str) -> Prompt:
    try:
        row = json.loads(line)
        tokens, ids = row["input_length"], row["hash_ids"]
        blocks = np.asarray(ids[: tokens // BLOCK], np.int64)
    except (ValueError, KeyError, TypeError, OverflowError) as error:
        raise TraceError(f"{where}: no request with input_length and hash_ids ({error})") from error
    if tokens < 1 or len(ids) != cdiv(tokens, BLOCK) or blocks.ndim != 1 or (blocks < 0).any():
        raise TraceError(f"{where}: {tokens} tokens need {cdiv(tokens, BLOCK)} ids of at least 0")
    return Prompt(tokens=tokens, blocks=blocks)


@dataclasses.dataclass(kw_only=True)
class Totals:
    """Sums over a trace."""

    requests: int = 0
    hits: int = 0
    prompt: int = 0
    """Tokens."""
    ideal: int = 0
    """Tokens of the ideal hits."""
    reused: int = 0
    restore: float = 0.0
    """Seconds of all hits."""
    full_restore: float = 0.0
    new: float = 0.0
    """Seconds of tokens that nobody had computed."""
    new_of_hits: float = 0.0
    """The part of ``new`` in prompts that hit."""
    snapshots_written: int = 0
    peak: float = 0.0
    """GB a million tokens, at its highest after the first million."""


class Shelf:
    """What is stored while a trace is replayed: blocks for ever, snapshots as the policy says."""

    def __init__(self, ids: int, policy: SnapshotPolicy, world: World) -> None:
        self.policy, self.world = policy, world
        self.seen = np.zeros(ids, bool)
        self.next = np.full(ids, -1, np.int64)
        """By block: the first block that followed it."""
        self.parted = np.zeros(ids, bool)
        """By block: whether another one followed it too."""
        self.has_state = np.zeros(ids, bool)
        self.known: collections.OrderedDict[int, None] = collections.OrderedDict()
        """Blocks at whose end there is a snapshot, least recently used first."""
        self.guessed: collections.OrderedDict[int, None] = collections.OrderedDict()
        self.blocks = 0
        self.hit_at: set[int] = set()
        """Blocks at whose end a hit was ideal."""

    @property
    def snapshots(self) -> int:
        """Stored now."""
        return len(self.known) + len(self.guessed)

    def ways(self, prompt: Prompt, hit: int) -> list[tuple[float, int, int, bool]]:
        """(seconds to ``hit``, minus first computed position, exact from there, by a snapshot)."""
        world = self.world
        ways = [(world.compute(0, hit), 0, 0, False)]
        held = np.flatnonzero(self.has_state[prompt.blocks[: hit // BLOCK]])
        if len(held):
            at = BLOCK * (int(held[-1]) + 1)
            ways.append((world.load(at, state=True) + world.compute(at, hit), -at, at, True))
        if world.replay:
            start = replay_start(world.geometry, hit, BLOCK)
            seconds = world.load(hit, state=False) + world.compute(start, hit)
            ways.append((seconds, -start, hit if start else 0, False))
        return ways

    def use(self, block: int) -> None:
        """A hit resumed from the snapshot there: it is a guess no more."""
        self.guessed.pop(block, None)
        self.known[block] = None
        self.known.move_to_end(block)

    def write(self, prompt: Prompt, start: int, exact_from: int, shared: int) -> int:
        """The snapshots of one prompt; how many of them are new."""
        sizes = {"tokens": prompt.tokens, "tile": BLOCK, "shared": shared}
        positions = self.policy.positions(start=start, exact_from=exact_from, **sizes)
        guesses = set(self.policy.guesses(positions, **sizes))
        before = self.snapshots
        for position in positions:
            block = int(prompt.blocks[position // BLOCK - 1])
            if position not in guesses:
                self.use(block)
            elif block not in self.known:
                self.guessed[block] = None
            self.has_state[block] = True
        return self.snapshots - before

    def store(self, blocks: np.ndarray, found: int) -> None:
        """The blocks of a prompt, of which ``found`` were stored before."""
        for block, after in zip(
            blocks[max(found - 1, 0) : -1].tolist(), blocks[max(found, 1) :].tolist(), strict=True
        ):
            if self.next[block] < 0:
                self.next[block] = after
            elif self.next[block] != after:
                self.parted[block] = True
        self.blocks += len(blocks) - found
        self.seen[blocks] = True

    def trim(self, prompt: Prompt) -> None:
        """Drops what the policy no longer needs, then what is beyond the limit."""
        if self.policy.thin:
            own = self.has_state[prompt.blocks] & ~self.parted[prompt.blocks]
            positions = (BLOCK * (np.flatnonzero(own) + 1)).tolist()
            for position in self.policy.superseded(positions, tokens=prompt.tokens, tile=BLOCK):
                block = int(prompt.blocks[position // BLOCK - 1])
                self.has_state[block] = False
                self.known.pop(block, None)
                self.guessed.pop(block, None)
        while self.snapshots > self.world.snapshots_per_block * self.blocks:
            block, _ = (self.guessed or self.known).popitem(last=False)
            self.has_state[block] = False


def simulate(
    prompts: Sequence[Prompt], policy: SnapshotPolicy, world: World
) -> tuple[Totals, Shelf]:
    """Replays a trace: each prompt finds, restores, computes and stores before the next begins."""
    shelf = Shelf(1 + max(int(p.blocks.max(initial=-1)) for p in prompts), policy, world)
    sums = Totals()
    for prompt in prompts:
        blocks = prompt.blocks
        present = shelf.seen[blocks]
        found = len(blocks) if present.all() else int(np.argmin(present))
        hit = min(found * BLOCK, round_down(prompt.tokens - 1, BLOCK))
        start = exact_from = 0
        if hit:
            seconds, minus, exact_from, copied = min(shelf.ways(prompt, hit))
            start = -minus
            if copied:
                shelf.use(int(blocks[start // BLOCK - 1]))
            shelf.hit_at.add(int(blocks[hit // BLOCK - 1]))
            sums.hits += 1
            sums.restore += seconds
            sums.full_restore += min(world.compute(0, hit), world.load(hit, state=True))
        sums.requests += 1
        sums.prompt += prompt.tokens
        sums.ideal += hit
        sums.reused += start
        sums.new += world.compute(hit, prompt.tokens)
        sums.new_of_hits += world.compute(hit, prompt.tokens) if hit else 0.0
        sums.snapshots_written += shelf.write(prompt, start, exact_from, hit)
        shelf.store(blocks, found)
        shelf.trim(prompt)
        if shelf.blocks * BLOCK > 1e6:
            now = world.gigabytes_per_million(shelf.blocks, shelf.snapshots)
            sums.peak = max(sums.peak, now)
    return sums, shelf


def figures(sums: Totals, shelf: Shelf) -> dict[str, float]:
    """What one replay says of its policy."""
    world = shelf.world
    return {
        "gb_per_million": world.gigabytes_per_million(shelf.blocks, shelf.snapshots),
        "gb_per_million_peak": sums.peak,
        "gb_per_million_written": world.gigabytes_per_million(shelf.blocks, sums.snapshots_written),
        "restored_share": sums.reused / max(sums.ideal, 1),
        "recomputed_tokens_per_hit": (sums.ideal - sums.reused) / max(sums.hits, 1),
        "restore_ms": 1e3 * sums.restore / max(sums.hits, 1),
        "restore_ratio": sums.restore / sums.full_restore if sums.hits else 1.0,
        "first_token_ratio_of_hits": (sums.restore + sums.new_of_hits)
        / (sums.full_restore + sums.new_of_hits)
        if sums.hits
        else 1.0,
        "first_token_ratio": (sums.restore + sums.new) / (sums.full_restore + sums.new),
    }
