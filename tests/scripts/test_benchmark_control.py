"""The bookkeeping benchmark with a small directory: its numbers mean nothing."""

import functools
import json
import sys

import pytest
from commands import status
from places import REPOSITORY

sys.path.insert(0, str(REPOSITORY / "scripts"))

import benchmark
import benchmark_control

FIGURES = {*benchmark_control.FIGURES.values(), "bytes_an_entry"}
SMALL = ("--blocks", "20000", "--repeats", "1")


@pytest.fixture
def call(monkeypatch):
    return functools.partial(status, benchmark.main, monkeypatch, "control")


class Second:
    """Stands for a peer process: as many blocks and tokens, every figure 1 second."""

    ended = 0

    def __init__(self, python, script, start, remedy):
        assert script == "control_peer.py"
        assert start["blocks"] == 20000
        self.about = {"version": "1", "blocks_published": 8191, "bytes_an_entry": 1000.0}

    def ask(self, command):
        tokens = benchmark_control.PROMPT_TOKENS - 128
        return {"seconds": 1.0} | ({} if command["call"] == "move" else {"tokens": tokens})

    def close(self):
        Second.ended += 1


def test_figures_without_a_peer(call, tmp_path, capsys):
    told = tmp_path / "told.json"
    assert call(*SMALL, "--json", str(told)) == 0
    result = json.loads(told.read_text())
    assert result["peers"] == {}
    assert result["blocks_published"] == result["prompt_blocks"] - 1 == 8191
    assert all(result[name] > 0 for name in FIGURES)
    assert "8,191 published blocks" in capsys.readouterr().out


def test_a_peer_has_a_ratio_beside_every_figure(call, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(benchmark_control, "PeerProcess", Second)
    told = tmp_path / "told.json"
    assert call(*SMALL, "--peer", "vllm", "sglang", "--json", str(told)) == 0
    result = json.loads(told.read_text())
    assert list(result["peers"]) == ["vllm", "sglang"]
    for peer in result["peers"].values():
        assert peer["ratio"].keys() == FIGURES
        for name, ratio in peer["ratio"].items():
            assert ratio == pytest.approx(peer[name] / result[name])
        assert peer["plan_cold_hashing_ms"] == 1000.0
    assert Second.ended == 2
    assert "ratio" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--blocks", "16383"], "at least 16384"),
        (["--repeats", "0"], "at least 1"),
        ([*SMALL, "--peer", "vllm", "--peer-python", sys.executable], "pip install --no-deps vllm"),
        ([*SMALL, "--peer", "sglang", "--peer-python", "/nowhere/python"], "/nowhere/python"),
    ],
)
def test_what_the_user_can_mend_is_one_line(call, capsys, arguments, words):
    assert call(*arguments) == 2
    error = capsys.readouterr().err
    assert words in error
    assert error.startswith("error: ")
    assert error.count("\n") == 1


def test_an_unknown_peer_is_named(call, capsys):
    assert call("--peer", "redis") == 2
    assert "redis" in capsys.readouterr().err
