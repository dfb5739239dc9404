"""Runs tokamax's XLA references of DeepSeek-V4 operations on arrays that it is given.

    tokamax_reference.py OPERATION INPUTS.npz OUTPUTS.npz

``benchmark.py kernels --peer tokamax`` runs it in an environment made from ``tokamax.txt``. Imports
nothing of this project: plain float32 rows come in and are put into tokamax's own caches here,
which hold them exactly.
"""

import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

PAGE = 64
"""Rows of a page."""
CODED, PERIOD = 448, 64
"""Channels of a main row that are e4m3, and how many scales they take turns with."""
SCALE_ONE = 127
"""The e8m0 code of 1."""


def sparse_mla(x: Any) -> dict[str, Any]:
    """Attention over picked rows of one query a sequence, its window's part given."""
    from tokamax._src.ops.dsv4_compressor import csa_cache_layout
    from tokamax._src.ops.sparse_mla import reference

    n, rows, width = x["rows"].shape
    codes = _e4m3(x["rows"][..., :CODED])
    slabs = np.full((n, rows, width), SCALE_ONE, np.uint8)
    slabs[..., :CODED] = codes
    nope = csa_cache_layout.slabs_to_words(jnp.asarray(slabs.reshape(n * rows, 4, 128)))
    rope = jnp.asarray(x["rows"][..., CODED:].reshape(n * rows, PERIOD), jnp.bfloat16)
    rope_rows = csa_cache_layout.encode_rope(rope)
    pages = n * rows // PAGE
    out = reference.sparse_ragged_paged_attention(
        jnp.asarray(x["q"]),
        nope.reshape(pages, PAGE, 128),
        rope_rows.reshape(pages, PAGE // 4, 128),
        jnp.asarray(x["picks"]),
        jnp.arange(pages, dtype=jnp.int32),
        jnp.arange(n + 1, dtype=jnp.int32),
        jnp.asarray([n, n, n], jnp.int32),
        jnp.asarray(x["sink"]),
        jnp.asarray(x["window_acc"]),
        jnp.asarray(x["window_total"]),
        jnp.asarray(x["window_top"]),
        sm_scale=float(x["scale"]),
    )
    return {"out": out}


def lightning_indexer(x: Any) -> dict[str, Any]:
    """The best rows of one query a sequence, and their scores."""
    from tokamax._src.ops.lightning_indexer import reference

    n, rows, width = x["rows"].shape
    cache = np.zeros((n * rows, 2 * width), np.uint8)
    codes = x["rows"] / 2.0 ** x["power"][..., None]
    cache[:, :width] = _e4m3(codes).reshape(n * rows, width)
    cache[:, width] = (x["power"] + SCALE_ONE).reshape(-1)
    picks, bits = reference.lightning_indexer(
        jnp.asarray(x["q"]),
        jnp.asarray(x["weights"]),
        jnp.asarray(cache.reshape(n * rows // PAGE, PAGE // 4, 4, 2 * width)),
        jnp.full((n,), rows, jnp.int32),
        jnp.arange(n * rows // PAGE, dtype=jnp.int32),
        jnp.arange(n + 1, dtype=jnp.int32),
        jnp.asarray([n, n, n], jnp.int32),
        k=int(x["topk"]),
        return_scores=True,
    )
    return {"picks": picks, "scores": jax.lax.bitcast_convert_type(bits, jnp.float32)}


def dsv4_compressor(x: Any) -> dict[str, Any]:
    """Rows of cells, pooled and normalised; without a rotation, as the position is 0."""
    from tokamax._src.ops.dsv4_compressor import reference

    cells, _, width = x["kv"].shape
    still = np.concatenate([np.ones(PERIOD // 2), np.zeros(PERIOD // 2)]).astype(np.float32)
    out = reference.compress_norm_rope(
        jnp.asarray(x["kv"]),
        jnp.asarray(x["gate"]),
        jnp.asarray(x["valid"]),
        jnp.ones((width,), jnp.float32),
        jnp.asarray(still[None]),
        jnp.zeros((cells,), jnp.int32),
        0.0,
        PERIOD,
    )
    return {"out": out}


def quantize(x: Any) -> dict[str, Any]:
    """Rows through e4m3 with a scale for each group of channels."""
    from tokamax._src.ops.dsv4_compressor import reference

    codes, scale = reference.quantize_fp8_ue8m0(jnp.asarray(x["rows"]), int(x["group"]))
    unit = jnp.repeat(scale.astype(jnp.float32), int(x["group"]), axis=-1)
    return {"out": codes.astype(jnp.float32) * unit}


def _e4m3(values: np.ndarray) -> np.ndarray:
    """Codes of values that e4m3 has."""
    stored = jnp.asarray(values, jnp.float8_e4m3fn)
    if not np.array_equal(np.asarray(stored.astype(jnp.float32)), np.asarray(values, np.float32)):
        raise ValueError("rows that e4m3 does not hold exactly")
    return np.asarray(jax.lax.bitcast_convert_type(stored, jnp.uint8))


OPERATIONS = {
    "sparse_mla": sparse_mla,
    "lightning_indexer": lightning_indexer,
    "dsv4_compressor": dsv4_compressor,
    "quantize_fp8_ue8m0": quantize,
}


def main() -> None:
    """Runs one operation and writes what it gives, or why it does not run."""
    name, inputs, outputs = sys.argv[1:]
    given = dict(np.load(inputs))
    try:
        made = {key: np.asarray(value) for key, value in OPERATIONS[name](given).items()}
    except Exception as error:  # theirs: anything that it may raise is a result here
        text = " ".join(f"{type(error).__name__}: {error}".split())
        made = {"error": np.asarray(text[:200])}
    np.savez(outputs, **made)


if __name__ == "__main__":
    main()
