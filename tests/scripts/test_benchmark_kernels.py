"""The benchmark of single kernels: it measures, and what it calls an error is one."""

import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from commands import status
from places import REPOSITORY

sys.path.insert(0, str(REPOSITORY / "scripts"))

import benchmark
import kernel_checks
import kernel_inputs
from kernel_cases import build

CASES = (
    "attention/dense/4096/rows8",
    "attention/sparse/4096",
    "attention/window",
    "index_scores/4096",
    "moves/gather/4096",
    "moves/scatter/4096",
    "compression/overlap",
    "compression/plain",
    "packing/encode/fp8_rope16",
    "packing/decode/fp8_rope16",
)


def call(monkeypatch, *arguments):
    return status(benchmark.main, monkeypatch, "kernels", *arguments)


def test_each_operation_is_measured_and_right(monkeypatch, tmp_path, capsys):
    told = tmp_path / "told.json"
    options = ("--rounds", 1, "--calls", 1, "--json", told)
    assert call(monkeypatch, "--cases", *CASES, *options) == 0
    rows = json.loads(told.read_text())["cases"]
    assert [row["case"] for row in rows] == list(CASES)
    assert all(row["implementation"] == "reference" for row in rows)
    assert all(row["error"] < 5e-6 for row in rows)
    assert all(row["of_copy"] > 0 and row["bytes"] > 0 for row in rows)
    assert "kernels on cpu" in capsys.readouterr().out


@pytest.mark.parametrize("name", CASES)
def test_a_wrong_output_is_an_error(name):
    operation, case = name.partition("/")[0], build(name, "reference")
    arguments = kernel_inputs.concrete(case, operation, seed=0)
    right = jax.jit(case.function)(*arguments)
    assert kernel_checks.worst(operation, case, arguments, right) < 5e-6
    if operation == "index_scores":
        wrong = right.at[0, 0, -1].set(jnp.setdiff1d(jnp.arange(1024), right[0, 0])[0])
    elif right.dtype == jnp.float32:
        wrong = right * 1.001
    else:
        wrong = right.at[..., 0].set(right[..., 0] ^ 1)
    assert kernel_checks.worst(operation, case, arguments, wrong) > 1e-5


def test_the_same_rows_are_drawn_for_the_same_seed():
    case = build("attention/dense/4096/rows8", "reference")
    first, second = (kernel_inputs.concrete(case, "attention", seed=1)[0] for _ in range(2))
    other = kernel_inputs.concrete(case, "attention", seed=2)[0]
    np.testing.assert_array_equal(first["rows"].pool, second["rows"].pool)
    assert (np.asarray(first["rows"].pool) != np.asarray(other["rows"].pool)).any()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--rounds", 0), "--rounds and --calls must be at least 1"),
        (("--implementation", "tpu"), "'tpu' does not run on cpu: use reference"),
        (("--cases", "attention/dense/odd"), "'odd' is no size"),
        (("--cases", "nothing"), "no kernel case 'nothing'"),
    ],
)
def test_bad_input_is_one_line(monkeypatch, capsys, arguments, message):
    assert call(monkeypatch, *arguments) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert message in error
