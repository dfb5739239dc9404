"""Parking: a decoding sequence leaves its slot and its blocks, and comes back with its own bits.

    slot, blocks --park--> Parked (host memory, private) --unpark--> any slot, any blocks

Generated rows come from decode steps, so they are in no directory and cannot be made again exactly;
a parked sequence therefore takes all its bytes along. Blocks of its prompt that are still
published when it returns are leased again instead of written. The bytes carry a digest.
"""

import dataclasses
import hashlib

import jax
import numpy as np

from hybridkv.arithmetic import cdiv
from hybridkv.blocks.entries import Form, Tier
from hybridkv.blocks.leases import LeaseError
from hybridkv.blocks.pools import NoRoom
from hybridkv.blocks.transitions import TierState
from hybridkv.engine.runner import Runner
from hybridkv.engine.sequence import NoSlot, Sequence
from hybridkv.engine.steps import MOVED_BLOCKS, in_moves, to_device
from hybridkv.errors import UserError
from hybridkv.prefixes.hashing import TokenChain
from hybridkv.prefixes.plan import Miss, Plan
from hybridkv.state.sequence import SequenceState

Moves = tuple[tuple[np.ndarray, ...], ...]


class ParkedBytesLost(RuntimeError):  # noqa: N818 - reads as what happened
    """A parked sequence's bytes are not those that were put away."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Parked:
    """A sequence without a seat. Everything is in host memory."""

    chain: TokenChain
    namespace: str
    prompt_tokens: int
    plan: Plan | Miss
    generated: tuple[int, ...]
    computed: int
    exact: bool
    room: int
    """Blocks it was admitted with."""
    entries: np.ndarray
    """int32: its blocks when it was parked, in order."""
    generations: np.ndarray
    moves: Moves
    """Words of ``MOVED_BLOCKS`` blocks each: those with tokens, in order."""
    state: SequenceState
    digest: bytes

    @property
    def nbytes(self) -> int:
        """Bytes of host memory."""
        return sum(x.nbytes for x in jax.tree.leaves((self.moves, self.state)))


def parked_bytes(runner: Runner, tokens: int) -> int:
    """Host bytes that parking a sequence of ``tokens`` tokens takes."""
    geometry = runner.model.geometry
    moves = cdiv(cdiv(tokens, geometry.block_tokens), MOVED_BLOCKS)
    return moves * MOVED_BLOCKS * geometry.block_bytes + sum(geometry.sequence_bytes.values())


def park(runner: Runner, sequence: Sequence) -> Parked:
    """Copies a sequence to host memory, publishes its prompt, and gives everything back.

    Raises:
      UserError: its prompt is not computed yet: finish it and start it again instead.
    """
    if sequence.tokens_left:
        raise UserError("a sequence is parked while it decodes: finish it and start it again")
    runner.publish(sequence)
    entries = np.concatenate([sequence.shared.entries, sequence.own.entries])
    moves, state = copy_out(runner, sequence)
    parked = Parked(
        chain=sequence.chain,
        namespace=sequence.namespace,
        prompt_tokens=sequence.prompt_tokens,
        plan=sequence.plan,
        generated=tuple(sequence.generated),
        computed=sequence.computed,
        exact=sequence.exact,
        room=len(entries),
        entries=entries,
        generations=runner.allocator.entries.generation[entries],
        moves=moves,
        state=state,
        digest=digest_of(moves, state),
    )
    runner.release(sequence)
    return parked


def copy_out(runner: Runner, sequence: Sequence) -> tuple[Moves, SequenceState]:
    """The blocks with tokens and the state of a sequence, on the host; it goes on as it was.

    A lease of its own keeps the blocks until they are copied, whatever ends the sequence meanwhile.
    """
    entries = np.concatenate([sequence.shared.entries, sequence.own.entries])
    used = entries[: cdiv(sequence.computed, runner.model.geometry.block_tokens)]
    fence = runner.allocator.lease(used)
    try:
        state = runner.steps.read_state(runner.cache, sequence.slot)
        places = runner.allocator.entries.place[Tier.DEVICE, used]
        copies = [runner.steps.read_blocks(runner.cache, part) for part in in_moves(places)]
        moves, state = jax.device_get((tuple(copies), state))
    finally:
        runner.allocator.release(fence)
    return moves, state


def unpark(runner: Runner, parked: Parked) -> Sequence:
    """Seats a parked sequence again, in whatever slot and blocks are free.

    Raises:
      ParkedBytesLost: the digest does not fit.
      NoSlot: no slot is free. Nothing is held.
      NoRoom: too little room now. Nothing is held.
    """
    if not runner.free_slots:
        raise NoSlot("all slots are taken")
    require_undamaged(parked)
    allocator = runner.allocator
    still = _still_published(runner, parked)
    shared = allocator.lease(parked.entries[:still], parked.generations[:still])
    try:
        reservation = allocator.reserve(blocks=parked.room - still)
    except (LeaseError, NoRoom, UserError):
        allocator.release(shared)
        raise
    own = allocator.take(reservation, Form.BLOCK, parked.room - still)
    allocator.cancel(reservation)
    allocator.touch(shared.entries)
    sequence = runner.slots.take(
        lambda slot: Sequence(
            slot=slot,
            chain=parked.chain,
            namespace=parked.namespace,
            prompt_tokens=parked.prompt_tokens,
            plan=parked.plan,
            shared=shared,
            own=own,
            computed=parked.computed,
            generated=list(parked.generated),
            exact=parked.exact,
        )
    )
    _write(runner, parked, sequence)
    return sequence


def require_undamaged(parked: Parked) -> None:
    """Raises ParkedBytesLost where the digest does not fit."""
    if digest_of(parked.moves, parked.state) != parked.digest:
        raise ParkedBytesLost(f"{parked.computed} parked tokens do not have their digest")


def _still_published(runner: Runner, parked: Parked) -> int:
    """How many leading blocks are what they were, and stay while they are leased."""
    columns, entries = runner.allocator.entries, parked.entries
    same = columns.generation[entries] == parked.generations
    same &= columns.published[entries]
    same &= columns.state[Tier.DEVICE, entries] == TierState.PRESENT
    return len(same) if same.all() else int(np.argmin(same))


def _write(runner: Runner, parked: Parked, sequence: Sequence) -> None:
    """Bytes of the sequence's own blocks, then its state."""
    entries = np.concatenate([sequence.shared.entries, sequence.own.entries])
    places = runner.allocator.entries.place[Tier.DEVICE, entries].copy()
    places[: len(sequence.shared.entries)] = runner.sizes.capacity.blocks  # written to nowhere
    used = places[: cdiv(parked.computed, runner.model.geometry.block_tokens)]
    for part, blocks in zip(in_moves(used), parked.moves, strict=True):
        if (part < runner.sizes.capacity.blocks).any():
            runner.cache = runner.steps.write_blocks(runner.cache, to_device(blocks), part)
    runner.cache = runner.steps.write_state(
        runner.cache,
        to_device(parked.state),
        slot=sequence.slot,
        table=runner.table(sequence),
        length=parked.computed,
    )


def digest_of(moves: Moves, state: SequenceState) -> bytes:
    """Of the bytes that are put away."""
    total = hashlib.blake2b(digest_size=32)
    for array in jax.tree.leaves((moves, state)):
        total.update(np.ascontiguousarray(array).view(np.uint8).reshape(-1).data)
    return total.digest()
