"""Handing a sequence from one process to another: a prefill process to a decode process.

    sender    sequence --export--> HandOff --bytes--> receiver   --import--> any slot, any blocks
    engine    hand_off: ends as HANDED_OFF            take_over: waits like a parked one, goes on

A ``HandOff`` is a copy in host memory: the sender's slot and blocks are free once it is made, and
the sender keeps it until the receiver has confirmed, to send it again or to take it over itself.
The receiver may have another capacity, other slots and other blocks; it takes all kinds or nothing,
and decoding goes on with the bits of an unbroken one. One thread, that of the runner.
"""

import dataclasses

import numpy as np

from hybridkv.arithmetic import cdiv, round_up
from hybridkv.engine.parking import (
    Moves,
    Parked,
    ParkedBytesLost,
    copy_out,
    digest_of,
    require_undamaged,
    unpark,
)
from hybridkv.engine.requests import Piece, Request
from hybridkv.engine.runner import Runner
from hybridkv.engine.sequence import Sequence
from hybridkv.engine.steps import MOVED_BLOCKS
from hybridkv.engine.stops import StopMatcher
from hybridkv.engine.task import Task, Text, TextStream
from hybridkv.errors import UserError
from hybridkv.prefixes.hashing import TokenChain, as_tokens
from hybridkv.prefixes.plan import NO_ENTRIES, NO_GENERATIONS, Miss
from hybridkv.state.logical import state_of, state_words, whole_cells
from hybridkv.state.packing import block_spans, state_spans
from hybridkv.state.sequence import SequenceState
from hybridkv.tiers.handoff_record import HandOff, HandOffRefused
from hybridkv.tiers.record_parts import why_foreign

# A runner's sequence.


def export_sequence(
    runner: Runner, sequence: Sequence, *, next_token: int | None = None
) -> HandOff:
    """Copies a sequence, at whatever position it is, out of a runner; it goes on as it was.

    Args:
      runner: the sequence's.
      sequence: that has computed something. Finish it once the copy is made.
      next_token: what was chosen from its last logits, if something was.

    Raises:
      HandOffRefused: nothing of it is computed, its state is being replayed, or it ended while it
        was copied.
    """
    if sequence.finished or not sequence.computed:
        raise HandOffRefused("nothing of the sequence is computed: start its prompt elsewhere")
    if sequence.computed < sequence.exact_from:
        raise HandOffRefused(
            f"the sequence is replaying up to {sequence.exact_from}: compute its prompt first"
        )
    prompt = sequence.chain.tokens[: sequence.prompt_tokens]
    generated, computed = tuple(sequence.generated), sequence.computed
    moves, state = copy_out(runner, sequence)
    if sequence.finished:
        raise HandOffRefused("the sequence ended while it was copied: nothing is handed off")
    chosen = generated if next_token is None else (*generated, next_token)
    tokens = np.concatenate([prompt, as_tokens(chosen)])
    return _handoff(
        runner, sequence.namespace, tokens, len(prompt), computed, sequence.exact, moves, state
    )


def export_parked(runner: Runner, parked: Parked, *, next_token: int | None = None) -> HandOff:
    """A parked sequence as a hand-off; its bytes are on the host already.

    Raises:
      HandOffRefused: its bytes are not those that were put away.
    """
    try:
        require_undamaged(parked)
    except ParkedBytesLost as lost:
        raise HandOffRefused(f"{lost}: let the request go on here, which computes them") from None
    prompt = parked.chain.tokens[: parked.prompt_tokens]
    chosen = parked.generated if next_token is None else (*parked.generated, next_token)
    return _handoff(
        runner,
        parked.namespace,
        np.concatenate([prompt, as_tokens(chosen)]),
        len(prompt),
        parked.computed,
        parked.exact,
        parked.moves,
        parked.state,
    )


def import_sequence(
    runner: Runner, handoff: HandOff, *, max_new_tokens: int, namespace: str = ""
) -> Sequence:
    """Seats a sequence that was handed off, and publishes what is whole of its prompt.

    Blocks of its prompt that are published here already are shared. What was chosen and is not
    consumed is ``handoff.pending``; decode that next.

    Args:
      runner: of the same identity.
      handoff: the sequence.
      max_new_tokens: tokens that may be decoded after its position, or after its prompt.
      namespace: that its sender had.

    Raises:
      HandOffRefused: it is not whole, or not of this identity, namespace and layout.
      UserError: it can never fit.
      NoSlot: no slot is free. Nothing is held.
      NoRoom: too little room now. Nothing is held.
    """
    room = max(handoff.computed, handoff.prompt_tokens) + max_new_tokens
    sequence = unpark(runner, parked_from(runner, handoff, room=room, namespace=namespace))
    runner.publish(sequence)
    return sequence


def parked_from(runner: Runner, handoff: HandOff, *, room: int, namespace: str) -> Parked:
    """A hand-off as a parked sequence of ``room`` tokens.

    Raises:
      HandOffRefused: it is not whole, or not of this identity, namespace and layout.
      UserError: it can never fit.
    """
    chain = _require_ours(runner, handoff, namespace)
    handoff.require_whole()
    blocks = runner.require_fits(room)
    if room > runner.capacity_tokens:
        raise UserError(
            f"the sequence needs room for {room} tokens and this engine has "
            f"{runner.capacity_tokens} a sequence: use one of a larger capacity"
        )
    entries, generations = _published(runner, handoff, chain)
    geometry, computed = runner.model.geometry, handoff.computed
    moves, state = _moves(handoff.blocks), state_of(geometry, handoff.state, computed)
    generated = handoff.generated
    same = handoff.decode == decode_batch(runner) or not generated.size
    return Parked(
        chain=chain,
        namespace=namespace,
        prompt_tokens=handoff.prompt_tokens,
        plan=Miss(
            tokens=handoff.prompt_tokens,
            reason="another engine computed it",
            kind=None,
            seconds=0.0,
            ideal=None,
            losses=(),
        ),
        generated=tuple(generated.tolist()),
        computed=computed,
        exact=handoff.exact and same,
        room=blocks,
        entries=entries,
        generations=generations,
        moves=moves,
        state=state,
        digest=digest_of(moves, state),
    )


def decode_batch(runner: Runner) -> str:
    """What the bits of a decode step depend on beside the identity.

    Where slots are computed one after the other nothing else does; in a batch, its size may.
    """
    return "alone" if runner.options.sequential else f"{runner.sizes.capacity.slots} slots"


def _handoff(
    runner: Runner,
    namespace: str,
    tokens: np.ndarray,
    prompt_tokens: int,
    computed: int,
    exact: bool,
    moves: Moves,
    state: SequenceState,
) -> HandOff:
    geometry = runner.model.geometry
    count = cdiv(computed, geometry.block_tokens)
    blocks = np.stack([words for move in moves for words in move][:count])
    blocks[-1] = whole_cells(geometry, blocks[-1], computed)
    return HandOff.of(
        identity=runner.identity,
        root=runner.identity.root(namespace),
        decode=decode_batch(runner),
        tokens=tokens,
        prompt_tokens=prompt_tokens,
        computed=computed,
        exact=exact,
        block_tokens=geometry.block_tokens,
        block_spans=block_spans(geometry),
        state_spans=state_spans(geometry),
        blocks=blocks,
        state=state_words(state, computed),
    )


def _require_ours(runner: Runner, handoff: HandOff, namespace: str) -> TokenChain:
    """The prompt's chain, where the sequence is one that this runner can go on with."""
    geometry = runner.model.geometry
    wrong = why_foreign(
        handoff,
        runner.identity,
        namespace,
        geometry.block_tokens,
        (
            (handoff.block_spans, block_spans(geometry)),
            (handoff.state_spans, state_spans(geometry)),
        ),
    )
    if wrong is not None:
        raise HandOffRefused(
            f"the sequence is {wrong[0]}: send it whole, to an engine of the same model, steps and "
            "versions, in its sender's namespace",
            wrong[1],
        )
    as_tokens(handoff.tokens, runner.model.vocab_size)
    return runner.chain(handoff.prompt, namespace=namespace)


def _published(
    runner: Runner, handoff: HandOff, chain: TokenChain
) -> tuple[np.ndarray, np.ndarray]:
    """Entries of computed prompt blocks that are here with the same bits, and their generations."""
    if not handoff.exact or not runner.sizes.reuse:
        return NO_ENTRIES, NO_GENERATIONS
    match = runner.directory.find(chain)
    most = min(handoff.computed, handoff.prompt_tokens) // handoff.block_tokens
    exact = runner.publisher.generated.exact_each(match.entries[:most])
    count = len(exact) if exact.all() else int(np.argmin(exact))
    return match.entries[:count].copy(), match.generations[:count].copy()


def _moves(blocks: np.ndarray) -> Moves:
    """Groups of ``MOVED_BLOCKS`` blocks; what fills the last one up is zero."""
    count = len(blocks)
    padded = np.pad(blocks, ((0, round_up(count, MOVED_BLOCKS) - count), (0, 0)))
    return tuple(
        tuple(padded[first : first + MOVED_BLOCKS]) for first in range(0, count, MOVED_BLOCKS)
    )


# An engine's request.


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Resumption:
    """What a request needs to go on where another engine left it."""

    parked: Parked
    pieces: list[Piece]
    last: int
    stops: StopMatcher
    text: TextStream | None

    def give(self, task: Task) -> None:
        """Makes a new task the one that was handed off."""
        output = task.output
        output.pieces, output.taken_over = self.pieces, len(self.pieces)
        output.plan, output.exact = self.parked.plan, self.parked.exact
        task.parked, task.last = self.parked, self.last
        task.stops, task.text = self.stops, self.text


def hand_off(runner: Runner, task: Task) -> HandOff:
    """A decoding or parked request as a hand-off; the request stays as it is.

    Raises:
      HandOffRefused: it has no token yet, it has ended, or it ended while it was copied.
    """
    if task.ended:
        raise HandOffRefused("the request has ended: there is nothing to hand off")
    if not task.output.pieces or (task.sequence is None and task.parked is None):
        raise HandOffRefused("the request has no token yet: run it until it decodes")
    if task.parked is not None:
        handoff = export_parked(runner, task.parked, next_token=task.last)
    else:
        assert task.sequence is not None
        handoff = export_sequence(runner, task.sequence, next_token=task.last)
    # One whose state was lost computed its output again as a part of its prompt.
    exact = handoff.exact and task.output.exact
    return dataclasses.replace(handoff, prompt_tokens=len(task.prompt), exact=exact)


def resumption(
    runner: Runner, handoff: HandOff, request: Request, prompt: np.ndarray, text: Text | None
) -> Resumption:
    """What ``request`` needs to go on from ``handoff``.

    Raises:
      HandOffRefused: they do not fit, or the hand-off is not one for this engine.
      UserError: it can never fit.
    """
    if request.samples != 1:
        raise HandOffRefused("a hand-off is one output: use samples=1 and the seed of its sample")
    if not np.array_equal(handoff.prompt, prompt):
        raise HandOffRefused("the request has another prompt: use Request(prompt=handoff.prompt)")
    if len(handoff.pending) != 1:
        raise HandOffRefused(
            f"{len(handoff.pending)} tokens were chosen and not consumed, and an engine goes on "
            "from one: take it over by import_sequence"
        )
    room = len(prompt) + request.max_new_tokens
    parked = parked_from(runner, handoff, room=room, namespace=request.namespace)
    chosen = handoff.tokens[handoff.prompt_tokens :].tolist()
    stops = StopMatcher(frozenset(request.stop_tokens), request.stop)
    stream = text.stream() if text is not None else None
    pieces = []
    for token in chosen:
        emit = stops.feed_token(token, stream.feed(token) if stream is not None else "")
        pieces.append(Piece(token=token, text=emit.text))
        if emit.stopped or len(pieces) == request.max_new_tokens:
            raise HandOffRefused(
                f"the output ends with its token {len(pieces)} of {len(chosen)} already: raise "
                "max_new_tokens, or take the stops of its sender"
            )
    return Resumption(parked=parked, pieces=pieces, last=chosen[-1], stops=stops, text=stream)
