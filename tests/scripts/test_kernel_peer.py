"""The comparison with tokamax's references, with one of ours in their place."""

import sys

import jax.numpy as jnp
import numpy as np
import pytest
from commands import call
from places import REPOSITORY

sys.path.insert(0, str(REPOSITORY / "scripts"))

import benchmark
import kernel_peer

from pallas_kernels.packing import reference
from pallas_kernels.packing.layout import RowLayout


@pytest.fixture(autouse=True)
def small(monkeypatch):
    sizes = {"SEQUENCES": 2, "ROWS": 64, "PICKS": 24, "HEADS": 4, "CELLS": 3}
    for name, value in sizes.items():
        monkeypatch.setattr(kernel_peer, name, value)


def stand_in(python, operation, x):
    """What a right peer answers, in float64, from what it is given alone."""
    wide = {name: np.asarray(value, np.float64) for name, value in x.items()}
    if operation == "sparse_mla":
        rows = np.take_along_axis(wide["rows"], x["picks"][..., None], axis=1)
        powers = np.exp(wide["q"] @ rows.swapaxes(1, 2) * x["scale"])
        keep = np.exp(wide["window_top"])
        total = powers.sum(-1) + keep * wide["window_total"] + np.exp(wide["sink"])
        acc = powers @ rows + keep[..., None] * wide["window_acc"]
        return {"out": acc / total[..., None]}
    if operation == "lightning_indexer":
        hits = np.maximum(wide["q"] @ wide["rows"].swapaxes(1, 2), 0)
        scores = np.einsum("nhk,nh->nk", hits, wide["weights"])
        picks = np.argsort(-scores, axis=-1)[:, : int(x["topk"])]
        return {"picks": picks, "scores": np.take_along_axis(scores, picks, axis=-1)}
    if operation == "dsv4_compressor":
        powers = np.exp(wide["gate"])
        pooled = (powers * wide["kv"]).sum(1) / powers.sum(1)
        return {"out": pooled / np.sqrt(np.mean(pooled**2, axis=-1, keepdims=True))}
    layout = RowLayout("fp8_rope16", x["rows"].shape[-1])
    stored = reference.encode(jnp.asarray(x["rows"]), layout)
    return {"out": np.asarray(reference.decode(stored, layout))}


def compared(monkeypatch, theirs=stand_in):
    monkeypatch.setattr(kernel_peer, "_check", lambda python: None)
    monkeypatch.setattr(kernel_peer, "_theirs", theirs)
    return kernel_peer.compare("python", "reference", seed=0)


def test_both_sides_are_compared_on_the_same_inputs(monkeypatch, capsys):
    rows = compared(monkeypatch)
    done = {row["peer"]: row for row in rows if "unsupported" not in row}
    assert list(done) == [
        "sparse_mla",
        "lightning_indexer",
        "dsv4_compressor",
        "quantize_fp8_ue8m0",
    ]
    coded = done.pop("quantize_fp8_ue8m0")
    assert coded["note"].startswith("the format's error; 0 of ")
    assert 1e-3 < coded["ours"]["max"] < 2**-4 + 1e-6
    for row in done.values():
        assert 0 < row["ours"]["median"] <= row["ours"]["max"] < 5e-6, row
        assert row["theirs"]["max"] < 1e-6, row
    assert done["lightning_indexer"]["note"].startswith("of 48 picks float64 has 48 of ours, 48 of")
    assert all(row["unsupported"] for row in rows if row["peer"] not in {*done, coded["peer"]})
    kernel_peer.report(rows, "cpu")
    assert "no window, no sink" in capsys.readouterr().out


def test_what_a_peer_does_not_run_is_said_in_the_table(monkeypatch):
    rows = compared(monkeypatch, lambda *_: {"error": np.asarray("RuntimeError: no such device")})
    assert all("unsupported" in row for row in rows)
    assert rows[0]["unsupported"] == "RuntimeError: no such device"


@pytest.mark.parametrize(("python", "message"), [(sys.executable, "no tokamax"), ("/no", "cannot")])
def test_a_peer_that_is_not_there_is_one_line(monkeypatch, capsys, python, message):
    options = ("kernels", "--peer", "tokamax", "--peer-python", python)
    code, _, error = call(benchmark.main, monkeypatch, capsys, *options)
    assert code == 2
    assert error.count("\n") == 1
    assert message in error
    assert "scripts/peers/tokamax.txt" in error
