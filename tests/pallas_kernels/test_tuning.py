"""Tuning tables: what is read from them, what is refused, and that they change no bit."""

import dataclasses
import importlib
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gpu_cases import active, batched

from pallas_kernels.attention import gpu as attention
from pallas_kernels.attention import tpu as tpu_attention
from pallas_kernels.attention import tpu_gather, tpu_plan
from pallas_kernels.blocks import BlockRows
from pallas_kernels.index_scores import gpu as index_scores
from pallas_kernels.index_scores import tpu as tpu_index_scores
from pallas_kernels.interpreting import checked, interpreted
from pallas_kernels.moves import gpu as moves
from pallas_kernels.packing import gpu as packing
from pallas_kernels.packing.layout import RowLayout
from pallas_kernels.tuning import table
from pallas_kernels.tuning.table import Entry, Table, trying, tuned

QUICK = {"xla_backend_optimization_level": 0}
TUNED = {
    "attention/gpu": attention.Tuning(),
    "index_scores/gpu": index_scores.Tuning(),
    "moves/gpu": moves.Tuning(),
    "packing/encode/gpu": packing.Tuning(),
    "packing/decode/gpu": packing.Tuning(),
    "attention/tpu": tpu_plan.Staging(),
    "attention/gather/tpu": tpu_gather.Staging(),
    "index_scores/tpu": tpu_index_scores.Staging(),
}
OTHER = {
    "attention/gpu": {"warps": 4, "stages": 2},
    "index_scores/gpu": {"rows": 16, "warps": 8, "stages": 1},
    "moves/gpu": {"part_bytes": 100, "warps": 1},
    "packing/encode/gpu": {"rows": 5, "warps": 1},
    "packing/decode/gpu": {"rows": 64, "warps": 8},
    "attention/tpu": {"buffers": 2},
    "attention/gather/tpu": {"picks": 32},
    "index_scores/tpu": {"depth": 2},
}
"""Beside the defaults."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Values:
    warps: int = 4
    rows: int = 16


def use(monkeypatch, *entries):
    here = Table(device="cpu", source="made up", entries=entries)
    monkeypatch.setattr(table, "table_of", {"cpu": here}.get)


def traced_for(kind):
    sharding = jax.sharding
    platform, cores = ("tpu", 1) if kind.startswith("TPU") else ("gpu", None)
    device = sharding.AbstractDevice(device_kind=kind, num_cores=cores, platform=platform)
    return sharding.use_abstract_mesh(sharding.AbstractMesh((), (), abstract_device=device))


def test_a_device_without_a_table_has_the_defaults():
    assert table.table_of("no such device") is None
    assert tuned("operation", Values(), format="bfloat16") == Values()


def test_the_entry_with_the_longest_key_that_holds_is_taken(monkeypatch):
    use(
        monkeypatch,
        Entry(operation="a", values={"warps": 1}),
        Entry(operation="a", key={"format": "mxfp4", "width": 8}, values={"warps": 3, "rows": 2}),
        Entry(operation="a", key={"format": "mxfp4"}, values={"warps": 2}),
        Entry(operation="b", key={"format": "mxfp4"}, values={"warps": 5}),
    )
    assert tuned("a", Values(), format="float32", width=8) == Values(warps=1)
    assert tuned("a", Values(), format="mxfp4", width=16) == Values(warps=2)
    assert tuned("a", Values(), format="mxfp4", width=8) == Values(warps=3, rows=2)
    assert tuned("b", Values(), format="float32") == Values()


def test_what_is_tried_goes_before_the_table(monkeypatch):
    use(monkeypatch, Entry(operation="a", values={"warps": 1}))
    with trying("a", rows=3), trying("b", rows=4):
        assert tuned("a", Values()) == Values(rows=3)
    assert tuned("a", Values()) == Values(warps=1)


def test_the_table_is_that_of_the_device_that_is_traced_for(monkeypatch):
    asked = []
    monkeypatch.setattr(table, "table_of", asked.append)
    tuned("a", Values())
    with traced_for("NVIDIA B200"):
        tuned("a", Values())
    assert asked == ["cpu", "NVIDIA B200"]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"key_block": 64}, "a is not tuned by 'key_block': rows, warps"),
        ({"warps": 0}, "warps is 0, which is no positive integer"),
        ({"warps": "many"}, "warps is 'many'"),
    ],
)
def test_a_value_that_the_kernel_has_not_is_refused(monkeypatch, values, message):
    use(monkeypatch, Entry(operation="a", values=values))
    with pytest.raises(ValueError, match=message):
        tuned("a", Values())


@pytest.mark.parametrize("text", ["", "{}", '{"device": "x", "source": "y", "entries": [3]}', "[]"])
def test_a_file_that_is_no_table_is_told(tmp_path, text):
    file = tmp_path / "table.json"
    file.write_text(text)
    with pytest.raises(ValueError, match="is no tuning table"):
        table.read(file)


def test_a_table_is_written_as_it_is_read(tmp_path):
    made = Table(
        device="a", source="b", entries=(Entry(operation="c", key={"width": 1}, values={"d": 2}),)
    )
    table.write(made, tmp_path / "made.json")
    assert table.read(tmp_path / "made.json") == made


SHIPPED = sorted(table.FOLDER.glob("*.json"))


@pytest.mark.parametrize("file", SHIPPED, ids=lambda x: x.stem)
def test_shipped_tables_hold_what_kernels_have_and_say_where_it_is_from(file):
    found = table.read(file)
    assert table.file_of(found.device) == file
    # Nothing has run on an accelerator yet.
    assert json.loads(file.read_text())["source"].startswith("static: ")
    for entry in found.entries:
        table.replaced(entry.operation, TUNED[entry.operation], entry.values)


def test_a_table_for_each_device_that_kernels_are_compiled_for():
    gpus = {"nvidia_h100_80gb_hbm3", "nvidia_b200"}
    tpus = {"tpu_v5_lite", "tpu_v5", "tpu_v6_lite", "tpu7x"}
    assert gpus | tpus <= {file.stem for file in SHIPPED}


def test_what_a_tpu_kernel_cannot_be_staged_with_is_refused():
    for buffers in (1, 3):
        with pytest.raises(ValueError, match="another power of two"):
            table.replaced("attention/tpu", tpu_plan.Staging(), {"buffers": buffers})
    with pytest.raises(ValueError, match="a depth of 1"):
        table.replaced("index_scores/tpu", tpu_index_scores.Staging(), {"depth": 1})


def rows_of(rng, count, width):
    return rng.normal(size=(count, width)).astype(np.float32)


def call_attention(rng):
    rows = batched([rows_of(rng, 70, 16), rows_of(rng, 3, 16)])
    arrays = [rng.normal(size=shape) for shape in ((2, 1, 3, 16), (2, 5, 16), (3,))]
    q, local, sink = (jnp.asarray(x, jnp.float32) for x in arrays)
    visible = jnp.asarray([[70], [3]], jnp.int32)
    first = jnp.asarray([280, 12], jnp.int32)
    options = {"active": active(2), "window": 5, "scale": 0.25}
    return attention.attend(q, local, first, sink, rows=rows, visible=visible, **options)


def call_index_scores(rng):
    rows = batched([rows_of(rng, 90, 16), rows_of(rng, 9, 16)])
    queries = jnp.asarray(rng.normal(size=(2, 1, 3, 16)), jnp.float32)
    weights = jnp.asarray(rng.normal(size=(2, 1, 3)), jnp.float32)
    visible = jnp.asarray([[90], [9]], jnp.int32)
    return index_scores.pick_rows(queries, weights, rows, visible, active=active(2), topk=7)


def call_moves(rng):
    pool = jnp.asarray(rng.integers(0, 255, (9, 3, 72)), jnp.uint8)
    return moves.gather_blocks(pool, jnp.asarray([3, 1, 8], jnp.int32))


LAYOUT = RowLayout("fp8_rope16", 72, 8)


def call_encode(rng):
    return packing.encode(jnp.asarray(rows_of(rng, 70, 72)), LAYOUT)


def call_decode(rng):
    return packing.decode(
        jnp.asarray(rng.integers(0, 255, (70, LAYOUT.row_bytes)), jnp.uint8), LAYOUT
    )


def tabled(rng, blocks, per, width):
    """A pool whose blocks are all of one sequence, in some order."""
    pool = rng.normal(size=(blocks, per, width))
    return pool, jnp.asarray(rng.permutation(blocks)[None], jnp.int32)


def call_tpu_attention(rng):
    """Eight key blocks of eight rows, two an item: more items than buffers."""
    pool, blocks = tabled(rng, 8, 8, 128)
    arrays = [rng.normal(size=shape) for shape in ((1, 1, 8, 128), (1, 4, 128), (8,))]
    q, local, sink = (jnp.asarray(x, jnp.float32) for x in arrays)
    return tpu_attention.attend(
        q,
        local,
        jnp.full((1,), 90, jnp.int32),
        sink,
        active=active(1),
        window=4,
        scale=0.3,
        rows=BlockRows(jnp.asarray(pool, jnp.float32), blocks),
        visible=jnp.full((1, 1), 61, jnp.int32),
        key_block=1,
        tuning=tpu_attention.Tuning(keys=8),
    )


def call_tpu_gather(rng):
    """Two rounds of 64 picks, or four of 32."""
    pool, blocks = tabled(rng, 20, 8, 128)
    picks = np.sort(rng.choice(160, 128, replace=False))
    rows = BlockRows(jnp.asarray(pool, jnp.float32), blocks)
    return tpu_gather.gather(rows, jnp.asarray(picks[None, None], jnp.int32), per_block=32)


def call_tpu_index_scores(rng):
    """Three chunks of 1,024 rows."""
    pool, blocks = tabled(rng, 24, 128, 128)
    queries = jnp.asarray(rng.normal(size=(1, 1, 4, 128)), jnp.float32)
    return tpu_index_scores.pick_rows(
        queries,
        jnp.asarray(rng.normal(size=(1, 1, 4)), jnp.float32),
        BlockRows(jnp.asarray(pool, jnp.float32), blocks),
        jnp.full((1, 1), 3000, jnp.int32),
        active=active(1),
        topk=7,
        key_block=128,
    )


CALLS = {
    "attention/tpu": call_tpu_attention,
    "attention/gather/tpu": call_tpu_gather,
    "index_scores/tpu": call_tpu_index_scores,
    "attention/gpu": call_attention,
    "index_scores/gpu": call_index_scores,
    "moves/gpu": call_moves,
    "packing/encode/gpu": call_encode,
    "packing/decode/gpu": call_decode,
}


@pytest.mark.parametrize("operation", CALLS)
def test_another_choice_changes_no_bit(operation):
    """Nor do copies race under the other one, where the interpreter can tell."""
    interpreting = checked if operation.endswith("/tpu") else lambda: interpreted(True)

    def result():
        run = jax.jit(lambda: CALLS[operation](np.random.default_rng(0)), compiler_options=QUICK)
        with interpreting():
            return [np.asarray(x) for x in jax.tree.leaves(run())]

    launched = []

    def lowered():
        text = jax.make_jaxpr(lambda: CALLS[operation](np.random.default_rng(0)))()
        launched.append(str(text))

    first = result()
    with interpreted(True):
        lowered()
    with trying(operation, **OTHER[operation]):
        second = result()
        with interpreted(True):
            lowered()
    assert launched[0] != launched[1], "the choice is not used"
    for one, other in zip(first, second, strict=True):
        np.testing.assert_array_equal(one.view(np.uint8), other.view(np.uint8))


@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated")
def test_another_launch_is_another_text_and_so_another_numerics_id():
    pool = jax.ShapeDtypeStruct((9, 3, 72), jnp.uint8)
    places = jax.ShapeDtypeStruct((2,), jnp.int32)

    def text(warps):
        with trying("moves/gpu", warps=warps), traced_for("NVIDIA B200"):
            traced = jax.jit(lambda *x: moves.gather_blocks(*x)).trace(pool, places)
            return traced.lower(lowering_platforms=("cuda",)).as_text()

    assert text(4) == text(4)
    assert text(4) != text(8)


def test_another_staging_is_another_text_and_so_another_numerics_id():
    def text(buffers):
        with trying("attention/tpu", buffers=buffers), traced_for("TPU v6 lite"):
            call = jax.jit(lambda: call_tpu_attention(np.random.default_rng(0)))
            return call.trace().lower(lowering_platforms=("tpu",)).as_text()

    assert text(4) == text(4)
    assert text(4) != text(2)


def test_every_operation_that_is_tuned_is_compared_here():
    for name in ("attention", "index_scores", "moves", "packing"):
        assert hasattr(importlib.import_module(f"pallas_kernels.{name}.gpu"), "Tuning")
        assert any(operation.startswith(name) for operation in CALLS)
    assert TUNED.keys() == OTHER.keys() == CALLS.keys()
