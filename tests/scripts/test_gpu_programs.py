"""What is said about compiled GPU programs and about steps that a compiler refuses."""

import pathlib
import sys

import pytest
from commands import call
from places import REPOSITORY

sys.path.insert(0, str(REPOSITORY / "scripts"))

import aot_gpu
import aot_report
import compile_for
import targets

PTX = ".version 8.8\n.target sm_100a\n.address_size 64\n.visible .entry {name}(\n"
TOLD = """\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '{name}' for '{target}'
ptxas info    : Function properties for {name}
    8 bytes stack frame, {stores} bytes spill stores, 12 bytes spill loads
ptxas info    : Used {registers} registers, used 1 barriers
"""


@pytest.fixture
def ptxas(tmp_path, monkeypatch):
    """An assembler that says what lies beside each file, if it is told the file's target."""
    folder = tmp_path / "bin"
    folder.mkdir()
    program = folder / "ptxas"
    program.write_text(
        '#!/bin/sh\nfor last; do :; done\n[ "$1 $2" = "-arch sm_100a" ] && cat "$last.told" >&2\n'
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    return tmp_path


def dump(folder: pathlib.Path, name: str, **told: object) -> None:
    (folder / f"{name}.ptx").write_text(PTX.format(name=name))
    text = TOLD.format(name=name, target="sm_100a", **told)
    (folder / f"{name}.ptx.told").write_text(text)


def test_registers_and_spills_of_our_programs_are_read(ptxas):
    dump(ptxas, "attend", stores=4, registers=226)
    dump(ptxas, "loop_add_fusion", stores=0, registers=10)
    assert aot_gpu.resources(ptxas) == [{"name": "attend", "registers": 226, "spill_bytes": 16}]
    result = {"name": "attention/window", "implementation": "gpu", "target": "b200"}
    rows = aot_report.program_rows(result | {"programs": aot_gpu.resources(ptxas)})
    assert rows == [["attention/window (gpu)", "b200", "attend", "226", "16"]]
    assert aot_report.program_rows(result) == []


def test_a_process_that_compiles_dumps_where_it_is_told_and_keeps_its_flags(ptxas, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_one=1")
    assert "XLA_FLAGS" not in aot_gpu.environment(ptxas)
    flags = aot_gpu.environment(ptxas, ptxas / "dump")["XLA_FLAGS"]
    assert flags == f"--xla_one=1 --xla_dump_to={ptxas / 'dump'}"


def test_each_refused_step_has_its_reason_in_one_line():
    step = {"kind": "step", "name": "decode small", "target": "b200", "kernels": "reference"}
    results = [
        step | {"ok": True, "not_by": "gpu: no code for it"},
        step | {"ok": False, "error": "out of memory"},
        step | {"ok": True},
        {"kind": "kernel", "name": "attention/window", "target": "b200", "ok": True},
    ]
    assert aot_report.reasons(results) == [
        "decode small on b200: reference kernels, not those of gpu: no code for it",
        "decode small on b200: refused by the compiler: out of memory",
    ]


@pytest.mark.parametrize("target", ["h100", "b200"])
def test_gpus_are_compiled_for_and_have_no_slices(target):
    assert target in compile_for.ALL_TARGETS
    assert aot_gpu.device_kind(target).startswith("NVIDIA ")
    with pytest.raises(targets.UserError, match="no slice"):
        targets.target_of(f"{target}:2x2")


@pytest.mark.parametrize("tried", ["warps", "=4", "warps=many"])
def test_a_value_to_try_that_is_none_is_one_line(monkeypatch, capsys, tried):
    options = ("kernel", "attention/window", "--target", "b200", "--try", tried)
    code, _, error = call(compile_for.main, monkeypatch, capsys, *options)
    assert code == 2
    assert error.count("\n") == 1
    assert f"--try {tried}: give NAME=VALUE" in error
