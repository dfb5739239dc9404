"""Makes the dumps in this folder: needs libtpu.

    python tests/data/llo/record.py FOLDER

``stream`` copies blocks of rows from HBM in a loop of its own, with two buffers; ``work`` runs
along a grid whose first and last items do more. Copy ``*final_bundles.txt`` and the utilization.
"""

import os
import pathlib
import sys

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from places import REPOSITORY

sys.path.insert(0, str(REPOSITORY / "scripts"))

import aot_tpu

OPTIONS = pltpu.CompilerParams(disable_bounds_checks=True)


def stream(trips, x, out, buffers, arrived):
    def copy(i, slot):
        return pltpu.make_async_copy(x.at[i], buffers.at[slot], arrived.at[slot])

    copy(0, 0).start()
    out[...] = jnp.zeros_like(out)

    def body(i, _):
        slot = i & 1

        @pl.when(i + 1 < trips[0])
        def _():
            copy(i + 1, 1 - slot).start()

        copy(i, slot).wait()
        rows = buffers[slot]
        out[...] += jnp.dot(rows, rows.T, preferred_element_type=jnp.float32)
        return 0

    jax.lax.fori_loop(0, trips[0], body, 0)


def work(first, last, x, out, total):
    i = pl.program_id(0)

    @pl.when(first[i] == 1)
    def _():
        total[...] = jnp.zeros_like(total)

    total[...] += jnp.exp(x[0])

    @pl.when(last[i] == 1)
    def _():
        out[0] = total[...] / (1 + jnp.abs(total[...]))


def call_stream(trips, x):
    return pl.pallas_call(
        stream,
        out_shape=jax.ShapeDtypeStruct((16, 16), jnp.float32),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(1,),
            in_specs=[pl.BlockSpec(memory_space=pl.ANY)],
            out_specs=pl.BlockSpec((16, 16), lambda i, trips: (0, 0)),
            scratch_shapes=[
                pltpu.VMEM((2, 16, 512), jnp.bfloat16),
                pltpu.SemaphoreType.DMA((2,)),
            ],
        ),
        name="stream",
        compiler_params=OPTIONS,
    )(trips, x)


def call_work(first, last, x):
    return pl.pallas_call(
        work,
        out_shape=jax.ShapeDtypeStruct((4, 16, 128), jnp.float32),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(100,),
            in_specs=[pl.BlockSpec((1, 16, 128), lambda i, first, last: (i, 0, 0))],
            out_specs=pl.BlockSpec((1, 16, 128), lambda i, first, last: (first[i], 0, 0)),
            scratch_shapes=[pltpu.VMEM((16, 128), jnp.float32)],
        ),
        name="work",
        compiler_params=OPTIONS,
    )(first, last, x)


def main() -> None:
    for target in ("v6e:2x2", "tpu7x:2x2x1"):
        here = jax.sharding.SingleDeviceSharding(aot_tpu.devices(target)[0])

        def array(*shape, dtype=jnp.int32, here=here):
            return jax.ShapeDtypeStruct(shape, dtype, sharding=here)

        # Inputs of few MB would be put into VMEM as a whole.
        for call, arguments in (
            (call_stream, (array(1), array(20000, 16, 512, dtype=jnp.bfloat16))),
            (call_work, (array(100), array(100), array(20000, 16, 128, dtype=jnp.float32))),
        ):
            jax.jit(call).trace(*arguments).lower(lowering_platforms=("tpu",)).compile()


if __name__ == "__main__":
    if "LIBTPU_INIT_ARGS" not in os.environ:
        folder = pathlib.Path(sys.argv[1]).absolute()
        folder.mkdir(parents=True)
        tests = str(REPOSITORY / "tests")
        variables = os.environ | aot_tpu.environment(folder) | {"PYTHONPATH": tests}
        os.execve(sys.executable, [sys.executable, __file__, str(folder)], variables)
    main()
