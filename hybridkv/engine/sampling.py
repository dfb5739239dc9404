"""Choosing the next token. One executable for every setting: they are data.

    logits [n, vocab] --penalty--> --temperature--> --top_k--> --top_p--> --min_p--> draw
                                      |
                                      +-- 0: the likeliest, ties to the lowest id; nothing is drawn

Rows are worked on one after the other, each by its own branch: an idle row costs nothing, a greedy
row one pass over its logits, and no row's bits depend on another row. Nothing is sorted: a cut is
found by bisection over the bits of the logits.

    SamplerState [slots, vocab] --sample--> SamplerState'    (DONATED, as a step's cache)

Whoever owns the cache owns the state; it tells which tokens each slot has seen.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, UInt32

from hybridkv.engine.steps import DonatedCacheError
from hybridkv.errors import UserError
from hybridkv.state import leaf
from hybridkv.state.leaf import Leaf

MOST_LOGPROBS = 20
"""The most alternatives a token is reported with."""
SMALLEST, LARGEST = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)


def whole(value: Any) -> bool:
    """Whether it is an integer, and no bool."""
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def number(value: Any) -> bool:
    """Whether it is a real number, and no bool."""
    return whole(value) or isinstance(value, (float, np.floating))


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingOptions:
    """How one request chooses tokens.

    The settings act in the order ``repetition_penalty``, ``temperature``, ``top_k``, ``top_p``,
    ``min_p``, each on what the one before left. The likeliest token always stays.

    Raises:
      UserError: a value is of another type, or out of its range.
    """

    temperature: float = 0.0
    """0 takes the likeliest token, after the penalty; larger flattens the distribution."""
    top_k: int = 0
    """Only the k likeliest tokens, ties by the lowest id; 0 for all."""
    top_p: float = 1.0
    """Only the likeliest tokens that together reach this share of what ``top_k`` left."""
    min_p: float = 0.0
    """Only tokens at least this many times as likely as the likeliest; 0 for all."""
    repetition_penalty: float = 1.0
    """Logits of tokens seen in the prompt or the output are divided by it where positive and
    multiplied where negative; 1 is off, below 1 repetition is favoured."""
    seed: int = 0
    """Together with the position it fixes the choice, whatever the neighbours do."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if not (whole(value) if field.type is int else number(value)):
                kind = "whole number" if field.type is int else "number"
                raise UserError(f"{field.name} must be a {kind}, got {value!r}")
        if not 0.0 <= self.temperature < float("inf"):
            raise UserError(f"temperature must be at least 0, got {self.temperature}")
        if self.top_k < 0:
            raise UserError(f"top_k must be at least 0 (0 for all tokens), got {self.top_k}")
        if not 0.0 < self.top_p <= 1.0:
            raise UserError(f"top_p must be above 0 and at most 1, got {self.top_p}")
        if not 0.0 <= self.min_p <= 1.0:
            raise UserError(f"min_p must be between 0 (off) and 1, got {self.min_p}")
        if not SMALLEST <= self.repetition_penalty <= LARGEST:
            raise UserError(
                f"repetition_penalty must be above 0 and finite (1 is off), "
                f"got {self.repetition_penalty}"
            )
        if not 0 <= self.seed < 2**32:
            raise UserError(f"seed must be between 0 and 2**32 - 1, got {self.seed}")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingBatch:
    """What is chosen for which row, as arrays on the device. Make it anew when rows change."""

    active: Bool[Array, " n"]
    slots: Int[Array, " n"]
    """Row of the ``SamplerState`` that belongs to each row of logits."""
    temperature: Float[Array, " n"]
    top_k: Int[Array, " n"]
    top_p: Float[Array, " n"]
    min_p: Float[Array, " n"]
    repetition_penalty: Float[Array, " n"]
    seed: UInt32[Array, " n"]

    @classmethod
    def of(
        cls, options: Sequence[SamplingOptions | None], *, slots: Sequence[int] | None = None
    ) -> "SamplingBatch":
        """One row per entry of ``options``.

        Args:
          options: of each row of logits; None for a row that is not sampled from.
          slots: of each row; without it row ``i`` is slot ``i``, as in a decode step.

        Raises:
          ValueError: ``slots`` is of another length, or two active rows name one slot.
        """
        slots = range(len(options)) if slots is None else slots
        if len(slots) != len(options):
            raise ValueError(f"{len(slots)} slots for {len(options)} rows of options")
        active = [option is not None for option in options]
        taken = [slot for slot, here in zip(slots, active, strict=True) if here]
        if len(set(taken)) != len(taken):
            raise ValueError(f"two rows are of one slot: {taken}")
        rows = [option or SamplingOptions() for option in options]
        return cls(
            active=jax.device_put(np.array(active, bool)),
            slots=jax.device_put(np.array(slots, np.int32)),
            temperature=jax.device_put(np.array([o.temperature for o in rows], np.float32)),
            top_k=jax.device_put(np.array([min(o.top_k, 2**31 - 1) for o in rows], np.int32)),
            top_p=jax.device_put(np.array([o.top_p for o in rows], np.float32)),
            min_p=jax.device_put(np.array([o.min_p for o in rows], np.float32)),
            repetition_penalty=jax.device_put(
                np.array([o.repetition_penalty for o in rows], np.float32)
            ),
            seed=jax.device_put(np.array([o.seed for o in rows], np.uint32)),
        )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplerState:
    """What sampling remembers of each slot."""

    seen: Bool[Array, "slots vocab"]
    """Tokens of the slot's prompt and output."""

    @classmethod
    def declare(cls, *, slots: int, vocab_size: int) -> "SamplerState":
        """Declarations of all arrays."""
        seen: Any = Leaf(shape=(slots, vocab_size), dtype=jnp.bool_, axes=("slots", None))
        return cls(seen=seen)

    @classmethod
    def abstract(cls, *, slots: int, vocab_size: int) -> "SamplerState":
        """The state as ``ShapeDtypeStruct``; allocates nothing."""
        return leaf.abstract(cls.declare(slots=slots, vocab_size=vocab_size))

    @classmethod
    def shardings(
        cls,
        mesh: jax.sharding.Mesh,
        rules: Mapping[str, str] = leaf.DEFAULT_RULES,
        *,
        slots: int,
        vocab_size: int,
    ) -> "SamplerState":
        """The state as ``NamedSharding``; allocates nothing."""
        return leaf.shardings(cls.declare(slots=slots, vocab_size=vocab_size), mesh, rules)

    @classmethod
    def init(cls, placement: Any | None = None, *, slots: int, vocab_size: int) -> "SamplerState":
        """Slots that have seen nothing; ``placement`` as in ``leaf.init``."""
        return leaf.init(cls.declare(slots=slots, vocab_size=vocab_size), placement)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Sampled:
    """What was chosen; zeros in idle rows.

    Log-probabilities are those of the logits as the model gave them, before the penalty, the
    temperature and the cuts.
    """

    tokens: Int[Array, " n"]
    logprobs: Float[Array, " n"]
    """Of the chosen tokens."""
    top_tokens: Int[Array, "n k"]
    """The likeliest tokens, likeliest first, ties by the lowest id."""
    top_logprobs: Float[Array, "n k"]


def tokens_seen(tokens: np.ndarray, vocab_size: int) -> np.ndarray:
    """A row of ``SamplerState.seen`` on the host, bool ``[vocab]``, from token ids."""
    row = np.zeros(vocab_size, bool)
    row[tokens] = True
    return row


def seat(state: SamplerState, slot: Int[Array, ""], row: Bool[Array, " vocab"]) -> SamplerState:
    """Sets what a slot has seen; a slot past the end changes nothing.

    DONATES state when jitted by a caller.
    """
    return SamplerState(seen=state.seen.at[slot].set(row, mode="drop"))


def sample(
    logits: Float[Array, "n vocab"],
    positions: Int[Array, " n"],
    options: SamplingBatch,
    state: SamplerState,
    *,
    logprobs: int = 0,
) -> tuple[Sampled, SamplerState]:
    """The token after each of ``positions``; a row's choice depends on that row alone.

    DONATES state when jitted by a caller. A logit that is NaN is never chosen before a number.

    Args:
      logits: float32, as the model gave them.
      positions: of the token that each row of logits came from; only (seed, position) enter the
        draw.
      options: which rows are active, and how they choose.
      state: tokens seen by each slot.
      logprobs: alternatives to report for each row.

    Returns:
      What was chosen, and the state with the chosen tokens of active rows.
    """
    rows = logits.shape[0]
    order = jnp.argsort(jnp.logical_not(options.active), stable=True).astype(jnp.int32)

    def body(turn: jax.Array, sampled: Sampled) -> Sampled:
        row = order[turn]
        one = _sample_one(logits, positions, options, state, row, logprobs)
        return jax.tree.map(
            lambda all, x: jax.lax.dynamic_update_index_in_dim(all, x, row, 0), sampled, one
        )

    nothing = Sampled(
        tokens=jnp.zeros((rows,), jnp.int32),
        logprobs=jnp.zeros((rows,), jnp.float32),
        top_tokens=jnp.zeros((rows, logprobs), jnp.int32),
        top_logprobs=jnp.zeros((rows, logprobs), jnp.float32),
    )
    active = jnp.sum(options.active.astype(jnp.int32))
    sampled = jax.lax.fori_loop(0, active, body, nothing)
    where = jnp.where(options.active, options.slots, state.seen.shape[0])
    seen = state.seen.at[where, sampled.tokens].set(True, mode="drop")
    return sampled, SamplerState(seen=seen)


def _sample_one(
    logits: jax.Array,
    positions: jax.Array,
    options: SamplingBatch,
    state: SamplerState,
    row: jax.Array,
    logprobs: int,
) -> Sampled:
    raw = logits[row]
    numbers = jnp.where(jnp.isnan(raw), -jnp.inf, raw)
    penalty = options.repetition_penalty[row]
    penalised = jnp.where(numbers > 0.0, numbers / penalty, numbers * penalty)
    changed = jnp.where(state.seen[options.slots[row]], penalised, numbers)
    token = jax.lax.cond(
        options.temperature[row] < SMALLEST,
        lambda: _first_largest(changed),
        # Sliced in here: a greedy row reads no more than it needs.
        lambda: _draw(changed, positions[row], jax.tree.map(lambda x: x[row], options)),
    )
    total = jax.nn.logsumexp(raw)
    top, top_tokens = jnp.zeros((0,), jnp.float32), jnp.zeros((0,), jnp.int32)
    if logprobs:
        # top_k ranks -0.0 below 0.0. A selection, because XLA may drop an added zero.
        top, top_tokens = jax.lax.top_k(jnp.where(numbers == 0.0, 0.0, numbers), logprobs)
    return Sampled(
        tokens=token, logprobs=raw[token] - total, top_tokens=top_tokens, top_logprobs=top - total
    )


def _first_largest(values: jax.Array) -> jax.Array:
    """Lowest index of the largest value; none may be NaN.

    Four times as fast as ``argmax`` on a CPU, which does not vectorise a pair of results.
    """
    numbers = jnp.arange(values.shape[0], dtype=jnp.int32)
    return jnp.min(jnp.where(values == jnp.max(values), numbers, values.shape[0] - 1))


def _draw(logits: jax.Array, position: jax.Array, options: SamplingBatch) -> jax.Array:
    """A token by the Gumbel trick: noise belongs to the token id, so that a cut moves no noise."""
    largest = jnp.max(logits)
    # Equal ones by selection: infinity less infinity is NaN.
    below = jnp.where(logits == largest, 0.0, logits - largest)
    heated = below / jnp.maximum(options.temperature, SMALLEST)
    weights = jnp.exp(heated)  # probabilities, the likeliest being 1
    keys = _ordered_bits(logits)
    kept = jax.lax.cond(
        (options.top_k > 0) & (options.top_k < logits.shape[0]),
        lambda: _fewest(keys, jnp.ones_like(weights), options.top_k.astype(jnp.float32)),
        lambda: jnp.ones_like(keys, bool),
    )

    def reach_top_p() -> jax.Array:
        left = jnp.where(kept, weights, 0.0)
        target = jnp.maximum(options.top_p * jnp.sum(left), SMALLEST)
        return kept & _fewest(keys, left, target)

    kept = jax.lax.cond(options.top_p < 1.0, reach_top_p, lambda: kept)
    kept = kept & (weights >= options.min_p)
    key = jax.random.fold_in(jax.random.key(options.seed), position)
    noise = jax.random.gumbel(key, logits.shape, jnp.float32)
    return _first_largest(jnp.where(kept, heated + noise, -jnp.inf))


def _ordered_bits(values: jax.Array) -> jax.Array:
    """uint32 that order as the float32 values do; -0.0 equals 0.0."""
    bits = jax.lax.bitcast_convert_type(jnp.where(values == 0.0, 0.0, values), jnp.uint32)
    sign = jnp.uint32(0x80000000)
    return jnp.where(bits >= sign, ~bits, bits | sign)


def _fewest(keys: jax.Array, weights: jax.Array, target: jax.Array) -> jax.Array:
    """The fewest tokens, by falling key and then rising id, whose weights reach ``target``.

    Bool ``[vocab]``; equal keys have equal weights, except that a weight may be zero. All tokens
    where the target is never reached. The largest threshold that still reaches it is found bit by
    bit: 32 sums cost less than a sort, and a sum of more terms that are not negative is never less.
    """

    def narrow(number: jax.Array, threshold: jax.Array) -> jax.Array:
        higher = threshold | (jnp.uint32(0x80000000) >> number.astype(jnp.uint32))
        reached = jnp.sum(jnp.where(keys >= higher, weights, 0.0)) >= target
        return jnp.where(reached, higher, threshold)

    threshold = jax.lax.fori_loop(0, 32, narrow, jnp.uint32(0))
    above = jnp.sum(jnp.where(keys > threshold, weights, 0.0))
    ties = jnp.where(keys == threshold, weights, 0.0)
    before = above + jnp.cumsum(ties) - ties
    return (keys > threshold) | ((keys == threshold) & (before < target))


class Sampler:
    """The jitted executables of sampling, for one vocabulary, one number of slots."""

    def __init__(self, *, vocab_size: int, slots: int, logprobs: int = 0) -> None:
        """Compiles nothing yet.

        Args:
          vocab_size: length of a row of logits.
          slots: rows of the state.
          logprobs: alternatives to report for each row; 0 costs nothing.

        Raises:
          UserError: ``logprobs`` is out of its range.
        """
        most = min(MOST_LOGPROBS, vocab_size)
        if not 0 <= logprobs <= most:
            raise UserError(f"logprobs must be between 0 and {most}, got {logprobs}")
        self.vocab_size, self.slots, self.logprobs = vocab_size, slots, logprobs
        self._sample = jax.jit(
            functools.partial(sample, logprobs=logprobs), donate_argnames="state"
        )
        self._seat = jax.jit(seat, donate_argnames="state")

    def init_state(self, placement: Any | None = None) -> SamplerState:
        """A state in which no slot has seen anything; ``placement`` as in ``leaf.init``."""
        return SamplerState.init(placement, slots=self.slots, vocab_size=self.vocab_size)

    def sample(
        self,
        logits: Float[Array, "n vocab"],
        positions: Int[Array, " n"],
        options: SamplingBatch,
        state: SamplerState,
    ) -> tuple[Sampled, SamplerState]:
        """See ``sample``. DONATES state. One executable for each ``n``.

        Raises:
          DonatedCacheError: ``state`` went into an earlier call.
        """
        _check_alive(state, "sampled, state = sampler.sample(logits, positions, options, state)")
        return self._sample(logits, positions, options, state)

    def seat(self, state: SamplerState, slot: int, row: np.ndarray) -> SamplerState:
        """Sets what a slot has seen. DONATES state.

        Args:
          state: the state.
          slot: whose row.
          row: bool ``[vocab]`` on the host, see ``tokens_seen``.

        Raises:
          DonatedCacheError: ``state`` went into an earlier call.
          ValueError: ``row`` does not fit the state.
        """
        _check_alive(state, "state = sampler.seat(state, slot, row)")
        if row.shape != (self.vocab_size,) or row.dtype != np.bool_:
            raise ValueError(f"row is {row.dtype} {row.shape}, not bool ({self.vocab_size},)")
        return self._seat(state, jax.device_put(np.int32(slot)), jax.device_put(row))

    def warm_up(
        self, state: SamplerState, *rows: int, placement: Any | None = None
    ) -> SamplerState:
        """Compiles sampling from each number of rows, and ``seat``. DONATES state.

        The state that comes back is as it was. ``placement`` is that of the logits to come; None
        where they are committed to no device.
        """
        for count in rows:
            nothing = SamplingBatch.of([None] * count)
            logits = jax.device_put(np.zeros((count, self.vocab_size), np.float32), placement)
            positions = jax.device_put(np.zeros(count, np.int32))
            _, state = self.sample(logits, positions, nothing, state)
        return self.seat(state, self.slots, np.zeros(self.vocab_size, bool))


def _check_alive(state: SamplerState, call: str) -> None:
    if state.seen.is_deleted():
        raise DonatedCacheError(
            f"this sampler state was donated to an earlier call: write `{call}` and use the state "
            f"that comes back"
        )
