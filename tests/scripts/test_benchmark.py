"""The benchmark's command line on a model small enough for a test: its numbers mean nothing."""

import json
import sys

import pytest
from places import REPOSITORY

sys.path.insert(0, str(REPOSITORY / "scripts"))

import benchmark
import command_line

SMALL = benchmark.MODEL | {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "layer_types": benchmark.KINDS[1:4],
    "mlp_layer_types": benchmark.MODEL["mlp_layer_types"][1:4],
    "num_attention_heads": 4,
    "head_dim": 16,
    "qk_rope_head_dim": 4,
    "q_lora_rank": 16,
    "o_lora_rank": 8,
    "index_n_heads": 2,
    "index_head_dim": 8,
    "moe_intermediate_size": 16,
}


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(benchmark, "MODEL", SMALL)
    monkeypatch.setattr(command_line, "use_compilation_cache", lambda: None)


def call(monkeypatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["benchmark", "decode", *arguments])
    with pytest.raises(SystemExit) as stop:
        command_line.run(benchmark.main)
    return stop.value.code


def test_decode_measures_rates_bytes_and_growth(small, tmp_path, monkeypatch, capsys):
    told = tmp_path / "told.json"
    sizes = ("--context", "200", "--longest", "300", "--tokens", "4", "--rounds", "1")
    assert call(monkeypatch, *sizes, "--json", str(told)) == 0
    result = json.loads(told.read_text())
    assert result["hybridkv"]["prefill_tokens_per_second"] > 0
    assert result["hybridkv"]["decode_tokens_per_second"] > 0
    held = result["cache"]["hybridkv"]
    assert held["bytes_per_token"] == sum(held["bytes"].values()) / 200
    assert [row["context"] for row in result["growth"]] == [300]
    assert "one decode step as the context grows" in capsys.readouterr().out


def test_a_peer_that_is_not_installed_is_one_line(small, monkeypatch, capsys):
    code = call(monkeypatch, "--peer", "transformers", "--peer-python", sys.executable)
    assert code == 2
    error = capsys.readouterr().err
    assert "peers extra" in error
    assert error.count("\n") == 1
