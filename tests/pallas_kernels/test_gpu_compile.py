"""The GPU kernels reach machine code for Hopper and Blackwell at the sizes of DeepSeek-V4-Flash."""

import contextlib
import functools
import importlib.util
import pathlib
import site

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.attention import gpu as attention
from pallas_kernels.blocks import BlockRows
from pallas_kernels.compression import gpu as compression
from pallas_kernels.compression.api import Earlier
from pallas_kernels.index_scores import gpu as index_scores
from pallas_kernels.moves import gpu as moves
from pallas_kernels.packing import gpu as packing
from pallas_kernels.packing.api import stored_form
from pallas_kernels.packing.layout import RowLayout
from pallas_kernels.sequences import Active
from scripts import aot_gpu

pytestmark = [
    pytest.mark.plugin,
    pytest.mark.skipif(
        importlib.util.find_spec(aot_gpu.PLUGIN) is None,
        reason=f"needs the GPU compiler: {aot_gpu.PLUGIN} is not installed",
    ),
]
KINDS = {"h100": "NVIDIA H100 80GB HBM3", "b200": "NVIDIA B200"}


def array(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


def attend(*, n=8, t=1, heads=64, rows=512, per=1, topk=None, layout=None):
    layout = RowLayout("bfloat16", 512) if layout is None else layout
    form, format = stored_form(layout), layout.format

    def function(q, local, first, sink, active, rows, visible, picks):
        options = {"format": format, "local_format": format, "window": 128, "scale": 512**-0.5}
        options |= {"rows": rows, "visible": visible, "picks": picks}
        return attention.attend(q, local, first, sink, active=active, **options)

    return function, (
        array(n, t, heads, 512),
        array(n, 127 + t, *form.shape, dtype=form.dtype),
        array(n, dtype=jnp.int32),
        array(heads),
        Active(array(n, dtype=jnp.int32), array(dtype=jnp.int32)),
        BlockRows(
            array(n * rows // per, per, *form.shape, dtype=form.dtype),
            array(n, rows // per, dtype=jnp.int32),
        ),
        array(n, t, dtype=jnp.int32),
        None if topk is None else array(n, t, topk, dtype=jnp.int32),
    )


def pick(*, n=8, t=1, rows=16384, per=32, name="bfloat16"):
    layout = RowLayout(name, 128)
    form, format = stored_form(layout), layout.format

    def function(queries, weights, rows, visible, active):
        options = {"topk": 512, "format": format}
        return index_scores.pick_rows(queries, weights, rows, visible, active=active, **options)

    return function, (
        array(n, t, 64, 128),
        array(n, t, 64),
        BlockRows(
            array(n * rows // per, per, *form.shape, dtype=form.dtype),
            array(n, rows // per, dtype=jnp.int32),
        ),
        array(n, t, dtype=jnp.int32),
        Active(array(n, dtype=jnp.int32), array(dtype=jnp.int32)),
    )


def pool(ratio, width, *, overlap):
    channels = 2 * width if overlap else width
    before = (array(ratio, width), array(ratio, width), array(dtype=jnp.bool_))
    cells = array(32, ratio, channels)
    return compression.pool_cells, (cells, cells, Earlier(*before) if overlap else None)


def code(function, layout):
    plain, form = array(128, layout.width), stored_form(layout)
    stored = array(128, *form.shape, dtype=form.dtype)
    rows = plain if function is packing.encode else stored
    return functools.partial(function, format=layout), (rows,)


def move(function, per=32, stored=584, dtype=jnp.uint8):
    blocks = (array(4, per, stored, dtype=dtype),) if function is moves.scatter_blocks else ()
    places = array(4, dtype=jnp.int32)
    return function, (array(4096, per, stored, dtype=dtype), *blocks, places)


LAYOUTS = [
    RowLayout("fp8_rope16", 512, 64),
    RowLayout("fp8_block32", 512, 64),
    RowLayout("fp4_e4m3", 512, 64),
    RowLayout("mxfp4", 128),
    RowLayout("fp8_index", 128),
]

CASES = {
    "dense": attend(),
    "dense, 1,048,576 tokens": attend(rows=8192),
    "dense, float32": attend(layout=RowLayout("float32", 512)),
    "dense, packed": attend(layout=RowLayout("fp8_rope16", 512, 64)),
    "picks, packed": attend(layout=RowLayout("fp8_rope16", 512, 64), rows=16384, per=32, topk=512),
    "dense, 128 heads": attend(heads=128, per=8),
    "picks": attend(rows=16384, per=32, topk=512),
    "tile": attend(n=1, t=128, rows=16384, per=32, topk=512),
    "index scores": pick(),
    "index scores, float32": pick(name="float32"),
    "index scores, mxfp4": pick(name="mxfp4"),
    "index scores, mxfp4, 1,048,576 tokens": pick(name="mxfp4", n=1, rows=262144),
    "index scores, fp8": pick(name="fp8_index"),
    "index scores, 1,048,576 tokens": pick(n=1, rows=262144),
    "index scores of a tile": pick(n=1, t=128),
    "cells with overlap": pool(4, 512, overlap=True),
    "cells of 128 tokens": pool(128, 512, overlap=False),
    **{f"encode {x.name}": code(packing.encode, x) for x in LAYOUTS},
    **{f"decode {x.name}": code(packing.decode, x) for x in LAYOUTS},
    "gather": move(moves.gather_blocks),
    "gather of words": move(moves.gather_blocks, stored=512, dtype=jnp.uint16),
    "scatter": move(moves.scatter_blocks),
}
NO_POOL = ("cells", "tile", "code")
"""In the names of cases whose temporaries there is nothing to compare with."""


def on(target: str) -> contextlib.AbstractContextManager[object]:
    """From JAX 0.11 on, a kernel asks the mesh which GPU it is lowered for."""
    if jax.__version_info__ < (0, 11):
        return contextlib.nullcontext()
    sharding = jax.sharding
    device = sharding.AbstractDevice(device_kind=KINDS[target], num_cores=None, platform="gpu")
    return sharding.use_abstract_mesh(sharding.AbstractMesh((), (), abstract_device=device))


@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated")
@pytest.mark.parametrize("target", KINDS)
@pytest.mark.parametrize("case", CASES)
def test_kernels_compile_to_machine_code(case, target, monkeypatch):
    packages = pathlib.Path(site.getsitepackages()[0])
    monkeypatch.setenv("PATH", aot_gpu.environment(packages)["PATH"])
    (device,) = aot_gpu.devices(target)
    sharding = jax.sharding.SingleDeviceSharding(device)
    function, arguments = CASES[case]
    arguments = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
        arguments,
    )
    with on(target):
        lowered = jax.jit(function).trace(*arguments).lower(lowering_platforms=("cuda",))
        assert "xla.gpu.triton" in lowered.as_text()
        memory = lowered.compile().memory_analysis()
    pools = [x.size * x.dtype.itemsize for x in jax.tree.leaves(arguments) if len(x.shape) == 3]
    # Reading a pool as bfloat16 copies nothing.
    assert any(x in case for x in NO_POOL) or memory.temp_size_in_bytes < max(pools)
