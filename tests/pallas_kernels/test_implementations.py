"""Which implementation runs, and that each sequence of a batch is attended as if it were alone."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from pools import pooled

from pallas_kernels import implementations
from pallas_kernels.attention import api as attention
from pallas_kernels.attention import reference as attention_reference
from pallas_kernels.blocks import BlockRows
from pallas_kernels.implementations import first_supported
from pallas_kernels.index_scores import api as index_scores
from pallas_kernels.index_scores import reference as index_reference
from pallas_kernels.sequences import Active

N, T, HEADS, WIDTH, WINDOW, TOPK = 3, 2, 4, 8, 5, 3


def refuses():
    raise NotImplementedError("rows of 7 channels")


def on(monkeypatch, platform):
    monkeypatch.setattr(jax, "default_backend", lambda: platform)


@pytest.mark.parametrize(
    ("platform", "expected"), [("cpu", "xla"), ("tpu", "mosaic"), ("gpu", "xla"), ("rocm", "xla")]
)
def test_without_a_name_the_first_of_the_platform_runs(monkeypatch, platform, expected):
    on(monkeypatch, platform)
    candidates = {"tpu": lambda: "mosaic", "reference": lambda: "xla"}
    assert first_supported("op", candidates, None) == expected


def test_what_is_not_supported_falls_to_the_reference_and_the_log_says_why(monkeypatch, caplog):
    on(monkeypatch, "tpu")
    with caplog.at_level("INFO", logger=implementations.__name__):
        got = first_supported("op", {"tpu": refuses, "reference": lambda: "xla"}, None)
    assert got == "xla"
    assert caplog.messages == ["op: not by tpu: rows of 7 channels"]


def test_a_named_one_fails_loudly(monkeypatch):
    on(monkeypatch, "tpu")
    candidates = {"tpu": refuses, "reference": lambda: "xla"}
    with pytest.raises(NotImplementedError, match="rows of 7 channels"):
        first_supported("op", candidates, "tpu")
    with pytest.raises(ValueError, match="op has no implementation 'rocm': known are reference, t"):
        first_supported("op", candidates, "rocm")
    assert first_supported("op", candidates, "reference") == "xla"


def test_other_errors_are_not_taken_for_a_lack_of_support(monkeypatch):
    on(monkeypatch, "tpu")

    def wrong():
        raise TypeError("a fault of the kernel")

    with pytest.raises(TypeError):
        first_supported("op", {"tpu": wrong, "reference": lambda: "xla"}, None)


class Batch:
    """Sequences of 0, 9 and 17 rows in one pool."""

    lengths = (0, 9, 17)

    def __init__(self):
        rng = np.random.default_rng(0)

        def normal(*shape):
            return jnp.asarray(rng.normal(size=shape), jnp.float32)

        self.q, self.sink = normal(N, T, HEADS, WIDTH), normal(HEADS)
        self.local = normal(N, WINDOW - 1 + T, WIDTH)
        self.first = jnp.asarray([0, 36, 70], jnp.int32)
        self.queries, self.weights = normal(N, T, HEADS, WIDTH), normal(N, T, HEADS)
        each = [pooled(np.asarray(normal(length, WIDTH)), seed=length) for length in self.lengths]
        pool = jnp.concatenate([rows.pool for rows in each])
        tables = jnp.stack([rows.table + 40 * i for i, rows in enumerate(each)])
        self.rows = BlockRows(pool, tables)
        self.visible = jnp.asarray([[max(n - 1, 0), n] for n in self.lengths], jnp.int32)

    def picks(self, active, sequential):
        arrays = (self.queries, self.weights, self.rows, self.visible)
        options = {"topk": TOPK, "key_block": 8, "active": active, "sequential": sequential}
        return jax.jit(lambda: index_scores.pick_rows(*arrays, **options))()

    def attended(self, active, sequential, picks=None):
        arrays = (self.q, self.local, self.first, self.sink)
        options = {"window": WINDOW, "scale": 0.3, "rows": self.rows, "visible": self.visible}
        options |= {"picks": picks, "active": active, "key_block": 8, "sequential": sequential}
        return jax.jit(lambda: attention.attend(*arrays, **options))()


@pytest.fixture(scope="module")
def batch():
    return Batch()


@pytest.mark.parametrize("routed", [False, True], ids=["all rows", "picks"])
def test_a_sequence_of_a_batch_is_attended_as_one_alone(batch, routed):
    active = Active(jnp.asarray([2, 1, 0], jnp.int32), jnp.asarray(3, jnp.int32))
    picks = batch.picks(active, True) if routed else None
    got = batch.attended(active, True, picks)
    for i in range(N):
        alone = BlockRows(batch.rows.pool, batch.rows.table[i])
        if picks is not None:
            arrays = (batch.queries[i], batch.weights[i], alone, batch.visible[i])
            own = index_reference.pick_rows(*arrays, topk=TOPK, key_block=8, format="float32")
            np.testing.assert_array_equal(picks[i], own)
        expected = attention_reference.attend(
            batch.q[i],
            batch.local[i],
            batch.first[i],
            batch.sink,
            window=WINDOW,
            scale=0.3,
            rows=alone,
            visible=batch.visible[i],
            picks=None if picks is None else picks[i],
            key_block=8,
            format="float32",
        )
        np.testing.assert_allclose(got[i], expected, rtol=2e-5, atol=3e-6)


def test_idle_sequences_are_zero_one_by_one_and_finite_all_at_once(batch):
    active = Active(jnp.asarray([1, 0, 2], jnp.int32), jnp.asarray(1, jnp.int32))
    by_one, at_once = batch.attended(active, True), batch.attended(active, False)
    assert not by_one[0].any()
    assert not by_one[2].any()
    assert by_one[1].any()
    np.testing.assert_allclose(at_once[1], by_one[1], rtol=2e-5, atol=3e-6)
    assert np.isfinite(at_once).all()


def test_all_sequences_are_active_when_none_are_named(batch):
    every = Active.all(N)
    np.testing.assert_array_equal(batch.attended(None, True), batch.attended(every, True))
    np.testing.assert_array_equal(batch.picks(None, True), batch.picks(every, True))
