"""The tool that compiles for absent accelerators; those marked ``plugin`` need libtpu."""

import dataclasses
import functools
import importlib.util
import json
import subprocess
import sys

import commands
import jax
import pytest
from places import REPOSITORY

sys.path.insert(0, str(REPOSITORY / "scripts"))

import aot_gpu
import aot_models
import aot_process
import aot_report
import aot_steps
import aot_tables
import aot_tpu
import aot_worker
import compile_for
import kernel_cases
from targets import TARGETS, target_of

from hybridkv.errors import UserError

plugin = pytest.mark.plugin
needs_libtpu = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="no libtpu here: make .venv-tpu/.aot"
)


call = functools.partial(commands.call, compile_for.main)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("kernel", "packing/encode", "--target", "v9"), "unknown target 'v9'"),
        (("step", "decode", "--target", "v6e:4x4x4"), "'4x4x4' is no slice of v6e: it has 4x4"),
        (("step", "decode", "--target", "h100:2x2"), "is no slice of h100: it has no slices"),
        (("kernel", "x", "--python", "/nowhere/python"), "there is no such file"),
        (("table", "/nowhere.json"), "cannot read /nowhere.json"),
    ],
)
def test_bad_input_is_one_line_and_status_2(arguments, message, monkeypatch, capsys):
    code, out, err = call(monkeypatch, capsys, *arguments)
    assert (code, out) == (2, "")
    assert message in err
    assert err.count("\n") == 1


def test_without_a_compiler_the_error_says_how_to_get_one(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(aot_process, "ROOT", tmp_path)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    code, _, err = call(monkeypatch, capsys, "kernel", "packing/encode", "--target", "v6e")
    assert code == 2
    assert "make .venv-tpu/.aot" in err


def test_targets_are_named_with_and_without_a_slice():
    assert target_of("v6e") == (TARGETS["v6e"], "v6e:2x2")
    assert target_of("tpu7x:4x4x4") == (TARGETS["tpu7x"], "tpu7x:4x4x4")
    with pytest.raises(UserError, match="no slice"):
        target_of("v6e:0x4")


@pytest.mark.parametrize("name", ["v5e", "v5p", "v6e", "tpu7x"])
def test_clock_and_matrix_units_give_the_published_rate(name):
    published = {"v5e": 197e12, "v5p": 459e12, "v6e": 918e12, "tpu7x": 2307e12 / 2}[name]
    target = TARGETS[name]
    rate = target.clock * target.core_flops * target.cores
    assert rate == pytest.approx(published, rel=5e-3)


def test_the_compilers_environment_is_the_childs_alone(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", "/bin")
    assert "LIBTPU_INIT_ARGS" not in aot_tpu.environment(None)
    assert str(tmp_path) in aot_tpu.environment(tmp_path)["LIBTPU_INIT_ARGS"]
    with pytest.raises(UserError, match="no ptxas"):
        aot_gpu.environment(tmp_path)
    tool = tmp_path / "nvidia" / "cuda_nvcc" / "bin" / "ptxas"
    tool.parent.mkdir(parents=True)
    tool.touch()
    assert aot_gpu.environment(tmp_path)["PATH"] == f"{tool.parent}:/bin"


@pytest.mark.parametrize("name", kernel_cases.names())
def test_every_kernel_case_traces_by_the_reference(name):
    if name.startswith("moves/"):
        pytest.importorskip("pallas_kernels.moves.api")
    case = kernel_cases.build(name, "reference")
    assert jax.tree.leaves(jax.eval_shape(case.function, *case.arguments))
    assert case.traffic.read_bytes >= case.traffic.row_bytes


def test_traffic_is_what_the_sequences_have():
    dense = kernel_cases.build("attention/dense/65536", "reference").traffic
    assert dense.row_bytes == 8 * 512 * 1024
    sparse = kernel_cases.build("attention/sparse/1048576", "reference").traffic
    assert sparse.row_bytes == 8 * 512 * 1024  # picks, whatever the context
    scores = kernel_cases.build("index_scores/1048576", "reference").traffic
    assert scores.row_bytes == 8 * 262144 * 256


@pytest.mark.parametrize("name", ["foo", "attention/dense/65536/wide", "attentions"])
def test_unknown_kernel_cases_are_refused(name):
    with pytest.raises(UserError):
        kernel_cases.build(name, "reference")


def test_published_models_have_their_published_sizes():
    flash, pro = aot_models.model_config("v4-flash"), aot_models.model_config("v4-pro")
    assert (flash.layers, pro.layers) == (43, 61)
    assert [flash.layer_ratios.count(ratio) for ratio in (0, 4, 128)] == [2, 21, 20]
    assert [pro.layer_ratios.count(ratio) for ratio in (0, 4, 128)] == [0, 30, 31]
    cut = aot_models.model_config("v4-flash", layers=4, dtype="float32")
    assert (cut.layer_ratios, cut.dtype) == ((0, 0, 4, 128), "float32")
    for wrong in ({"name": "v5"}, {"name": "v4-flash", "layers": 44}):
        with pytest.raises(UserError):
            aot_models.model_config(**wrong)


def toy_case(**changes: object) -> aot_steps.StepCase:
    case = aot_steps.StepCase(step="decode", model="toy", slots=2, context=64, tile=32)
    return dataclasses.replace(case, **changes)


@pytest.mark.parametrize("step", ["decode", "tile"])
def test_a_step_is_abstract_sharded_and_of_the_size_that_is_asked_for(step):
    case = toy_case(step=step, kernels="reference")
    made = aot_steps.abstract_step(case, jax.devices()[:2])
    assert made.tokens == 128
    leaves = jax.tree.leaves(made.arguments)
    assert all(isinstance(x, jax.ShapeDtypeStruct) for x in leaves)
    assert any("model" in x.sharding.spec for x in leaves)
    logits, cache = jax.eval_shape(made.function, *made.arguments)
    assert logits.shape == (2 if step == "decode" else 1, 64)
    assert cache.block_table.shape == (2, 4)
    small = aot_steps.abstract_step(case, jax.devices()[:1], blocks=1)
    assert small.tokens == 16


@pytest.mark.parametrize(
    "changes", [{"tile": 24}, {"cache_format": "int3"}, {"data": 3}, {"model": "none"}]
)
def test_steps_that_do_not_fit_the_model_are_refused(changes):
    with pytest.raises(UserError):
        aot_steps.abstract_step(toy_case(**changes), jax.devices()[:2])


def test_the_compilers_refusals_say_what_is_needed():
    temporaries = (
        "total memory required for HLO temporaries (36.50G) exceeds available HBM (31.25G)"
    )
    texts = {
        temporaries: int(36.5 * 2**30),
        "Used 40.00G of 31.25G hbm. Exceeded hbm capacity by 8.75G.": 40 * 2**30,
        "something else": None,
    }
    for text, needed in texts.items():
        assert aot_worker._needs(text) == needed


def kernel_result(**changes: object) -> dict[str, object]:
    loop = {"steady": 100, "most": 120, "read_bytes": 2048, "bound": "MXU", "fraction": 0.75}
    kernel = {"name": "k", "streaming": loop, "longest": loop}
    result = {"kind": "kernel", "name": "case", "target": "v6e", "implementation": "tpu"}
    return result | {"ok": True, "compile_seconds": 1.0, "kernels": [kernel]} | changes


def test_reports_say_what_compiles_and_what_does_not():
    assert aot_report.kernel_rows(kernel_result()) == [
        ["case (tpu)", "v6e", "yes, 1.0 s", "100 (120)", "2", "MXU", "0.75"]
    ]
    (bad,) = aot_report.kernel_rows(kernel_result(ok=False, error="a | b"))
    assert bad[2] == "no: a | b"


def test_the_table_is_made_from_the_results(tmp_path, monkeypatch, capsys):
    file = tmp_path / "aot.json"
    refused = kernel_result(ok=False, error="blocks of 1 row", target="tpu7x")
    program = {"name": "k", "registers": 214, "spill_bytes": 16}
    gpu = kernel_result(target="h100", implementation="gpu", programs=[program])
    file.write_text(json.dumps({"results": [kernel_result(), refused, gpu]}))
    code, out, _ = call(monkeypatch, capsys, "table", file)
    assert code == 0
    assert "| case | 100, 2, MXU, 0.75 | refused |" in out
    assert "| case | 214, 16 |" in out


def test_the_documents_tables_are_those_of_the_results():
    results = json.loads((REPOSITORY / "docs/benchmarks/aot.json").read_text())["results"]
    text = (REPOSITORY / "docs/benchmarks.md").read_text()
    for table in aot_tables.markdown(results).split("\n\n"):
        assert table in text


@pytest.mark.parametrize("signal", [True, False])
def test_a_compiler_that_dies_is_a_result_and_an_error_of_its_own_is_an_error(signal):
    cases = [{"kind": "kernel", "name": name, "implementation": "tpu"} for name in "ab"]
    done = subprocess.CompletedProcess([], -11 if signal else 1, stderr="Traceback\nOops: x\n")
    results = [kernel_result()]
    if signal:
        last = aot_process._checked(results, cases, done, "v6e")[-1]
        assert (last["name"], last["ok"]) == ("b", False)
        assert "signal 11" in last["error"]
    else:
        with pytest.raises(UserError, match="Oops: x"):
            aot_process._checked(results, cases, done, "v6e")


@plugin
@needs_libtpu
def test_a_kernel_compiles_and_its_schedule_is_read():
    case = {"kind": "kernel", "name": "index_scores/8192", "implementation": "tpu"}
    (result,) = aot_process.compile_cases("v6e", [case], schedule=True, python=sys.executable)
    assert result["ok"], result["error"]
    (kernel,) = result["kernels"]
    assert kernel["bundles"] > 100
    assert kernel["streaming"]["read_bytes"] > 0


@plugin
@needs_libtpu
def test_a_step_that_is_too_large_is_refused_and_says_how_many_tokens_fit():
    case = {"kind": "step", "sharded": False, **dataclasses.asdict(toy_case(context=64))}
    huge = case | {"context": 1 << 32}
    fits, refused = aot_process.compile_cases(
        "v5e", [case, huge], schedule=False, python=sys.executable
    )
    assert fits["ok"]
    assert fits["memory"]["fits"]
    assert not refused["ok"]
    assert refused["needs"] > TARGETS["v5e"].hbm_bytes
    assert 0 < refused["tokens_that_fit"] < refused["tokens"]


@plugin
@needs_libtpu
def test_a_step_compiles_for_a_slice():
    case = {"kind": "step", "sharded": True, **dataclasses.asdict(toy_case())}
    (result,) = aot_process.compile_cases("v6e:2x2", [case], schedule=False, python=sys.executable)
    assert result["ok"], result.get("error")
    assert result["devices"] == 4
    assert result["kernels"] == "reference"


@plugin
@needs_libtpu
def test_kernels_are_split_over_a_slice():
    case = {
        "step": "decode",
        "model": "v4-flash-thin",
        "layers": 4,
        "slots": 4,
        "context": 4096,
        "cache_format": "bfloat16_words",
        "data": 2,
        "spread_weights": True,
    }
    (result,) = aot_process.compile_cases(
        "v6e:2x2",
        [{"kind": "step", "sharded": True, **case}],
        schedule=False,
        python=sys.executable,
    )
    assert result["ok"], result
    assert result["kernels"] == "tpu"
    assert result["devices"] == 4
    # About one exchange a product, 203 in all; halves and rotations need none.
    assert sum(result["collectives"].values()) < 260
