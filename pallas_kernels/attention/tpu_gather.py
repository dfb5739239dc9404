r"""Picked rows, copied to one place by the SparseCores of a TPU.

    pool [blocks, per, words] = lines of 128 words       picks [n, t, k], block tables
              |                                                     |
              |               a subcore's round: up to 128 picks of one query
              |                                                     v
              \--- indirect reads, 32 rows at once <--- line numbers --/
                                  \---> writes, in order ---> [blocks, per_block, words]

A TensorCore takes 5 to 12 instructions to move one row, where memory brings a row of 1 KiB in about
one. SparseCores are made for it. They move words of 32 bits: rows stored as ``bfloat16_words`` or
``float32``, not patterns of 16 bits, where two rows share a word. A line is what a TPU lays out
together: of 8 rows (sublanes) the same 128 words (lanes). So the pool and the result are seen as
lines without moving a byte.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas import tpu_sc as plsc
from jaxtyping import Array, Int, Shaped

from pallas_kernels.attention.tpu_plan import LANES, SUBLANES, cdiv
from pallas_kernels.blocks import BlockRows
from pallas_kernels.interpreting import interpret_params
from pallas_kernels.tuning.table import tuned

UNIT = 32
"""Picks whose rows are copied at once. A unit that begins with a free place is left out."""
_ROUND_BYTES = 128 * 1024
"""Most bytes of rows that a round has in a subcore's memory, which has 256 KiB or more."""
_INTERPRETED = (1, 1, 8)
"""What is pretended where kernels are interpreted, as ``Subcores``: no interpreter runs several."""
_INTERPRETED_CHIP = jax.sharding.AbstractDevice(
    device_kind="TPU v6 lite", platform="tpu", num_cores=1
)
NO_ROW = jnp.iinfo(jnp.int32).max
"""A place without a pick."""


@dataclass(frozen=True, kw_only=True)
class Staging:
    """How much a subcore has under way at once. Decides speed, and no bit."""

    picks: int = 128
    """Most picks of a round."""


class Subcores(NamedTuple):
    """The SparseCores that one TensorCore has for itself."""

    cores: int
    subcores: int
    """Of each core."""
    lanes: int
    """Of a vector register."""


class _Sizes(NamedTuple):
    """What is fixed when the kernel is traced."""

    subcores: Subcores
    places: int
    """Of one query."""
    queries: int
    """Of one sequence."""
    rounds: int
    """In all."""
    picks: int
    """Of a round."""
    lines: int
    """Of a row."""
    group: int
    """Rows that stand together in one register."""
    per_block: int
    table: int
    """Entries of one sequence's table."""
    pool_blocks: int

    @property
    def units(self) -> int:
        """Of a round."""
        return self.picks // UNIT


def subcores() -> Subcores | None:
    """Of the device that is traced for; None where it has none."""
    if interpret_params():
        return Subcores(*_INTERPRETED)
    try:
        info = pltpu.get_tpu_info().sparse_core
    except ValueError:  # no TPU: this is traced to be compiled for one elsewhere
        return None
    return info and Subcores(info.num_cores, info.num_subcores, info.num_lanes)


def can_gather(rows: BlockRows) -> bool:
    """Whether rows of such a pool can be gathered here."""
    _, per, words = rows.pool.shape
    whole = per % SUBLANES == 0 or per in (1, 2, 4)
    return rows.pool.dtype.itemsize == 4 and words % LANES == 0 and whole and subcores() is not None


def gather(
    rows: BlockRows, picks: Int[Array, "n t places"], *, per_block: int
) -> Shaped[Array, "blocks per_block words"]:
    """The picked rows in blocks of ``per_block``, query by query; see ``can_gather``.

    Args:
      rows: of 32-bit words.
      picks: ascending, free places at the end, NO_ROW there; ``places`` is a multiple of 32 and of
        ``per_block``.
      per_block: rows of a block of the result, a multiple of 8.

    Returns:
      As many blocks as the places fill; what stands at free places may be anything.
    """
    here = subcores()
    assert here is not None, "asked for by can_gather"
    words = rows.pool.shape[2]
    n, t, places = picks.shape
    size = _sizes(rows, (n, t, places), here)
    lines = _as_lines(rows.pool.reshape(-1, size.group, words))
    out = _call(size, lines, rows.table.reshape(-1), picks.reshape(-1))
    return out.transpose(0, 2, 1, 3).reshape(-1, per_block, words)


def _sizes(rows: BlockRows, shape: tuple[int, int, int], here: Subcores) -> _Sizes:
    n, t, places = shape
    blocks, per, words = rows.pool.shape
    most = tuned("attention/gather/tpu", Staging(), width=words).picks
    fits = min(most, _ROUND_BYTES // (4 * words))
    # Enough rounds that every subcore has one, as long as a round has a unit.
    wanted = n * t * places // (here.cores * here.subcores)
    sizes = (128, 64, 32) if places % 128 == 0 else (64, 32) if places % 64 == 0 else (32,)
    picks = next((x for x in sizes if x <= min(fits, wanted)), UNIT)
    return _Sizes(
        subcores=here,
        places=places,
        queries=t,
        rounds=n * t * places // picks,
        picks=picks,
        lines=words // LANES,
        group=min(per, SUBLANES),
        per_block=per,
        table=rows.table.shape[1],
        pool_blocks=blocks,
    )


def _as_lines(x: Shaped[Array, "groups group words"]) -> Shaped[Array, "lines 128"]:
    """Words in the order in which a TPU has them. Moves no data there."""
    groups, group, words = x.shape
    x = x.reshape(groups, group, words // LANES, LANES).transpose(0, 2, 1, 3)
    return x.reshape(-1, LANES)


def _call(size: _Sizes, lines: jax.Array, table: jax.Array, picks: jax.Array) -> jax.Array:
    if not interpret_params():
        return _traced(size, lines, table, picks)
    chip = jax.sharding.AbstractMesh((1,), ("chip",), abstract_device=_INTERPRETED_CHIP)
    with jax.sharding.use_abstract_mesh(chip):
        return _traced(size, lines, table, picks)


def _traced(size: _Sizes, lines: jax.Array, table: jax.Array, picks: jax.Array) -> jax.Array:
    mesh = plsc.VectorSubcoreMesh(
        core_axis_name="core",
        subcore_axis_name="subcore",
        num_cores=size.subcores.cores,
        num_subcores=size.subcores.subcores,
    )
    kernel = pl.kernel(
        lambda *refs: _kernel(_Refs(*refs), size),
        out_type=jax.ShapeDtypeStruct(
            (picks.size // SUBLANES, size.lines, SUBLANES, LANES), lines.dtype
        ),
        mesh=mesh,
        scratch_types=[
            pltpu.VMEM((size.picks,), jnp.int32),
            pltpu.VMEM((size.picks,), jnp.int32),
            pltpu.VMEM((size.picks,), jnp.int32),
            pltpu.VMEM((size.units, size.lines, UNIT), jnp.int32),
            pltpu.VMEM((size.units, size.lines, UNIT, LANES), lines.dtype),
            pltpu.SemaphoreType.DMA(()),
            pltpu.SemaphoreType.DMA((size.units,)),
            pltpu.SemaphoreType.DMA((size.units,)),
        ],
        compiler_params=pltpu.CompilerParams(
            use_tc_tiling_on_sc=False, disable_bounds_checks=True, needs_layout_passes=True
        ),
        interpret=interpret_params(),
        name="gather_picks",
    )
    out: jax.Array = kernel(lines, table, picks)
    return out


class _Refs(NamedTuple):
    """What a subcore reads and writes. In its own memory from ``own_picks`` on."""

    lines: Any
    """``[lines, 128]``, the pool, in HBM."""
    table: Any
    """int32 ``[n * table]``, in HBM."""
    picks: Any
    """int32 ``[n * t * places]``, in HBM."""
    out: Any
    """``[n * t * places / 8, lines of a row, 8, 128]``, in HBM."""
    own_picks: Any
    """int32 ``[picks]``: of the round."""
    entries: Any
    """int32 ``[picks]``: which entry of ``table`` tells the block of each."""
    blocks: Any
    """int32 ``[picks]``: those blocks."""
    numbers: Any
    """int32 ``[units, lines of a row, 32]``: which lines they are."""
    rows: Any
    """``[units, lines of a row, 32, 128]``"""
    found: Any
    """DMA semaphore of ``blocks``."""
    read: Any
    """``[units]`` DMA semaphores."""
    written: Any
    """``[units]`` DMA semaphores."""


def rounds_of(me: Any, rounds: int, subcores: int) -> tuple[Any, Any]:
    """The first round of one subcore, and where it ends: rounds that follow each other."""
    each = cdiv(rounds, subcores)
    return jnp.minimum(me * each, rounds), jnp.minimum((me + 1) * each, rounds)


def _kernel(refs: _Refs, size: _Sizes) -> None:
    """All rounds of one subcore."""
    me, all_ = lax.axis_index(("core", "subcore")), size.subcores.cores * size.subcores.subcores
    written = lax.fori_loop(
        *rounds_of(me, size.rounds, all_),
        lambda i, written: _round(i, written, refs, size),
        jnp.int32(0),
    )
    for unit in range(size.units):
        _wait_written(unit, written, refs)


def _round(round_: jax.Array, written: jax.Array, refs: _Refs, size: _Sizes) -> jax.Array:
    """One round. ``written`` has a bit for each unit whose last rows are being written."""
    start = pl.multiple_of(round_ * size.picks, size.picks)
    pltpu.sync_copy(refs.picks.at[pl.ds(start, size.picks)], refs.own_picks)
    lanes = size.subcores.lanes
    firsts = [refs.own_picks[pl.ds(unit * UNIT, lanes)][0] for unit in range(size.units)]
    wanted = [first != NO_ROW for first in firsts]

    @pl.when(wanted[0])
    def _() -> None:
        _find_blocks(start // (size.queries * size.places), refs, size)

    for unit in range(size.units):
        _wait_written(unit, written, refs)

        @pl.when(wanted[unit])
        def _(unit: int = unit) -> None:
            _number(unit, refs, size)
            for copy in _reads(unit, refs, size):
                copy.start()

    for unit in range(size.units):

        @pl.when(wanted[unit])
        def _(unit: int = unit) -> None:
            for copy in _reads(unit, refs, size):
                copy.wait()
            for copy in _writes(unit, start, refs):
                copy.start()

    return sum((jnp.where(x, 1 << unit, 0) for unit, x in enumerate(wanted)), jnp.int32(0))


def _find_blocks(sequence: Any, refs: _Refs, size: _Sizes) -> None:
    """The cache block of every pick of the round."""
    lanes = size.subcores.lanes
    for first in range(0, size.picks, lanes):
        part = pl.ds(first, lanes)
        entry = jnp.clip(
            lax.div(refs.own_picks[part], jnp.int32(size.per_block)), 0, size.table - 1
        )
        refs.entries[part] = entry + sequence * size.table
    for copy in _indirect(refs.table, refs.entries, refs.blocks, refs.found):
        copy.start()
    for copy in _indirect(refs.table, refs.entries, refs.blocks, refs.found):
        copy.wait()


def _number(unit: int, refs: _Refs, size: _Sizes) -> None:
    """Numbers of the lines of a unit's rows. Those of free places are in range."""
    lanes = size.subcores.lanes
    for first in range(0, UNIT, lanes):
        part = pl.ds(unit * UNIT + first, lanes)
        row = lax.rem(refs.own_picks[part], jnp.int32(size.per_block))
        block = jnp.clip(refs.blocks[part], 0, size.pool_blocks - 1)
        group = lax.div(row, jnp.int32(size.group))
        within = row - group * size.group
        group = group + block * (size.per_block // size.group)
        for line in range(size.lines):
            number = (group * size.lines + line) * size.group + within
            refs.numbers[unit, line, pl.ds(first, lanes)] = number


def _reads(unit: int, refs: _Refs, size: _Sizes) -> list[Any]:
    """The copies of a unit's lines from the pool."""
    copies = []
    for line in range(size.lines):
        to = refs.rows.at[unit, line]
        copies += _indirect(refs.lines, refs.numbers.at[unit, line], to, refs.read.at[unit])
    return copies


def _writes(unit: int, start: Any, refs: _Refs) -> list[Any]:
    """The copies of a unit's rows to the result; the round begins at place ``start``."""
    copies = []
    for tile in range(UNIT // SUBLANES):
        to = refs.out.at[(start + unit * UNIT) // SUBLANES + tile]
        for line in range(refs.rows.shape[1]):
            part = refs.rows.at[unit, line, pl.ds(tile * SUBLANES, SUBLANES)]
            copies.append(pltpu.make_async_copy(part, to.at[line], refs.written.at[unit]))
    return copies


def _wait_written(unit: int, written: jax.Array, refs: _Refs) -> None:
    """Before a unit's memory is used again. Any copy of that size will do to wait."""

    @pl.when((written >> unit) & 1 == 1)
    def _() -> None:
        for copy in _writes(unit, 0, refs):
            copy.wait()


def _indirect(source: Any, numbers: Any, to: Any, arrived: Any) -> list[Any]:
    """``to[i] = source[numbers[i]]``, as copies."""
    if not interpret_params():
        return [pltpu.make_async_copy(source.at[numbers], to, arrived)]
    # The interpreter has no indirect copies: the same, one by one.
    return [
        pltpu.make_async_copy(
            source.at[pl.ds(numbers[pl.ds(i, 1)][0], 1)], to.at[pl.ds(i, 1)], arrived
        )
        for i in range(to.shape[0])
    ]
