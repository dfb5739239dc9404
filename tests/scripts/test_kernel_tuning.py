"""Filling tuning tables: by the compiler's counts and by the clock, and who refuses."""

import argparse
import sys

import jax
import jax.numpy as jnp
import pytest
from commands import status
from places import REPOSITORY

sys.path.insert(0, str(REPOSITORY / "scripts"))

import aot_process
import benchmark
import benchmark_kernels
import compile_for
import kernel_tuning

from pallas_kernels.interpreting import interpreted
from pallas_kernels.packing import gpu as packing
from pallas_kernels.tuning import table

CASE = "packing/encode/fp8_rope16"


def test_there_is_nothing_to_tune_on_a_cpu(monkeypatch, capsys, tmp_path):
    file = tmp_path / "table.json"
    options = ("kernels", "--tune", "--table", file)
    assert status(benchmark.main, monkeypatch, *options) == 2
    error = capsys.readouterr().err
    assert error == "error: --tune: there is nothing to tune on cpu, only on a GPU or a TPU\n"
    assert not file.exists()


def test_an_unknown_target_is_not_tuned(monkeypatch, capsys):
    assert status(compile_for.main, monkeypatch, "tune", "--target", "h200") == 2
    assert capsys.readouterr().err.count("\n") == 1


KINDS = {"gpu": None, "tpu": "TPU v6 lite"}


@pytest.mark.parametrize(
    ("name", "backend"),
    [(x, backend) for backend, each in kernel_tuning.CASES.items() for x in each],
)
def test_all_that_is_tuned_has_candidates_that_its_kernel_takes(name, backend):
    question = kernel_tuning.asked(name, backend, KINDS[backend])
    assert question.key
    choices = kernel_tuning.candidates(question.operation)
    assert len(choices) > 1
    for choice in choices:
        table.replaced(question.operation, question.default, choice)


@pytest.mark.parametrize(("least", "values"), [(8, {"rows": 8}), (0, {})])
def test_the_compiler_chooses_what_spills_least_or_else_the_default(monkeypatch, least, values):
    """Eight rows spill nothing, the others ``least``; two warps twice what four do."""

    def programs(tried):
        spills = (0 if tried["rows"] == 8 else least) + (40 if tried["warps"] == 2 else 0)
        return [{"name": "encode_rows", "registers": 32, "spill_bytes": spills}]

    def compiled(target, requests, **_):
        return [{**x, "ok": True, "programs": programs(x["tried"])} for x in requests]

    monkeypatch.setattr(aot_process, "compile_cases", compiled)
    monkeypatch.setattr(kernel_tuning, "GPU_CASES", {CASE: "encode_rows"})
    made = kernel_tuning.by_compiler("b200", None)
    assert made.device == "NVIDIA B200"
    assert made.source.startswith("static: ")
    assert [x.values for x in made.entries] == ([values] if values else [])
    for entry in made.entries:
        assert (entry.operation, entry.key) == ("packing/encode/gpu", {"format": "fp8_rope16"})


@pytest.mark.parametrize(("target", "gathers"), [("v6e", True), ("v5e", False)])
def test_a_tpus_compiler_chooses_what_takes_clearly_fewer_bundles(monkeypatch, target, gathers):
    """Three chunks take a tenth less than six; two buffers as good as nothing less than four."""
    bundles = {3: 900, 6: 1000, 9: 1000, 2: 990, 4: 1000}

    def compiled(target, requests, **_):
        found = []
        for request in requests:
            (value,) = request["tried"].values()
            if value == 8:  # too much memory
                found.append({**request, "ok": False})
                continue
            loop = {"steady": bundles[value]}
            names = {"attention": "attend.1", "index_scores": "pick_rows.1"}
            name = names[request["name"].partition("/")[0]]
            kernels = [{"name": name, "streaming": None, "longest": loop}]
            found.append({**request, "ok": True, "kernels": kernels})
        return found

    monkeypatch.setattr(aot_process, "compile_cases", compiled)
    made = kernel_tuning.by_compiler(target, None)
    assert table.file_of(made.device).stem == {"v6e": "tpu_v6_lite", "v5e": "tpu_v5_lite"}[target]
    chosen = {x.operation: x.values for x in made.entries}
    expected = {"attention/tpu": {"buffers": 4}, "index_scores/tpu": {"depth": 3}}
    if gathers:
        expected["attention/gather/tpu"] = {"picks": 128}
    assert chosen == expected
    assert made.source.startswith("static: ")
    assert ("no schedule is printed" in made.source) == gathers


def test_the_clock_chooses_the_fastest_that_keeps_every_bit(monkeypatch, tmp_path):
    """Of the rows of a program, 2 is refused, 4 gives another byte, and 8 is the fastest."""
    choices = {"rows": (2, 4, 8), "warps": (4,)}
    monkeypatch.setattr(kernel_tuning, "CANDIDATES", {"packing/encode/gpu": choices})
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    real = packing.encode_program

    def spoiled(rows, out, *, layout, tile):
        if tile == 2:
            raise NotImplementedError("too small")
        real(rows, out, layout=layout, tile=tile)
        if tile == 4:
            out[0, layout.row_bytes - 1] = jnp.uint8(1)  # zero otherwise

    monkeypatch.setattr(packing, "encode_program", spoiled)

    def timed(sides, rounds, calls):
        assert (rounds, calls) == (3, 2)
        return {name: [1.0 if "'rows': 8" in name else 2.0] for name in sides}

    file = tmp_path / "table.json"
    given = {"cases": [CASE], "rounds": 3, "calls": 2, "seed": 0, "table": file}
    with interpreted(True):
        result = kernel_tuning.by_clock(argparse.Namespace(**given), timed)
    (row,) = result["tuned"]
    assert (row["refused"], row["other_bits"], row["gain"]) == (1, 1, 2.0)
    made = table.read(file)
    assert made.source.startswith("measured: ")
    assert [(x.key, x.values) for x in made.entries] == [({"format": "fp8_rope16"}, {"rows": 8})]
    kernel_tuning.report({**result, "device": "gpu"})


def test_tuning_and_comparing_are_two_things(monkeypatch, capsys):
    options = ("kernels", "--tune", "--peer", "tokamax")
    assert status(benchmark.main, monkeypatch, *options) == 2
    assert "give one" in capsys.readouterr().err
    assert benchmark_kernels.kernel_tuning is kernel_tuning
