"""The kernels that ``compile_for.py`` compiles: abstract arguments at the sizes of V4-Flash.

A case's name is its path: ``attention/dense/65536`` is dense attention of a decode step over 65,536
tokens; ``.../rows8`` sets the rows of a cache block, ``.../float32`` the stored format.
"""

import dataclasses
import importlib
import importlib.util
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from hybridkv.errors import UserError
from pallas_kernels.blocks import BlockRows
from pallas_kernels.packing import api as packing
from pallas_kernels.packing.layout import RowLayout
from pallas_kernels.sequences import Active

HEADS, WIDTH, ROPE, WINDOW = 64, 512, 64, 128
INDEX_HEADS, INDEX_WIDTH, TOPK = 64, 128, 512
SLOTS, TILE = 8, 128
MOVED_BLOCKS = 8
LANES = 128
ROW_BYTES = {
    "float32": 4 * WIDTH,
    "bfloat16": 2 * WIDTH,
    "bfloat16_words": 2 * WIDTH,
    "fp8_rope16": 584,
    "fp8_block32": WIDTH + WIDTH // 32,
    "fp4_e4m3": WIDTH // 2 + WIDTH // 16,
}
INDEX_BYTES = {
    "float32": 4 * INDEX_WIDTH,
    "bfloat16": 2 * INDEX_WIDTH,
    "mxfp4": 68,
    "fp8_index": 132,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Traffic:
    """Bytes that the operation must move, whatever the kernel does."""

    read_bytes: int
    """From HBM: rows, queries, tables."""
    write_bytes: int
    row_bytes: int
    """Of them rows of the cache: what grows with the context."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class KernelCase:
    """A function of one kernel and its arguments, as ``jax.ShapeDtypeStruct``."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    traffic: Traffic
    tokens: int = 0
    """Of a sequence, this step's included."""
    ratio: int = 1
    """Tokens of a compressed row."""
    width: int = WIDTH
    """Channels of a row."""
    format: Any = "float32"
    """What the kernel is told of the rows."""
    local_format: Any = "bfloat16"
    """And of window rows."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Sizes:
    """What the rest of a case's name says."""

    tokens: int = 65536
    rows: int | None = None
    format: str = "bfloat16"
    whole_lanes: bool = False
    """Whether packed rows of pools are as wide as a TPU has them: whole registers, one row after
    the other. Of narrower ones XLA would lay out the blocks of a pool side by side instead."""


def names() -> list[str]:
    """The cases that ``make aot`` compiles."""
    return [
        "attention/dense/65536",
        "attention/dense/65536/rows16",
        *(f"attention/dense/1048576/rows{rows}" for rows in (8, 16, 64)),
        "attention/sparse/65536",
        "attention/sparse/1048576",
        "attention/sparse/1048576/rows256",
        *(f"attention/sparse/{tokens}/bfloat16_words" for tokens in (65536, 1048576)),
        "attention/dense/65536/bfloat16_words",
        *(f"attention/dense/1048576/rows{rows}/fp8_rope16" for rows in (16, 64)),
        "attention/sparse/1048576/fp8_rope16",
        "attention/window",
        "attention/tile_dense/65536/rows16",
        "attention/tile_sparse/65536",
        "attention/tile_sparse/65536/bfloat16_words",
        "index_scores/65536",
        "index_scores/1048576",
        "index_scores/1048576/rows256",
        "index_scores/1048576/mxfp4",
        "index_scores/1048576/fp8_index",
        "index_scores/tile/65536",
        "moves/gather",
        "moves/scatter",
        "compression/overlap",
        "compression/plain",
        *(f"packing/{way}/fp8_rope16" for way in ("encode", "decode")),
    ]


def exists(name: str, implementation: str) -> bool:
    """Whether the operation of this case has such an implementation, whatever it supports."""
    operation = name.partition("/")[0]
    return importlib.util.find_spec(f"pallas_kernels.{operation}.{implementation}") is not None


def tuned_operation(name: str, implementation: str) -> str:
    """What tuning tables call the operation of a case."""
    parts = name.split("/")[: 2 if name.startswith("packing/") else 1]
    return "/".join([*parts, implementation])


def build(name: str, implementation: str) -> KernelCase:
    """The case called ``name``.

    Args:
      name: as in ``names``; sizes may differ from those.
      implementation: ``tpu``, ``gpu`` or ``reference``.

    Raises:
      UserError: no such case.
      ImportError: the operation has no such implementation.
    """
    for start, maker in _CASES.items():
        if name == start or name.startswith(start + "/"):
            sizes = _sizes(name[len(start) + 1 :])
            sizes = dataclasses.replace(sizes, whole_lanes=implementation == "tpu")
            return maker(sizes, _function(start, implementation))
    raise UserError(f"no kernel case {name!r}: cases start with {', '.join(_CASES)}")


def _sizes(rest: str) -> _Sizes:
    sizes = _Sizes()
    for part in filter(None, rest.split("/")):
        if part.isdigit():
            sizes = dataclasses.replace(sizes, tokens=int(part))
        elif part.startswith("rows") and part[4:].isdigit():
            sizes = dataclasses.replace(sizes, rows=int(part[4:]))
        elif part in ROW_BYTES or part in INDEX_BYTES:
            sizes = dataclasses.replace(sizes, format=part)
        else:
            raise UserError(f"{part!r} is no size: give tokens, rowsN or a format")
    return sizes


def _function(start: str, implementation: str) -> Callable[..., Any]:
    """The kernel itself, so that nothing else is taken in its place."""
    operation = start.partition("/")[0]
    name = _NAMES.get(start) or _NAMES[operation]
    if implementation != "reference":
        module = importlib.import_module(f"pallas_kernels.{operation}.{implementation}")
        function: Callable[..., Any] = getattr(module, name)
        return function
    api = importlib.import_module(f"pallas_kernels.{operation}.api")
    chosen: Callable[..., Any] = getattr(api, name)
    if operation in ("attention", "index_scores", "moves"):
        return lambda *x, **options: chosen(*x, implementation="reference", **options)
    return chosen


def _array(shape: tuple[int, ...], dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def _active(n: int) -> Active:
    return Active(_array((n,), jnp.int32), _array((), jnp.int32))  # type: ignore[arg-type]


def _rows(sizes: _Sizes, ratio: int, per: int, width: int, n: int) -> BlockRows:
    """As ``_pool``, with rows as wide as the kernel is to find them."""
    rows = _pool(sizes.tokens, ratio, per, width, sizes.format, n)
    blocks, per, stored = rows.pool.shape
    if sizes.whole_lanes and rows.pool.dtype == jnp.uint8:
        stored = math.ceil(stored / LANES) * LANES
    return rows._replace(pool=_array((blocks, per, stored), rows.pool.dtype))  # type: ignore[arg-type]


def _pool(tokens: int, ratio: int, per: int, width: int, format: str, n: int) -> BlockRows:
    """Pool and tables for ``n`` sequences of ``tokens`` tokens."""
    layout = RowLayout(format, width, ROPE if format == "fp8_rope16" else 0)
    form = packing.stored_form(layout)
    blocks = math.ceil(tokens / ratio / per)
    return BlockRows(
        _array((n * blocks, per, *form.shape), form.dtype),  # type: ignore[arg-type]
        _array((n, blocks), jnp.int32),  # type: ignore[arg-type]
    )


def _stored(format: str, width: int) -> Any:
    """What kernels take as ``format``: a name, or a layout where rows are packed."""
    layout = RowLayout(format, width, ROPE if format == "fp8_rope16" else 0)
    return layout if layout.packed else format


def _attention(sizes: _Sizes, kernel: Callable[..., Any], *, kind: str, t: int) -> KernelCase:
    ratio = {"dense": 128, "sparse": 4, "window": 1}[kind]
    n = SLOTS if t == 1 else 1
    local = RowLayout("bfloat16", WIDTH)
    form = packing.stored_form(local)
    arguments: dict[str, Any] = {
        "q": _array((n, t, HEADS, WIDTH)),
        "local": _array((n, WINDOW - 1 + t, *form.shape), form.dtype),
        "first": _array((n,), jnp.int32),
        "sink": _array((HEADS,)),
        "active": _active(n),
    }
    seen = sizes.tokens // ratio
    row_bytes = ROW_BYTES[sizes.format]
    rows_read = 0
    if kind != "window":
        per = sizes.rows or 128 // ratio
        arguments["rows"] = _rows(sizes, ratio, per, WIDTH, n)
        arguments["visible"] = _array((n, t), jnp.int32)
        rows_read = n * seen * row_bytes
    if kind == "sparse":
        arguments["picks"] = _array((n, t, TOPK), jnp.int32)
        rows_read = n * t * min(TOPK, seen) * row_bytes
    static = {
        "window": WINDOW,
        "scale": WIDTH**-0.5,
        "format": _stored(sizes.format, WIDTH),
        "local_format": "bfloat16",
    }

    def function(arguments: dict[str, Any]) -> jax.Array:
        inputs = dict(arguments)
        positional = [inputs.pop(name) for name in ("q", "local", "first", "sink")]
        result: jax.Array = kernel(*positional, **inputs, **static)
        return result

    fixed = n * (t * HEADS * WIDTH * 4 + (WINDOW - 1 + t) * 2 * WIDTH)
    return KernelCase(
        function=function,
        arguments=(arguments,),
        traffic=Traffic(
            read_bytes=rows_read + fixed,
            write_bytes=n * t * HEADS * WIDTH * 4,
            row_bytes=rows_read,
        ),
        tokens=sizes.tokens,
        ratio=ratio,
        format=static["format"],
    )


def _index_scores(sizes: _Sizes, kernel: Callable[..., Any], *, t: int) -> KernelCase:
    n = SLOTS if t == 1 else 1
    pool = _rows(sizes, 4, sizes.rows or 32, INDEX_WIDTH, n)
    arguments = (
        _array((n, t, INDEX_HEADS, INDEX_WIDTH)),
        _array((n, t, INDEX_HEADS)),
        pool,
        _array((n, t), jnp.int32),
        _active(n),
    )
    format = _stored(sizes.format, INDEX_WIDTH)

    def function(queries: Any, weights: Any, rows: Any, visible: Any, active: Any) -> jax.Array:
        result: jax.Array = kernel(
            queries, weights, rows, visible, active=active, topk=TOPK, format=format
        )
        return result

    rows_read = n * (sizes.tokens // 4) * INDEX_BYTES[sizes.format]
    return KernelCase(
        function=function,
        arguments=arguments,
        traffic=Traffic(
            read_bytes=rows_read + n * t * INDEX_HEADS * (INDEX_WIDTH + 1) * 4,
            write_bytes=n * t * TOPK * 4,
            row_bytes=rows_read,
        ),
        tokens=sizes.tokens,
        ratio=4,
        width=INDEX_WIDTH,
        format=format,
    )


def _moves(sizes: _Sizes, kernel: Callable[..., Any], *, scatter: bool) -> KernelCase:
    """As many blocks of one ratio-4 layer as move at once."""
    per = sizes.rows or 32
    pool = _pool(sizes.tokens, 4, per, WIDTH, sizes.format, SLOTS).pool
    places = _array((MOVED_BLOCKS,), jnp.int32)
    blocks = _array((MOVED_BLOCKS, *pool.shape[1:]), pool.dtype)
    moved = MOVED_BLOCKS * per * ROW_BYTES[sizes.format]
    return KernelCase(
        function=lambda *x: kernel(*x),
        arguments=(pool, blocks, places) if scatter else (pool, places),
        traffic=Traffic(read_bytes=moved, write_bytes=moved, row_bytes=moved),
    )


def _compression(sizes: _Sizes, kernel: Callable[..., Any], *, overlap: bool) -> KernelCase:
    """One sequence's tile."""
    from pallas_kernels.compression.api import Earlier

    ratio, halves = (4, 2) if overlap else (128, 1)
    cells = _array((TILE // ratio, ratio, halves * WIDTH))
    half = _array((ratio, WIDTH))
    earlier = Earlier(half, half, _array((), jnp.bool_)) if overlap else None  # type: ignore[arg-type]
    read = 2 * TILE * halves * WIDTH * 4
    return KernelCase(
        function=lambda kv, gate, earlier: kernel(kv, gate, earlier),
        arguments=(cells, cells, earlier),
        traffic=Traffic(read_bytes=read, write_bytes=TILE // ratio * WIDTH * 4, row_bytes=0),
    )


def _packing(sizes: _Sizes, kernel: Callable[..., Any], *, decode: bool) -> KernelCase:
    """A window of rows."""
    layout = RowLayout(sizes.format, WIDTH, ROPE)
    form = packing.stored_form(layout)
    plain, stored = _array((WINDOW, WIDTH)), _array((WINDOW, *form.shape), form.dtype)
    format = _stored(sizes.format, WIDTH)
    sides = [math.prod(x.shape) * x.dtype.itemsize for x in (plain, stored)]
    return KernelCase(
        function=lambda rows: kernel(rows, format),
        arguments=(stored if decode else plain,),
        traffic=Traffic(
            read_bytes=sides[decode], write_bytes=sides[not decode], row_bytes=sides[1]
        ),
        format=format,
    )


_NAMES: Mapping[str, str] = {
    "attention": "attend",
    "index_scores": "pick_rows",
    "moves/gather": "gather_blocks",
    "moves/scatter": "scatter_blocks",
    "compression": "pool_cells",
    "packing/encode": "encode",
    "packing/decode": "decode",
}
_CASES: Mapping[str, Callable[[_Sizes, Callable[..., Any]], KernelCase]] = {
    "attention/dense": lambda s, f: _attention(s, f, kind="dense", t=1),
    "attention/sparse": lambda s, f: _attention(s, f, kind="sparse", t=1),
    "attention/window": lambda s, f: _attention(s, f, kind="window", t=1),
    "attention/tile_dense": lambda s, f: _attention(s, f, kind="dense", t=TILE),
    "attention/tile_sparse": lambda s, f: _attention(s, f, kind="sparse", t=TILE),
    "index_scores/tile": lambda s, f: _index_scores(s, f, t=TILE),
    "index_scores": lambda s, f: _index_scores(s, f, t=1),
    "moves/gather": lambda s, f: _moves(s, f, scatter=False),
    "moves/scatter": lambda s, f: _moves(s, f, scatter=True),
    "compression/overlap": lambda s, f: _compression(s, f, overlap=True),
    "compression/plain": lambda s, f: _compression(s, f, overlap=False),
    "packing/encode": lambda s, f: _packing(s, f, decode=False),
    "packing/decode": lambda s, f: _packing(s, f, decode=True),
}
