"""The GPU kernels reach machine code for Hopper and Blackwell at the sizes of DeepSeek-V4-Flash."""

import contextlib
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


def pick(*, n=8, t=1, rows=16384, per=32, dtype=jnp.uint16):
    format = {jnp.uint16: "bfloat16", jnp.float32: "float32"}[dtype]

    def function(queries, weights, rows, visible, active):
        options = {"topk": 512, "format": format}
        return index_scores.pick_rows(queries, weights, rows, visible, active=active, **options)

    return function, (
        array(n, t, 64, 128),
        array(n, t, 64),
        BlockRows(
            array(n * rows // per, per, 128, dtype=dtype), array(n, rows // per, dtype=jnp.int32)
        ),
        array(n, t, dtype=jnp.int32),
        Active(array(n, dtype=jnp.int32), array(dtype=jnp.int32)),
    )


def pool(ratio, width, *, overlap):
    channels = 2 * width if overlap else width
    before = (array(ratio, width), array(ratio, width), array(dtype=jnp.bool_))
    cells = array(32, ratio, channels)
    return compression.pool_cells, (cells, cells, Earlier(*before) if overlap else None)


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
    "index scores, float32": pick(dtype=jnp.float32),
    "index scores, 1,048,576 tokens": pick(n=1, rows=262144),
    "index scores of a tile": pick(n=1, t=128),
    "cells with overlap": pool(4, 512, overlap=True),
    "cells of 128 tokens": pool(128, 512, overlap=False),
}


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
    assert memory.temp_size_in_bytes < max(pools, default=0) or "cells" in case or "tile" in case
