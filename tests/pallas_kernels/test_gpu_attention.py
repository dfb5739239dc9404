"""The GPU kernels of ``attend``, interpreted: against float64, and what must change no bit."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gpu_cases import active, batched, halves, stored

from pallas_kernels.attention import gpu
from pallas_kernels.blocks import BlockRows
from pallas_kernels.interpreting import interpreted
from pallas_kernels.packing.api import decode, encode
from pallas_kernels.packing.layout import RowLayout

HEADS, WIDTH, SCALE, NO_ROW = 3, 16, 0.35, 2**31 - 1
STEP = 16  # the least that the kernel sums at once


@functools.cache
def compiled(window: int, format: str, span: int, key_block: int):
    def function(q, local, first, sink, active, rows, visible, picks):
        return gpu.attend(
            q,
            local,
            first,
            sink,
            active=active,
            window=window,
            scale=SCALE,
            rows=rows,
            visible=visible,
            picks=picks,
            key_block=key_block,
            format=format,
            local_format=format,
        )

    return jax.jit(function)


class Case:
    """``n`` sequences of ``t`` queries; ``lengths`` says how many rows each sequence has."""

    def __init__(self, lengths, *, t=1, window=20, first=50, format="float32", seed=0):
        self.lengths, self.t, self.window, self.format = list(lengths), t, window, format
        n = len(self.lengths)
        self.first = np.broadcast_to(np.asarray(first, np.int32), (n,)).copy()

        def normal(sequence, what, *shape):
            rng = np.random.default_rng((seed, sequence, what))
            return halves(rng.normal(size=shape))

        self.q = np.stack([normal(i, 0, t, HEADS, WIDTH) * 2 for i in range(n)])
        self.local = np.stack([normal(i, 1, window - 1 + t, WIDTH) for i in range(n)])
        self.rows = [normal(i, 2, length, WIDTH) for i, length in enumerate(self.lengths)]
        self.sink = normal(0, 3, HEADS)
        back = np.arange(t)[::-1]
        self.visible = np.maximum(np.asarray(self.lengths)[:, None] - back, 0).astype(np.int32)

    def run(self, *, picks=None, which=None, key_block=STEP, rows=True, span=None, **pool):
        # Rows before position 0 may be anything.
        local = self.local.copy()
        for i, first in enumerate(self.first):
            local[i, : max(self.window - 1 - first, 0)] = np.nan
        options = {"format": self.format, **pool}
        span = gpu.SPAN if span is None else span
        with interpreted(True), pytest.MonkeyPatch.context() as patch:
            patch.setattr(gpu, "SPAN", span)
            got = compiled(self.window, self.format, span, key_block)(
                jnp.asarray(self.q),
                stored(local, self.format),
                jnp.asarray(self.first),
                jnp.asarray(self.sink),
                active(len(self.lengths), which),
                batched(self.rows, **options) if rows else None,
                jnp.asarray(self.visible) if rows else None,
                None if picks is None else jnp.asarray(picks, jnp.int32),
            )
        assert got.dtype == jnp.float32
        return np.asarray(got)

    def expected(self, sequence, query, head, picks=None, rows=True):
        """The result in float64, and the sum of the sizes of what it is made of."""
        position = self.first[sequence] + query
        near = range(max(position - self.window + 1, 0), position + 1)
        offset = self.window - 1 - self.first[sequence]
        keys = [self.local[sequence, p + offset] for p in near]
        if rows:
            count = self.visible[sequence, query]
            chosen = range(count) if picks is None else picks[sequence][query]
            keys += [self.rows[sequence][s] for s in chosen if s < count]
        keys = np.asarray(keys, np.float64)
        logits = keys @ self.q[sequence, query, head].astype(np.float64) * SCALE
        top = max(logits.max(), self.sink[head])
        weights = np.exp(logits - top)
        weights /= weights.sum() + np.exp(float(self.sink[head]) - top)
        return weights @ keys, weights @ np.abs(keys)

    def check(self, picks=None, rows=True, which=None, **options):
        """bfloat16 rounds each weight by at most 2**-8 of it; the rest is float32."""
        got = self.run(picks=picks, rows=rows, which=which, **options)
        rounding = 2.0**-8 if self.format == "bfloat16" else 0.0
        for i in range(len(self.lengths)) if which is None else which:
            for query in range(self.t):
                for head in range(HEADS):
                    exact, size = self.expected(i, query, head, picks, rows)
                    error = np.abs(got[i, query, head] - exact)
                    assert (error <= size * rounding + 5e-6).all(), (i, query, head, error.max())


AWKWARD = (0, 1, STEP - 1, STEP, STEP + 1, 2 * STEP + 3, 3, 4, 5)


@pytest.mark.parametrize(
    ("format", "span"), [("float32", STEP), ("bfloat16", STEP), ("bfloat16", 512)]
)
def test_any_number_of_rows_matches_float64(format, span):
    Case(AWKWARD, format=format).check(span=span)


@pytest.mark.parametrize(
    ("window", "format"),
    [(1, "float32"), (STEP, "float32"), (STEP + 1, "bfloat16")],
)
def test_windows_longer_than_the_past_match_float64(format, window):
    Case(
        [0, 3, 0, 5, 9], first=[0, 1, window - 1, window, 60], window=window, format=format
    ).check()


@pytest.mark.parametrize(("t", "format"), [(2, "float32"), (17, "bfloat16")])
def test_many_queries_of_a_sequence_match_float64(format, t):
    Case([STEP + 5, 0, 40], t=t, first=[0, 3, 100], window=8, format=format).check()


def test_steps_of_more_rows_match_float64():
    Case([40, 7], format="bfloat16").check(key_block=100, span=512)


@pytest.mark.parametrize("per", [1, 3])
def test_any_block_size_matches_float64(per):
    Case([2 * STEP + 1, per - 1, per, per + 1]).check(per=per, places=64, blocks=200)


def test_without_rows_only_the_window_is_attended():
    Case([0, 0]).check(rows=False)


def _picks(case: Case, count: int) -> np.ndarray:
    """Per query some visible rows, then one that is not visible, then NO_ROW; ascending."""
    rng = np.random.default_rng(1)
    picks = np.full((len(case.lengths), case.t, count), NO_ROW, np.int64)
    for i, each in enumerate(case.visible):
        for query, visible in enumerate(each):
            some = rng.permutation(visible)[: rng.integers(0, count)]
            beyond = [visible] if query % 2 else []
            chosen = np.sort(np.concatenate([some, beyond]))[:count]
            picks[i, query, : len(chosen)] = chosen
    return picks


@pytest.mark.parametrize(("count", "format"), [(STEP, "bfloat16"), (2 * STEP + 3, "float32")])
def test_only_picked_rows_are_attended(format, count):
    case = Case([60, 0, 1, 33], t=2, format=format)
    case.check(picks=_picks(case, count))


def test_no_pick_at_all_is_the_window_alone():
    case = Case([9, 5])
    none = np.full((2, 1, 3), NO_ROW)
    np.testing.assert_array_equal(case.run(picks=none), case.run(rows=False))


def test_packed_rows_give_the_bits_of_their_decoded_values():
    """e4m3 times a power of two is exact in bfloat16, so both kernels see the same numbers."""
    width, per, n, window = 128, 4, 2, 20
    layout = RowLayout("fp8_rope16", width, 32)
    rng = np.random.default_rng(0)

    def packed(*shape):
        size = np.exp2(rng.integers(-20, 20, (*shape, 1)))  # all scales, and subnormal codes
        values = (
            rng.normal(size=(*shape, width)) * size * np.exp2(-rng.integers(0, 12, (*shape, width)))
        )
        return encode(jnp.asarray(values, jnp.float32), layout)

    pool, local = packed(40, per), packed(n, window)
    table = jnp.asarray(rng.permutation(40)[: n * 16].reshape(n, 16), jnp.int32)
    visible = jnp.asarray([[37], [3]], jnp.int32)
    q = jnp.asarray(halves(rng.normal(size=(n, 1, HEADS, width))) * 2.0**-16)

    def run(pool, local, format):
        with interpreted(True):
            return gpu.attend(
                q,
                local,
                jnp.asarray([50, 2], jnp.int32),
                jnp.zeros((HEADS,)),
                active=active(n),
                window=window,
                scale=SCALE,
                rows=BlockRows(pool, table),
                visible=visible,
                format=format,
                local_format=format,
            )

    plain = (encode(decode(x, layout), "bfloat16") for x in (pool, local))
    got = run(pool.at[table[0, 9], 1:].set(0xFF), local.at[1, : window - 3].set(0xFF), layout)
    assert np.abs(got).max() > 0
    np.testing.assert_array_equal(got, run(*plain, "bfloat16"))


@pytest.mark.parametrize("sink", [-np.inf, -1e4, 3.0, 1e4])
def test_sink_only_joins_the_denominator(sink):
    case = Case([40, 3])
    case.sink[:] = sink
    case.check(span=STEP)
    assert (np.abs(case.run(span=STEP)).max() == 0) == (sink == 1e4)


def test_large_logits_do_not_overflow():
    case = Case([40, 3])
    case.q *= 256
    got = case.run(span=STEP)
    for i, head in ((0, 0), (0, 2), (1, 1)):
        np.testing.assert_allclose(got[i, 0, head], case.expected(i, 0, head)[0], atol=5e-4)


@pytest.mark.parametrize("which", [[], [1], [2, 0]])
def test_idle_sequences_give_zeros_and_the_others_their_bits(which):
    case = Case([40, 3, 17, 0])
    everything = case.run(span=STEP)
    got = case.run(which=which, span=STEP)
    for i in range(4):
        np.testing.assert_array_equal(got[i], everything[i] if i in which else 0.0)


@pytest.mark.parametrize(("routed", "span"), [(False, STEP), (True, 512)], ids=["all", "picks"])
def test_capacity_order_of_blocks_and_stale_bytes_change_no_bit(routed, span):
    case = Case([40, 3, STEP], t=2, format="bfloat16")
    picks = _picks(case, 20) if routed else None
    expected = case.run(picks=picks, span=span)
    assert np.isfinite(expected).all()
    for other in (
        {"blocks": 300, "places": 80},
        {"seed": 3},
        {"fill": np.inf},
        {"fill": 0.0},
        {"garbage": (0, 1, 2)},
    ):
        got = case.run(picks=picks, span=span, **other)
        np.testing.assert_array_equal(got, expected, err_msg=str(other))


def test_a_table_of_one_range_gives_the_bits_of_a_longer_one():
    case = Case([STEP, 3])
    short = case.run(places=STEP // 4, span=STEP)
    np.testing.assert_array_equal(case.run(places=99, span=STEP), short)


def test_neighbours_and_their_order_change_no_bit():
    case = Case([40, 3, 60], t=2, format="bfloat16")
    expected = case.run(span=STEP)
    for order in ([2, 0, 1], [1], [2]):
        other = Case([case.lengths[i] for i in order], t=2, format="bfloat16")
        for name in ("q", "local", "first", "visible"):
            setattr(other, name, getattr(case, name)[order])
        other.rows = [case.rows[i] for i in order]
        got = other.run(span=STEP, seed=7)
        np.testing.assert_array_equal(got, expected[order], err_msg=str(order))


def test_what_the_last_query_sees_changes_no_earlier_bit():
    case = Case([60], t=3)
    case.visible[:] = 5
    few = case.run(span=STEP)
    for last in (6, STEP, STEP + 1, 60):
        case.visible[0, -1] = last
        many = case.run(span=STEP)
        np.testing.assert_array_equal(many[:, :-1], few[:, :-1])
        assert (many[:, -1] != few[:, -1]).any()


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"format": "fp8_rope16"}, "fp8_rope16"),
        ({"local_format": "mxfp4"}, "mxfp4"),
        ({"width": 48}, "power of two"),
        ({"width": 8}, "power of two"),
        ({"width": 1024}, "does not fit"),
    ],
)
def test_what_it_cannot_do_is_refused_with_the_reason(options, reason):
    width = options.pop("width", WIDTH)
    q = jnp.zeros((1, 1, HEADS, width))
    with pytest.raises(NotImplementedError, match=reason):
        gpu.attend(
            q,
            jnp.zeros((1, 8, width)),
            jnp.zeros((1,), jnp.int32),
            jnp.zeros((HEADS,)),
            active=active(1),
            window=8,
            scale=SCALE,
            **options,
        )
