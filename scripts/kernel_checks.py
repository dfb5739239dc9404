"""How far a kernel's output is from float64, on the queries that are looked at.

Sums over a million tokens in numpy take long, so the first and last sequence, query and head stand
for all; what a kernel gets wrong in one place it gets wrong in others. Moves and packing are exact
or wrong: their error is the share of wrong elements.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from kernel_cases import WINDOW, KernelCase

from pallas_kernels.blocks import BlockRows
from pallas_kernels.compression import reference as compression
from pallas_kernels.moves import reference as moves
from pallas_kernels.packing import reference as packing


def worst(operation: str, case: KernelCase, arguments: tuple[Any, ...], output: Any) -> float:
    """The largest error of ``output``.

    Of attention and compressors, to the largest magnitude of the exact output; of index scores, by
    how much a picked row's score misses that of the best row that was left out, to the spread of
    scores; of moves and packing, the share of elements that are wrong.
    """
    return float(_CHECKS[operation](case, arguments, output))


def _ends(count: int) -> list[int]:
    return sorted({0, count - 1})


def _keys(rows: BlockRows, sequence: int, count: int, format: Any) -> np.ndarray:
    """float64 rows ``0 ... count - 1`` of a sequence."""
    per = rows.pool.shape[1]
    blocks = rows.table[sequence, : -(-count // per)]
    stored = rows.pool[blocks].reshape(-1, *rows.pool.shape[2:])[:count]
    return np.asarray(packing.decode(stored, format), np.float64)


def _attention(case: KernelCase, arguments: tuple[Any, ...], output: Any) -> float:
    given, got = arguments[0], np.asarray(output, np.float64)
    n, t, heads, width = got.shape
    errors, sizes = [], []
    for i in _ends(n):
        local = np.asarray(packing.decode(given["local"][i], case.local_format), np.float64)
        for j in _ends(t):
            keys = local[j : j + WINDOW]
            if "rows" in given:
                rows = _keys(given["rows"], i, int(given["visible"][i, j]), case.format)
                keys = np.concatenate(
                    [keys, rows[np.asarray(given["picks"][i, j])] if "picks" in given else rows]
                )
            for head in _ends(heads):
                q = np.asarray(given["q"][i, j, head], np.float64) * width**-0.5
                logits = np.append(keys @ q, np.float64(given["sink"][head]))
                weights = np.exp(logits - logits.max())
                exact = weights[:-1] @ keys / weights.sum()
                errors.append(np.abs(exact - got[i, j, head]).max())
                sizes.append(np.abs(exact).max())
    return max(errors) / max(sizes)


def _index_scores(case: KernelCase, arguments: tuple[Any, ...], output: Any) -> float:
    queries, weights, rows, visible, _ = arguments
    picks, worst_miss = np.asarray(output), 0.0
    n, t = visible.shape
    for i in _ends(n):
        for j in _ends(t):
            count = int(visible[i, j])
            keys = _keys(rows, i, count, case.format)
            hits = np.maximum(keys @ np.asarray(queries[i, j], np.float64).T, 0)
            scores = hits @ np.asarray(weights[i, j], np.float64)
            picked = np.zeros(count, bool)
            picked[picks[i, j][picks[i, j] < count]] = True
            if picked.sum() != min(count, picks.shape[-1]):
                return np.inf
            if not picked.all():
                missed = scores[~picked].max() - scores[picked].min()
                worst_miss = max(worst_miss, missed / scores.std())
    return worst_miss


def _moves(case: KernelCase, arguments: tuple[Any, ...], output: Any) -> float:
    expected = (
        moves.gather_blocks(*arguments) if len(arguments) == 2 else moves.scatter_blocks(*arguments)
    )
    return float(jnp.mean(jnp.asarray(output) != expected))


def _compression(case: KernelCase, arguments: tuple[Any, ...], output: Any) -> float:
    with jax.enable_x64(True):
        wide = jax.tree.map(
            lambda x: x if x.dtype == bool else jnp.asarray(np.asarray(x, np.float64)), arguments
        )
        exact = np.asarray(compression.pool_cells(*wide))
    return np.abs(exact - np.asarray(output, np.float64)).max() / np.abs(exact).max()


def _packing(case: KernelCase, arguments: tuple[Any, ...], output: Any) -> float:
    (given,) = arguments
    function = packing.encode if given.dtype == jnp.float32 else packing.decode
    return float(jnp.mean(jnp.asarray(output) != function(given, case.format)))


_CHECKS: Mapping[str, Callable[[KernelCase, tuple[Any, ...], Any], float]] = {
    "attention": _attention,
    "index_scores": _index_scores,
    "moves": _moves,
    "compression": _compression,
    "packing": _packing,
}
