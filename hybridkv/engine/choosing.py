"""Sampling for the slots of an engine; a batch of options is made when its rows change."""

import dataclasses
from collections.abc import Sequence

import jax
import numpy as np

from hybridkv.engine.sampling import Sampler, SamplingBatch, SamplingOptions, tokens_seen
from hybridkv.state import leaf


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chosen:
    """What was chosen for each row that was asked for, on the host."""

    tokens: np.ndarray
    logprobs: np.ndarray
    top_tokens: np.ndarray
    top_logprobs: np.ndarray

    def top(self, number: int, count: int) -> tuple[tuple[int, float], ...]:
        """The likeliest ``count`` tokens of a row with their log-probabilities."""
        pairs = zip(self.top_tokens[number], self.top_logprobs[number], strict=True)
        return tuple((int(token), float(logprob)) for token, logprob in list(pairs)[:count])


class SlotSampler:
    """Owns the sampler's state. Rows are lanes after a tile step, slots after a decode step."""

    def __init__(self, *, vocab_size: int, slots: int, lanes: int, logprobs: int) -> None:
        self._sampler = Sampler(vocab_size=vocab_size, slots=slots, logprobs=logprobs)
        here = leaf.placement()  # as everything that a runner owns
        state = self._sampler.init_state(here)
        self._state = self._sampler.warm_up(state, *{slots, lanes}, placement=here)
        self._options: list[SamplingOptions] = [SamplingOptions()] * slots
        self._batches: dict[int, tuple[tuple[tuple[int, int], ...], SamplingBatch]] = {}

    def seat(self, slot: int, options: SamplingOptions, tokens: Sequence[np.ndarray]) -> None:
        """How a slot chooses from now on, and what it has seen: one array of ids or several."""
        self._options[slot] = options
        self._batches.clear()
        if options.repetition_penalty != 1.0:  # nobody else reads what was seen
            row = tokens_seen(np.concatenate(tokens).astype(np.int64), self._sampler.vocab_size)
            self._state = self._sampler.seat(self._state, slot, row)

    def choose(
        self, logits: jax.Array, rows: Sequence[tuple[int, int]], positions: Sequence[int]
    ) -> Chosen:
        """The next token of some rows.

        Args:
          logits: float32 ``[n, vocab]``.
          rows: of each sequence: its row of logits, and its slot.
          positions: tokens that each has consumed.
        """
        count = logits.shape[0]
        where = np.zeros(count, np.int32)
        numbers = [row for row, _ in rows]
        where[numbers] = positions
        batch = self._batch(count, tuple(rows))
        sampled, self._state = self._sampler.sample(
            logits, jax.device_put(where), batch, self._state
        )
        host = jax.device_get(sampled)
        return Chosen(
            tokens=host.tokens[numbers],
            logprobs=host.logprobs[numbers],
            top_tokens=host.top_tokens[numbers],
            top_logprobs=host.top_logprobs[numbers],
        )

    def _batch(self, count: int, rows: tuple[tuple[int, int], ...]) -> SamplingBatch:
        known = self._batches.get(count)
        if known is not None and known[0] == rows:
            return known[1]
        options: list[SamplingOptions | None] = [None] * count
        slots = [0] * count
        for row, slot in rows:
            options[row], slots[row] = self._options[slot], slot
        batch = SamplingBatch.of(options, slots=slots)
        self._batches[count] = (rows, batch)
        return batch
