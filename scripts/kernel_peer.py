"""Kernels beside tokamax's XLA references of the same operations, on the same random inputs.

    inputs --+--> ours -------------------------+
             +--> theirs, in its own process ---+--> errors of both to float64
             +--> numpy in float64 -------------+

Rows are numbers that the caches of both hold exactly, so that what is compared is arithmetic, not
how rows were rounded. Errors are relative to the largest magnitude of an output's last axis.
"""

import os
import pathlib
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import command_line
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from rich.console import Console

from hybridkv.errors import UserError
from pallas_kernels.attention import api as attention
from pallas_kernels.blocks import BlockRows
from pallas_kernels.compression import api as compression
from pallas_kernels.index_scores import api as index_scores
from pallas_kernels.index_scores.reference import block_scores
from pallas_kernels.packing import api as packing
from pallas_kernels.packing.layout import RowLayout
from pallas_kernels.sequences import Active

SCRIPT = pathlib.Path(__file__).parent / "peers" / "tokamax_reference.py"
REMEDY = "make an environment from scripts/peers/tokamax.txt and name its Python by --peer-python"
SEQUENCES, ROWS, PICKS, PER = 4, 1024, 512, 32
HEADS, WIDTH, ROPE, WINDOW = 64, 512, 64, 128
INDEX_WIDTH, RATIO, CELLS, GROUP = 128, 4, 32, 64
SIDES = ("ours", "theirs")
TABLE = 150
"""Characters of a line."""
Arrays = dict[str, Any]
_encode = jax.jit(packing.encode, static_argnames=("format", "implementation"))
_decode = jax.jit(packing.decode, static_argnames=("format", "implementation"))


def compare(python: str, implementation: str, seed: int) -> list[dict[str, Any]]:
    """A row of errors for each operation.

    Raises:
      UserError: the peer's interpreter is not there or has no tokamax.
    """
    _check(python)
    rows: list[dict[str, Any]] = []
    for operation, (peer, function) in OPERATIONS.items():
        row: dict[str, Any] = {"operation": operation, "peer": peer}
        if isinstance(function, str):
            rows.append({**row, "unsupported": function})
            continue
        inputs, sides = function(np.random.default_rng(seed), implementation)
        theirs = _theirs(python, peer, inputs)
        if "error" in theirs:
            rows.append({**row, "unsupported": str(theirs["error"])})
            continue
        rows.append({**row, **sides(theirs)})
    return rows


def _check(python: str) -> None:
    there = "import importlib.util, sys; sys.exit(importlib.util.find_spec('tokamax') is None)"
    try:
        done = subprocess.run([python, "-c", there], check=False, capture_output=True)
    except OSError as error:
        raise UserError(f"cannot run {python}: {error.strerror}: {REMEDY}") from error
    if done.returncode:
        raise UserError(f"{python} has no tokamax: {REMEDY}")


def _theirs(python: str, operation: str, inputs: Arrays) -> Arrays:
    with tempfile.TemporaryDirectory() as folder:
        given, made = pathlib.Path(folder) / "in.npz", pathlib.Path(folder) / "out.npz"
        np.savez(given, **inputs)
        command = [python, "-W", "ignore", str(SCRIPT), operation, str(given), str(made)]
        done = subprocess.run(
            command,
            env={**os.environ, "JAX_PLATFORMS": "cpu"},
            capture_output=True,
            text=True,
            check=False,
        )
        if not made.exists():
            last = ([x for x in done.stderr.splitlines() if x.strip()] or ["no output"])[-1]
            raise UserError(f"the peer cannot run ({last}): {REMEDY}")
        return dict(np.load(made))


def errors(exact: np.ndarray, **sides: Any) -> dict[str, Any]:
    """The largest and the median error of each side."""
    size = np.abs(exact).max(axis=-1, keepdims=True)
    result = {}
    for name, value in sides.items():
        off = np.abs(np.asarray(value, np.float64) - exact) / size
        result[name] = {"max": float(off.max()), "median": float(np.median(off))}
    return result


def _normal(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.normal(size=shape).astype(np.float32)


def _halves(x: np.ndarray) -> np.ndarray:
    return x.astype(ml_dtypes.bfloat16).astype(np.float32)


def _e4m3(x: np.ndarray) -> np.ndarray:
    return x.astype(ml_dtypes.float8_e4m3fn).astype(np.float32)


def _blocks(rng: np.random.Generator, rows: np.ndarray, layout: RowLayout) -> BlockRows:
    """Rows ``[n, rows, width]`` in shuffled blocks."""
    n, count, _ = rows.shape
    stored = _encode(jnp.asarray(rows), format=layout.format)
    back = np.asarray(_decode(stored, format=layout.format))
    assert np.array_equal(back, rows), "rows that the cache does not hold exactly"
    table = rng.permutation(n * count // PER).astype(np.int32)
    blocks = np.asarray(stored).reshape(n * count // PER, PER, -1)
    pool = np.empty_like(blocks)
    pool[table] = blocks
    return BlockRows(jnp.asarray(pool), jnp.asarray(table.reshape(n, -1)))


def _attention(rng: np.random.Generator, implementation: str) -> tuple[Arrays, Any]:
    rows = np.concatenate(
        [
            _e4m3(_normal(rng, SEQUENCES, ROWS, WIDTH - ROPE)),
            _halves(_normal(rng, SEQUENCES, ROWS, ROPE)),
        ],
        axis=-1,
    )
    q = _halves(_normal(rng, SEQUENCES, HEADS, WIDTH))
    local, sink = _halves(_normal(rng, SEQUENCES, WINDOW, WIDTH)), _normal(rng, HEADS)
    picks = np.stack([np.sort(rng.permutation(ROWS)[:PICKS]) for _ in range(SEQUENCES)])
    scale = WIDTH**-0.5
    wide = {name: x.astype(np.float64) for name, x in (("q", q), ("local", local), ("sink", sink))}
    seen = np.einsum("nhc,nkc->nhk", wide["q"], wide["local"]) * scale
    top = seen.max(axis=-1)
    weights = np.exp(seen - top[..., None])
    window = {"top": top, "total": weights.sum(-1), "acc": weights @ wide["local"]}
    picked = np.take_along_axis(rows, picks[..., None], axis=1).astype(np.float64)
    logits = np.einsum("nhc,nkc->nhk", wide["q"], picked) * scale
    most = np.maximum(np.maximum(logits.max(-1), top), wide["sink"])
    powers, keep = np.exp(logits - most[..., None]), np.exp(top - most)
    total = window["total"] * keep + powers.sum(-1) + np.exp(wide["sink"] - most)
    exact = (window["acc"] * keep[..., None] + powers @ picked) / total[..., None]
    layout = RowLayout("fp8_rope16", WIDTH, ROPE)

    @jax.jit
    def attend(q: jax.Array, local: jax.Array, rows: BlockRows) -> jax.Array:
        return attention.attend(
            q[:, None],
            local,
            jnp.full((SEQUENCES,), RATIO * ROWS - 1, jnp.int32),
            jnp.asarray(sink),
            active=Active.all(SEQUENCES),
            window=WINDOW,
            scale=scale,
            rows=rows,
            visible=jnp.full((SEQUENCES, 1), ROWS, jnp.int32),
            picks=jnp.asarray(picks[:, None], jnp.int32),
            format=layout,
            local_format="bfloat16",
            implementation=implementation,
        )

    stored = _encode(jnp.asarray(local), format="bfloat16")
    ours = attend(jnp.asarray(q), stored, _blocks(rng, rows, layout))
    inputs = {"q": q, "rows": rows, "picks": picks.astype(np.int32), "sink": sink, "scale": scale}
    inputs |= {f"window_{name}": x.astype(np.float32) for name, x in window.items()}
    note = {"note": "theirs is given the window's part, from float64"}
    return inputs, lambda theirs: note | errors(exact, ours=ours[:, 0], theirs=theirs["out"])


def _index_scores(rng: np.random.Generator, implementation: str) -> tuple[Arrays, Any]:
    power = rng.integers(-3, 4, (SEQUENCES, ROWS)).astype(np.int32)
    unit = (2.0 ** power[..., None]).astype(np.float32)
    rows = _e4m3(_normal(rng, SEQUENCES, ROWS, INDEX_WIDTH)) * unit
    q = _e4m3(_normal(rng, SEQUENCES, HEADS, INDEX_WIDTH))
    weights = _normal(rng, SEQUENCES, HEADS)
    hits = np.maximum(np.einsum("nhc,nkc->nhk", q.astype(np.float64), rows), 0)
    exact = np.einsum("nhk,nh->nk", hits, weights.astype(np.float64))
    best = np.argsort(-exact, axis=-1, kind="stable")[:, :PICKS]

    @jax.jit
    def pick(queries: jax.Array, weights: jax.Array, rows: BlockRows) -> jax.Array:
        seen = jnp.full((SEQUENCES, 1), ROWS, jnp.int32)
        options: Arrays = {"format": "bfloat16", "implementation": implementation}
        return index_scores.pick_rows(queries, weights, rows, seen, topk=PICKS, **options)

    blocks = _blocks(rng, rows, RowLayout("bfloat16", INDEX_WIDTH))
    picks = pick(jnp.asarray(q[:, None]), jnp.asarray(weights[:, None]), blocks)
    score = jax.jit(jax.vmap(block_scores))
    scores = score(jnp.asarray(q[:, None]), jnp.asarray(weights[:, None]), jnp.asarray(rows))

    def sides(theirs: Arrays) -> dict[str, Any]:
        own, other = np.asarray(picks)[:, 0], theirs["picks"]
        given = np.take_along_axis(np.asarray(scores)[:, 0], other, axis=-1)
        at = np.take_along_axis(exact, other, axis=-1)
        return {
            **errors(at, ours=given, theirs=theirs["scores"]),
            "note": f"of {best.size} picks float64 has {_shared(own, best)} of ours, "
            f"{_shared(other, best)} of theirs",
        }

    inputs = {"q": q, "weights": weights, "rows": rows, "power": power, "topk": PICKS}
    return inputs, sides


def _shared(picks: np.ndarray, best: np.ndarray) -> int:
    return sum(len(np.intersect1d(a, b)) for a, b in zip(picks, best, strict=True))


def _compression(rng: np.random.Generator, implementation: str) -> tuple[Arrays, Any]:
    """Theirs also normalises; a division of ours in float64 makes both the same operation."""
    del implementation  # pool_cells takes that of the platform
    shape = (CELLS + 1, RATIO, 2, WIDTH)
    kv, gate = _normal(rng, *shape), _normal(rng, *shape)

    def windows(x: np.ndarray) -> np.ndarray:
        return np.concatenate([x[:-1, :, 0], x[1:, :, 1]], axis=1)

    def flat(x: np.ndarray) -> jax.Array:
        return jnp.asarray(x[1:].reshape(CELLS, RATIO, 2 * WIDTH))

    def normalised(x: Any) -> np.ndarray:
        x = np.asarray(x, np.float64)
        return x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True))

    wide = windows(gate).astype(np.float64)
    powers = np.exp(wide - wide.max(axis=1, keepdims=True))
    exact = normalised((powers * windows(kv)).sum(axis=1) / powers.sum(axis=1))
    before = compression.Earlier(
        jnp.asarray(kv[0, :, 0]), jnp.asarray(gate[0, :, 0]), jnp.asarray(True)
    )
    ours = jax.jit(compression.pool_cells)(flat(kv), flat(gate), before)
    inputs = {"kv": windows(kv), "gate": windows(gate)}
    inputs["valid"] = np.ones(inputs["kv"].shape[:2], bool)
    return inputs, lambda theirs: errors(exact, ours=normalised(ours), theirs=theirs["out"])


def _packing(rng: np.random.Generator, implementation: str) -> tuple[Arrays, Any]:
    rows = _normal(rng, 1024, WIDTH - ROPE) * 2.0 ** rng.integers(-8, 8, (1024, 1))
    rows = rows.astype(np.float32)
    layout = RowLayout("fp8_rope16", WIDTH - ROPE)
    stored = _encode(jnp.asarray(rows), format=layout, implementation=implementation)
    ours = np.asarray(_decode(stored, format=layout, implementation=implementation))

    def sides(theirs: Arrays) -> dict[str, Any]:
        differ = int((ours != theirs["out"]).sum())
        exact = rows.astype(np.float64)
        return {
            **errors(exact, ours=ours, theirs=theirs["out"]),
            "note": f"the format's error; {differ} of {ours.size} channels differ",
        }

    return {"rows": rows, "group": GROUP}, sides


OPERATIONS: Mapping[str, tuple[str, Callable[..., tuple[Arrays, Any]] | str]] = {
    "attention over picks": ("sparse_mla", _attention),
    "attention over all rows": (
        "masked_dense_mla",
        "of another operation: no window, no sink, one scale for a whole cache",
    ),
    "index scores": ("lightning_indexer", _index_scores),
    "compression": ("dsv4_compressor", _compression),
    "packing, fp8_rope16": ("quantize_fp8_ue8m0", _packing),
    "moves of blocks": ("", "tokamax has no such operation"),
}
"""Ours; tokamax's name, and how both are called, or why its reference is not."""


def report(rows: Sequence[dict[str, Any]], device: str) -> None:
    """Prints the table."""
    command_line.print_table(
        f"kernels on {device} and tokamax's references on its CPU: relative errors to float64",
        ["operation", "tokamax", "ours: max", "median", "theirs: max", "median", ""],
        [
            (
                row["operation"],
                row["peer"] or "-",
                *(
                    ("-", "-", "-", "-", row["unsupported"])
                    if "unsupported" in row
                    else (
                        *(
                            f"{row[s][k]:.1e}"
                            for s in ("ours", "theirs")
                            for k in ("max", "median")
                        ),
                        row.get("note", ""),
                    )
                ),
            )
            for row in rows
        ],
        console=Console(width=TABLE),
    )
