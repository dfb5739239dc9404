"""The TPU attention kernel's work list against one written out by hand."""

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.attention import tpu_plan
from pallas_kernels.sequences import Active


def plan(*, t, queries, tabled, paired, per=4, size=8, blocks=9):
    rows = tpu_plan.KeyBlocks(
        size=size, per_block=per, blocks=blocks, tabled=tabled, dtype=jnp.float32, paired=paired
    )
    return tpu_plan.Plan(
        t=t,
        queries=queries,
        heads=8,
        window=4,
        window_rows=128,
        scale=1.0,
        local_dtype=jnp.float32,
        rows=rows,
    )


def expected(plan, order, count, visible):
    """Per item of every task in turn: its first cache block, and how many it has."""
    rows, items, offsets = plan.rows, [], [0]
    for place, sequence in enumerate(order):
        for chunk in range(plan.tasks):
            last = visible[sequence, (chunk + 1) * plan.queries - 1] if place < count else 0
            last = min(last, rows.blocks * rows.per_block)
            owner = sequence if rows.tabled else sequence * plan.t + chunk
            key_blocks = list(range(-(-last // rows.size)))
            first = 1 if rows.paired else 0
            groups = [key_blocks[:first]] if first and key_blocks else []
            step = 2 if rows.paired else 1
            groups += [key_blocks[i : i + step] for i in range(first, len(key_blocks), step)]
            for group in groups:
                begin = group[0] * rows.size // rows.per_block
                end = min((group[-1] + 1) * rows.size, last)
                items.append((owner * rows.blocks + begin, -(-end // rows.per_block) - begin))
            offsets.append(len(items))
    return items, offsets


@pytest.mark.parametrize("paired", [False, True])
@pytest.mark.parametrize("tabled", [False, True])
@pytest.mark.parametrize(("t", "queries"), [(1, 1), (6, 2), (3, 1)])
@pytest.mark.parametrize("seed", range(3))
def test_items_cover_each_task_in_turn(paired, tabled, t, queries, seed):
    rng = np.random.default_rng(seed)
    n = 5
    visible = np.sort(rng.choice([0, 1, 7, 8, 9, 16, 17, 25, 36, 99], (n, t)), axis=1)
    order, count = rng.permutation(n), int(rng.integers(0, n + 1))
    it = plan(t=t, queries=queries, tabled=tabled, paired=paired)
    got = tpu_plan.scalars(
        it,
        Active(jnp.asarray(order, jnp.int32), jnp.asarray(count, jnp.int32)),
        jnp.zeros((n,), jnp.int32),
        jnp.asarray(visible, jnp.int32),
        jnp.asarray(rng.integers(-(2**31), 2**31 - 1, (n, 9)), jnp.int32),
        7,
    )
    items, offsets = expected(it, order, count, visible)
    assert np.asarray(got.offset).tolist() == offsets
    assert list(zip(got.begin.tolist(), got.many.tolist(), strict=True))[: len(items)] == items
    assert not np.asarray(got.many)[len(items) :].any()
    assert got.many.shape[0] >= len(items) + it.ahead
    assert 0 <= int(got.table.min()) <= int(got.table.max()) < 7
    assert got.table.shape == (n * 9 + it.rows.spare,)
    read = [begin + it.rows.copies for begin in got.begin.tolist()]  # whether copied or not
    assert not tabled or max(read) <= got.table.size
    assert tpu_plan.scalar_bytes(it, n, n * 9) == sum(x.nbytes for x in got)
