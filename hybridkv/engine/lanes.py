"""What sequences compute next, as inputs of the jitted steps: a tile each, or a token each."""

from collections.abc import Mapping

import jax
import numpy as np

from hybridkv.engine.sequence import Sequence
from hybridkv.engine.steps import LaneTile
from hybridkv.errors import UserError
from hybridkv.prefixes.plan import Plan
from hybridkv.state.batch import DecodeBatch


def next_tile(sequence: Sequence, tile: int) -> LaneTile:
    """The tile of ``tile`` tokens in which a prompt goes on; its last one may have fewer.

    Raises:
      UserError: the prompt is computed.
    """
    if not sequence.tokens_left:
        raise UserError("the prompt is computed already: decode its next token")
    end = min(sequence.computed + tile, sequence.prompt_tokens)
    plan = sequence.plan
    return LaneTile(
        tokens=sequence.chain.tokens[sequence.computed : end],
        slot=sequence.slot,
        start=sequence.computed,
        known_from=plan.known_from if isinstance(plan, Plan) else 0,
        write_from=sequence.shared_tokens,
    )


def require_decodes(sequence: Sequence, block_tokens: int) -> None:
    """Raises UserError where a sequence cannot consume a token now."""
    if sequence.tokens_left:
        raise UserError(
            f"{sequence.tokens_left} tokens of the prompt are not computed yet: call "
            "prefill(sequence) first"
        )
    room = block_tokens * (len(sequence.shared.entries) + len(sequence.own.entries))
    if sequence.computed >= room:
        raise UserError(
            f"the sequence has no room for another token: it was started for {room} tokens; "
            "give start() a larger max_new_tokens"
        )


def next_tokens(tokens: Mapping[Sequence, int], slots: int) -> DecodeBatch:
    """A token of each sequence in its slot; the other ones of ``slots`` slots are idle."""
    ids, active = np.zeros(slots, np.int32), np.zeros(slots, bool)
    for sequence, token in tokens.items():
        ids[sequence.slot], active[sequence.slot] = token, True
    return DecodeBatch(tokens=jax.device_put(ids), active=jax.device_put(active))
