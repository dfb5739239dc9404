"""What a compiled step does with whole pools; those marked ``plugin`` need libtpu."""

import dataclasses
import importlib.util
import sys

import jax
import jax.numpy as jnp
import pytest
from places import REPOSITORY

sys.path.insert(0, str(REPOSITORY / "scripts"))

import aot_hlo
import aot_process
import aot_steps

POOL = jax.ShapeDtypeStruct((1031, 128, 640), jnp.uint8)
RELAID = """
HloModule jit_step

%fused_computation.4 (param_0: u8[1031,128,640], param_1: s32[8,2]) -> u8[1031,128,640] {
  %param_0 = u8[1031,128,640]{2,1,0:T(8,128)(4,1)} parameter(0)
  %transpose.1 = u8[1031,128,640]{2,1,0:T(8,128)(4,1)} transpose(%param_0), dimensions={0,1,2}
  ROOT %scatter.15 = u8[1031,128,640]{2,1,0:T(8,128)(4,1)} scatter(%transpose.1, %param_1)
}

ENTRY %main.250 (pool: u8[1031,128,640], at: s32[8,2]) -> (f32[8,4]{1,0}, u8[1031,128,640]) {
  %pool = u8[1031,128,640]{2,1,0:T(32,128)(4,1)} parameter(0), sharding={replicated}
  %at = s32[8,2]{1,0:T(8,128)} parameter(1)
  %copy.1 = u8[1031,128,640]{2,1,0:T(8,128)(4,1)} copy(%pool), metadata={op_name="write"}
  %scatter_fusion = u8[1031,128,640]{2,1,0:T(8,128)(4,1)} fusion(%copy.1, %at), kind=kCustom, \
calls=%fused_computation.4
  %copy.2 = u8[8,640]{1,0} copy(%rows)
  ROOT %tuple = (f32[8,4]{1,0}, u8[1031,128,640]{2,1,0:T(8,128)(4,1)}) tuple(%x, %scatter_fusion)
}
""".replace("\\\n", "")
IN_PLACE = """
ENTRY %main.250 (pool: u8[1031,128,640]) -> u8[1031,128,640] {
  %pool = u8[1031,128,640]{2,1,0:T(32,128)(4,1)} parameter(0), sharding={replicated}
  %bitcast.1 = u8[4124,1,32,640]{3,2,1,0:T(32,128)(4,1)} bitcast(%pool)
  %write_rows.7 = u8[4124,1,32,640]{3,2,1,0} custom-call(%x, %bitcast.1), \
custom_call_target="tpu_custom_call", output_to_operand_aliasing={{}: (1, {})}
  %gather.1 = ((u8[1031,128,640]{2,1,0}, s32[8]{0}), u8[8,640]{1,0}) call-start(%bitcast.1, %at)
  %queries.1 = u8[1,1031,128,640]{3,2,1,0} fusion(%q), kind=kLoop, calls=%f.1
  %queries.2 = u8[1,1031,128,640]{3,2,1,0} copy(%queries.1)
  %attend.3 = f32[8,1,64,512]{3,2,1,0} custom-call(%q), custom_call_target="tpu_custom_call"
  %attend.4 = f32[8,1,64,512]{3,2,1,0} custom-call(%q), custom_call_target="tpu_custom_call"
  ROOT %bitcast.2 = u8[1031,128,640]{2,1,0:T(32,128)(4,1)} bitcast(%write_rows.7)
}
""".replace("\\\n", "")


def test_a_pool_that_is_laid_out_anew_is_told():
    """Not what is inside a fusion, nor arrays of other sizes."""
    assert aot_hlo.pool_copies(RELAID, [POOL]) == ["copy u8[1031,128,640]"]
    to_memory = "(u8[1031,128,640]{2,1,0}, u8[1031,128,640]{2,1,0:S(1)}, u32[]) copy-start(%pool)"
    for line in (
        to_memory,
        "u8[4124,32,640]{2,1,0} fusion(%pool), kind=kLoop, calls=%f.1",
        "s8[84459520]{0} bitcast(%pool)\n  %more.2 = s8[4194304]{0} slice-start(%more.1)"
        "\n  %more.3 = u8[1031,128,640]{2,1,0:S(1)} custom-call(%more.2)",
    ):
        text = IN_PLACE.replace("  ROOT", f"  %more.1 = {line}\n  ROOT")
        assert len(aot_hlo.pool_copies(text, [POOL])) == 1, line


def test_a_pool_that_is_written_in_place_or_handed_to_a_sparse_core_is_not():
    assert aot_hlo.pool_copies(IN_PLACE, [POOL]) == []
    assert aot_hlo.kernel_calls(IN_PLACE) == {"attend": 2, "write_rows": 1}


@pytest.mark.plugin
@pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="no libtpu here: make .venv-tpu/.aot"
)
@pytest.mark.parametrize("target", ["v6e", "tpu7x"])
@pytest.mark.parametrize(
    ("rows", "step", "blocks"),
    [
        ("bfloat16_words", "decode", 4097),
        ("bfloat16_words", "decode", 64),
        ("release_lanes", "decode", 2049),
        ("release_lanes", "decode", 16),
        ("release_lanes", "tile", 2049),
    ],
)
def test_no_instruction_of_a_step_copies_a_pool(target, rows, step, blocks):
    """With few blocks pools fit into vector memory, where XLA would bring them as a whole."""
    words = rows == "bfloat16_words"
    case = aot_steps.StepCase(
        step=step,
        model="small",
        layers=3,
        cache_format=rows,
        cells_per_block=1 if words else 4,
        context=blocks * (128 if words else 512),
        tile=512,
    )
    request = {"kind": "step", "sharded": False, **dataclasses.asdict(case)}
    (result,) = aot_process.compile_cases(target, [request], schedule=False, python=sys.executable)
    assert result["ok"], result.get("error")
    assert result["kernels"] == "tpu"
    assert result["pool_copies"] == []
    assert {"attend", "pick_rows", "write_rows"} <= set(result["kernel_calls"])
