"""Whether a sequence's bits depend on its lane, its slot or its neighbours, on this very device.

    scene                             lanes of the tile step    active in the decode step
    alone                             [S]                       S, in slot 0
    alone in the last slot            [S]                       S, in the last slot
    first among neighbours            [S, a, b ...]             every slot
    last among the same neighbours    [a, b ..., S]             every slot
    among others                      [S, c, d ...]             every slot

Each scene computes the same subject S from nothing: one tile, then one decode step that completes
every open cell. Its logits, its blocks and its state must have the same bits in all of them. The
first two scenes, and the third and fourth, differ in where S is; the first, third and fifth in
what is beside it.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

import jax
import numpy as np

from hybridkv.arithmetic import cdiv
from hybridkv.engine.steps import (
    MOVED_BLOCKS,
    BlockWords,
    LaneTile,
    Steps,
    in_moves,
    tile_batch,
    to_device,
)
from hybridkv.state.batch import DecodeBatch
from hybridkv.state.cache import Cache
from hybridkv.state.sequence import SequenceState

Bits = Mapping[str, np.ndarray]
"""What a scene gave for its subject, by name."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Probe:
    """What a device was found to keep."""

    lanes_exact: bool
    """A sequence's bits are the same in every lane and slot."""
    neighbours_exact: bool
    """A sequence's bits are the same whatever else the step computes."""
    detail: str
    """One line: what was compared, or where bits first differed."""

    @property
    def exact(self) -> bool:
        """Several sequences may share a step."""
        return self.lanes_exact and self.neighbours_exact


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class _Member:
    """A sequence of a scene."""

    tokens: np.ndarray
    following: int
    """The token it decodes after them."""
    slot: int


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class _Scene:
    name: str
    members: Sequence[_Member]
    """In the order of lanes."""
    subject: int
    """Which of them is compared."""
    crowded: bool
    """Every slot decodes, not the subject alone."""


def probe(steps: Steps, cache: Cache, *, seed: int = 0) -> tuple[Probe, Cache]:
    """Compares the bits of one sequence in several places and companies. DONATES cache.

    Runs at most ten steps (13 where a tile step has one lane) and compiles nothing that
    ``Steps.warm_up`` and ``Steps.warm_up_moves`` have compiled before.

    Args:
      steps: the compiled steps.
      cache: of the engine's shape, without sequences and with nothing in its blocks worth keeping.
      seed: of the tokens.

    Returns:
      What was found, and the cache with its block tables as they were and lengths 0; the contents
      of blocks and slots are garbage, as before a first sequence.

    Raises:
      ValueError: the cache holds sequences.
    """
    if np.asarray(cache.lengths).any():
        raise ValueError("the probe writes to all slots: give it a cache without sequences")
    if cache.slots == 1:
        detail = "one slot: there is no other place and no neighbour"
        return Probe(lanes_exact=True, neighbours_exact=True, detail=detail), cache
    stage = _Stage(steps, cache)
    bits = {scene.name: stage.play(scene) for scene in _scenes(stage, np.random.default_rng(seed))}
    alone, moved, first, last, others = bits
    lanes = [*_differences(bits, alone, moved), *_differences(bits, first, last)]
    neighbours = [*_differences(bits, alone, first), *_differences(bits, alone, others)]
    detail = "; ".join([*lanes[:1], *neighbours[:1]]) or (
        f"logits and written bytes agree over {steps.options.lanes} lanes and {cache.slots} slots"
    )
    return Probe(
        lanes_exact=not lanes, neighbours_exact=not neighbours, detail=detail
    ), stage.cleared()


def _scenes(stage: "_Stage", rng: np.random.Generator) -> list[_Scene]:
    """The five of the module's table; neighbours are of random lengths."""
    vocab, last = stage.steps.model.vocab_size, stage.slots - 1

    def tokens(length: int) -> tuple[np.ndarray, int]:
        values = rng.integers(0, vocab, length + 1).astype(np.int32)
        return values[:-1], int(values[-1])

    def members(slots: Sequence[int], *sequences: tuple[np.ndarray, int]) -> list[_Member]:
        return [
            _Member(tokens=ids, following=following, slot=slot)
            for slot, (ids, following) in zip(slots, sequences, strict=True)
        ]

    longest = stage.longest
    count = stage.neighbours
    subject = tokens(longest)
    some = [tokens(int(rng.integers(1, longest + 1))) for _ in range(count)]
    others = [tokens(int(rng.integers(1, longest + 1))) for _ in range(count)]
    seats = list(range(count + 1))
    return [
        _Scene(name="alone", members=members([0], subject), subject=0, crowded=False),
        _Scene(
            name="alone in the last slot",
            members=members([last], subject),
            subject=0,
            crowded=False,
        ),
        _Scene(
            name="first among neighbours",
            members=members(seats, subject, *some),
            subject=0,
            crowded=True,
        ),
        _Scene(
            name="last among the same neighbours",
            members=members([*seats[:-1], last], *some, subject),
            subject=count,
            crowded=True,
        ),
        _Scene(
            name="among others",
            members=members(seats, subject, *others),
            subject=0,
            crowded=True,
        ),
    ]


class _Stage:
    """Plays scenes on one cache, each from the same bytes in the subject's blocks and slot."""

    def __init__(self, steps: Steps, cache: Cache) -> None:
        self.steps, self._cache = steps, cache
        self.slots, width = cache.block_table.shape
        self._tables = np.array(cache.block_table)
        pools = jax.tree.leaves((cache.compressed, cache.indexer))
        block = steps.model.geometry.block_tokens
        self._blocks = pools[0].shape[0] if pools else self.slots * width
        self._each = min(cdiv(steps.options.tile, block), width, self._blocks)
        self.longest = max(self._each * block - 1, 1)
        """Tokens of the subject's prompt: the token after them completes every cell."""
        room = min(self._blocks // self._each, self.slots) - 1
        self.neighbours = min(max(steps.options.lanes - 1, 1), room)
        """Sequences beside the subject that have a prompt."""
        # By way of the host: what steps return may be placed otherwise than what they take.
        self._state: SequenceState = to_device(jax.device_get(steps.read_state(cache, 0)))
        nowhere = np.full(MOVED_BLOCKS, self._blocks, np.int32)
        self._rows: BlockWords = to_device(jax.device_get(steps.read_blocks(cache, nowhere)))

    def play(self, scene: _Scene) -> Bits:
        """The subject's bits."""
        options = self.steps.options
        subject = scene.members[scene.subject]
        places = self._seat(scene)
        bits = {}
        for first in range(0, len(scene.members), options.lanes):
            part = scene.members[first : first + options.lanes]
            lanes = [LaneTile(tokens=m.tokens, slot=m.slot, start=0) for m in part]
            batch = tile_batch(lanes, options, self.slots)
            logits, self._cache = self.steps.tile(batch, self._cache)
            if first <= scene.subject < first + len(part):
                row = np.asarray(logits)[scene.subject - first]
                bits["tile logits"] = row[: self.longest] if options.all_logits else row
        logits, self._cache = self.steps.decode(self._decode_batch(scene), self._cache)
        bits["decode logits"] = np.asarray(logits)[subject.slot]
        bits["state"] = _bytes(self.steps.read_state(self._cache, subject.slot))
        parts = [_bytes(self.steps.read_blocks(self._cache, some)) for some in _moves(places)]
        bits["blocks"] = np.concatenate(parts)
        return bits

    def cleared(self) -> Cache:
        """The cache with the tables it came with, and without sequences."""
        for slot, table in enumerate(self._tables):
            self._write_seat(slot, table)
        return self._cache

    def _seat(self, scene: _Scene) -> np.ndarray:
        """Empty sequences in all slots; returns the subject's blocks."""
        numbers = np.arange(self._blocks, dtype=np.int32)
        tables = np.full_like(self._tables, self._blocks)
        for number, member in enumerate(scene.members):
            tables[member.slot, : self._each] = numbers[number * self._each :][: self._each]
        # Slots without a prompt decode from nothing: a block each while there are some.
        seated = {member.slot for member in scene.members}
        left = numbers[len(scene.members) * self._each :]
        for slot, place in zip(
            (s for s in range(self.slots) if s not in seated), left, strict=False
        ):
            tables[slot, 0] = place
        for slot, table in enumerate(tables):
            self._write_seat(slot, table)
        places = tables[scene.members[scene.subject].slot, : self._each]
        for some in in_moves(places):
            self._cache = self.steps.write_blocks(self._cache, self._rows, some)
        return places

    def _write_seat(self, slot: int, table: np.ndarray) -> None:
        self._cache = self.steps.write_state(
            self._cache, self._state, slot=slot, table=table, length=0
        )

    def _decode_batch(self, scene: _Scene) -> DecodeBatch:
        tokens = np.arange(self.slots, dtype=np.int32) % self.steps.model.vocab_size
        active = np.full(self.slots, scene.crowded)
        active[scene.members[scene.subject].slot] = True
        for member in scene.members:
            tokens[member.slot] = member.following
        return DecodeBatch(tokens=jax.device_put(tokens), active=jax.device_put(active))


def _moves(places: np.ndarray) -> Iterator[np.ndarray]:
    """``places`` by as many as move at once; the rest repeats the last, which changes nothing."""
    for first in range(0, len(places), MOVED_BLOCKS):
        part = places[first : first + MOVED_BLOCKS]
        yield np.pad(part, (0, MOVED_BLOCKS - len(part)), mode="edge")


def _bytes(tree: SequenceState | BlockWords) -> np.ndarray:
    """All bytes of a tree of device arrays."""
    leaves = jax.tree.leaves(jax.device_get(tree))
    parts = [np.ascontiguousarray(x).reshape(-1).view(np.uint8) for x in leaves]
    return np.concatenate(parts) if parts else np.zeros(0, np.uint8)


def _differences(bits: Mapping[str, Bits], one: str, other: str) -> Iterator[str]:
    """A sentence for each part whose bits differ between two scenes."""
    for part, mine in bits[one].items():
        theirs = bits[other][part]
        size = mine.dtype.itemsize
        mine, theirs = (np.ascontiguousarray(x).view(np.uint8) for x in (mine, theirs))
        wrong = (mine.reshape(-1, size) != theirs.reshape(-1, size)).any(axis=1)
        if wrong.any():
            yield (
                f"{part} differ in {np.count_nonzero(wrong)} of {wrong.size} values between "
                f"'{one}' and '{other}'"
            )
