"""Faults planted in the TPU attention kernel, and that its tests would see each of them.

A clean interpreter run proves something only if it fails on a kernel that is wrong.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.attention import tpu, tpu_kernel, tpu_plan
from pallas_kernels.blocks import BlockRows
from pallas_kernels.interpreting import checked
from pallas_kernels.sequences import Active

N, HEADS, WIDTH, WINDOW, PER = 2, 8, 128, 4, 8


def run(table=None, missing=0):
    """Attention over five and three key blocks, traced anew: it takes whatever is planted.

    The last ``missing`` rows of the first sequence are not there, and NaN.
    """
    rng = np.random.default_rng(0)
    q = jnp.asarray(rng.normal(size=(N, 1, HEADS, WIDTH)), jnp.float32)
    local = jnp.asarray(rng.normal(size=(N, WINDOW, WIDTH)), jnp.float32)
    pool = rng.normal(size=(12, PER, WIDTH))
    pool[4, PER - missing :] = np.nan
    lengths = np.array([[5 * PER - missing], [3 * PER]], np.int32)
    table = np.arange(12).reshape(N, 6) if table is None else table
    attend = functools.partial(tpu.attend, window=WINDOW, scale=0.3, tuning=tpu.Tuning(keys=PER))
    with checked():
        out = jax.jit(
            lambda *a: attend(*a[:4], active=a[4], rows=a[5], visible=a[6], key_block=1),
            compiler_options={"xla_backend_optimization_level": 0},
        )(
            q,
            local,
            jnp.full((N,), 90, jnp.int32),
            jnp.zeros((HEADS,)),
            Active.all(N),
            BlockRows(jnp.asarray(pool, jnp.float32), jnp.asarray(table, jnp.int32)),
            jnp.asarray(lengths),
        )
        return np.asarray(out)


def test_the_kernel_as_it_is_passes():
    assert np.isfinite(run()).all()


def test_a_copy_that_nobody_waits_for_is_seen(monkeypatch):
    """In the interpreter it never happens: what is read is what memory held."""
    monkeypatch.setattr(tpu_kernel, "_wait", lambda *_: None)
    assert np.isnan(run()).any()


def test_rows_read_before_the_wait_are_a_race(monkeypatch):
    wait = tpu_kernel._wait

    def late(item, scalars, refs, plan):
        refs.acc[:PER] = refs.keys[plan.slot(item), 0]
        wait(item, scalars, refs, plan)

    monkeypatch.setattr(tpu_kernel, "_wait", late)
    with pytest.raises(RuntimeError, match=r"(?i)race"):
        run()


def test_a_copy_into_a_buffer_that_is_read_is_a_race(monkeypatch):
    # Two buffers in turn, though three copies are under way.
    monkeypatch.setattr(tpu_plan.Plan, "slot", lambda self, item: item & 1)
    with pytest.raises(RuntimeError, match=r"(?i)race"):
        run()


def test_a_block_past_the_pool_is_an_error(monkeypatch):
    """Block tables are clamped before the kernel: without that, a wild entry is not read as 0."""
    table = np.arange(12).reshape(N, 6)
    table[0, 2] = 12
    assert np.isfinite(run(table)).all()
    monkeypatch.setattr(jnp, "clip", lambda x, *_: x)
    with pytest.raises(Exception, match=r"(?i)out.of.bound"):
        run(table)


def test_a_row_past_the_buffer_is_an_error(monkeypatch):
    def beyond(item, j, refs, plan):
        return refs.keys[plan.slot(item), pl.ds(j + 2, 1)].reshape(PER, WIDTH)

    monkeypatch.setattr(tpu_kernel, "_key_block", beyond)
    with pytest.raises(Exception, match=r"(?i)out.of.bound"):
        run()


def test_rows_past_the_length_that_nobody_clears_are_seen(monkeypatch):
    assert np.isfinite(run(missing=3)).all()
    monkeypatch.setattr(tpu_kernel, "_clear", lambda *_: None)
    assert np.isnan(run(missing=3)).any()


@pytest.fixture(autouse=True)
def _clean_interpreter():
    yield
    pltpu.reset_tpu_interpret_mode_state()
