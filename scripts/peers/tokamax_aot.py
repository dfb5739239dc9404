"""Compiles tokamax's DeepSeek-V4 kernels for a TPU that is not there, at this project's sizes.

    tokamax_aot.py TOPOLOGY CASE RESULT.json

``compile_for.py peer`` runs it in an environment made from ``tokamax.txt``, with the compiler's
variables set, and reads the schedules that the compiler dumps. Imports nothing of this project.
Their caches are packed: 640 bytes a main row (e4m3 and scales 512, rope 128), 132 an index row.
"""

import json
import pathlib
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.extend import backend

SLOTS, HEADS, WIDTH, TOPK, RATIO = 8, 64, 512, 512, 4
INDEX_HEADS, INDEX_WIDTH = 64, 128
PAGE = 256
"""Rows of a page: theirs for V4 in the package's own benchmark (1,024 tokens)."""


def sparse_mla(tokens: int) -> tuple[Any, tuple[Any, ...]]:
    """Routed attention of a decode step, window part given."""
    from tokamax._src.ops.sparse_mla import api

    pages = SLOTS * (tokens // RATIO // PAGE + 2)
    shapes = (
        ((SLOTS, HEADS, WIDTH), jnp.bfloat16),
        ((pages, PAGE, 128), jnp.int32),
        ((pages, PAGE // 4, 128), jnp.int32),
        ((SLOTS, TOPK), jnp.int32),
        ((pages,), jnp.int32),
        ((SLOTS + 1,), jnp.int32),
        ((3,), jnp.int32),
        ((HEADS,), jnp.float32),
        ((SLOTS, HEADS, WIDTH), jnp.bfloat16),
        ((SLOTS, HEADS), jnp.float32),
        ((SLOTS, HEADS), jnp.float32),
    )

    def function(*arguments: jax.Array) -> Any:
        return api.sparse_mla(*arguments, sm_scale=WIDTH**-0.5, implementation="mosaic_tpu")

    return function, shapes


def lightning_indexer(tokens: int) -> tuple[Any, tuple[Any, ...]]:
    """Index scores and picks of a decode step."""
    from tokamax._src.ops.lightning_indexer import api

    pages = SLOTS * (tokens // RATIO // PAGE)
    shapes = (
        ((SLOTS, INDEX_HEADS, INDEX_WIDTH), jnp.float8_e4m3fn),
        ((SLOTS, INDEX_HEADS), jnp.float32),
        ((pages, (INDEX_WIDTH + 4) // 4, 4, PAGE), jnp.uint8),
        ((SLOTS,), jnp.int32),
        ((pages,), jnp.int32),
        ((SLOTS + 1,), jnp.int32),
        ((3,), jnp.int32),
    )

    def function(*arguments: jax.Array) -> Any:
        return api.lightning_indexer(
            *arguments,
            k=TOPK,
            compression_ratio=RATIO,
            kv_layout="seq_along_lane",
            implementation="mosaic",
        )

    return function, shapes


def csa_gather(tokens: int) -> tuple[Any, tuple[Any, ...]]:
    """The picked rows of a decode step, copied to one place."""
    from tokamax._src.ops.csa_gather import api

    pages = SLOTS * (tokens // RATIO // PAGE)
    shapes = (
        ((pages, PAGE, 128), jnp.int32),
        ((pages, PAGE // 4, 128), jnp.int32),
        ((SLOTS * TOPK,), jnp.int32),
    )

    def function(*arguments: jax.Array) -> Any:
        return api.csa_gather(*arguments, top_k=TOPK, implementation="mosaic_tpu")

    return function, shapes


CASES = {
    "sparse_mla": sparse_mla,
    "lightning_indexer": lightning_indexer,
    "csa_gather": csa_gather,
}


def main() -> None:
    """Compiles one case and writes what the compiler says about it."""
    topology, case, result = sys.argv[1:]
    name, _, tokens = case.partition("/")
    device = topologies.get_topology_desc(topology, platform="tpu").devices[0]
    # They ask which device they run on; what they are told is the one that is compiled for.
    backend.get_default_device = lambda: device
    mesh = jax.sharding.Mesh(np.array([device]), ("all",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    function, shapes = CASES[name](int(tokens))
    arguments = [jax.ShapeDtypeStruct(shape, dtype, sharding=sharding) for shape, dtype in shapes]
    out: dict[str, Any] = {"ok": False}
    started = time.perf_counter()
    try:
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            lowered = jax.jit(function).trace(*arguments).lower(lowering_platforms=("tpu",))
        traced = time.perf_counter()
        stats = lowered.compile().memory_analysis()
        out = {
            "ok": True,
            "trace_seconds": traced - started,
            "compile_seconds": time.perf_counter() - traced,
            "memory": {
                "arguments": stats.argument_size_in_bytes,
                "outputs": stats.output_size_in_bytes,
                "temporaries": stats.temp_size_in_bytes,
                "code": stats.generated_code_size_in_bytes,
            },
        }
    except Exception as error:  # theirs: anything that it may raise is a result here
        out["error"] = " ".join(f"{type(error).__name__}: {error}".split())[:400]
    pathlib.Path(result).write_text(json.dumps(out | {"jax": jax.__version__}))


if __name__ == "__main__":
    main()
