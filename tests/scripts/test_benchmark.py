"""The benchmark's command line on a model small enough for a test: its numbers mean nothing."""

import json
import sys
import typing

import numpy as np
import pytest
from commands import status
from places import REPOSITORY

sys.path.insert(0, str(REPOSITORY / "scripts"))

import benchmark
import benchmark_decode
import benchmark_engine
import benchmark_model
import benchmark_peers
from benchmark_model import KINDS, MODEL

SMALL = MODEL | {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "layer_types": KINDS[1:4],
    "mlp_layer_types": MODEL["mlp_layer_types"][1:4],
    "num_attention_heads": 4,
    "head_dim": 16,
    "qk_rope_head_dim": 4,
    "q_lora_rank": 16,
    "o_lora_rank": 8,
    "index_n_heads": 2,
    "index_head_dim": 8,
    "moe_intermediate_size": 16,
}
DECODE = ("decode", "--context", 200, "--longest", 300, "--tokens", 6, "--rounds", 1)


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    monkeypatch.setattr(benchmark_model, "MODEL", SMALL)


@pytest.fixture
def call(monkeypatch, tmp_path):
    """Runs the command line; its exit status, and what it wrote as JSON."""

    def run(*arguments: object) -> tuple[int, dict]:
        told = tmp_path / "told.json"
        code = status(benchmark.main, monkeypatch, *arguments, "--json", told)
        return code, json.loads(told.read_text()) if told.exists() else {}

    return run


class FakeSide:
    """Takes the same calls as a side of ``decode`` and computes nothing."""

    prompt_seconds, token_seconds = 1.0, 0.01

    def __init__(self):
        self.calls: list[tuple] = []

    def prefill(self, ids):
        self.calls.append(("prefill", len(ids)))
        return {"seconds": self.prompt_seconds, "logits": np.zeros(64)}

    def decode(self, ids):
        self.calls.append(("decode", len(ids)))
        return {"seconds": [self.token_seconds]}


class FakePeer(FakeSide):
    opened: typing.ClassVar[list["FakePeer"]] = []

    def __init__(self, name, python, folder, threads, **start):
        super().__init__()
        self.about = {"version": name} | start
        self.opened.append(self)

    def cache_bytes(self):
        return 2000 if self.about["version"] == "transformers" else None

    def close(self):
        self.calls.append(("close",))


class FakeOurs(FakeSide):
    """Twice as fast in prompts, four times in tokens."""

    prompt_seconds, token_seconds = 0.5, 0.0025

    def __init__(self, runtime, tile, capacity):
        super().__init__()
        self.geometry, self.vocab, self.cache = runtime.geometry, runtime.vocab_size, None

    def empty(self):
        return None


@pytest.mark.long
def test_decode_measures_rates_bytes_and_growth(call, capsys):
    code, result = call(*DECODE)
    assert code == 0
    assert result["hybridkv"]["prefill_tokens_per_second"] > 0
    assert result["hybridkv"]["decode_tokens_per_second"] > 0
    assert result["peers"] == result["ratio"] == {}
    held = result["cache"]["hybridkv"]
    assert held["bytes_per_token"] == sum(held["bytes"].values()) / 200
    assert [row["context"] for row in result["growth"]] == [300]
    assert "one decode step as the context grows" in capsys.readouterr().out


@pytest.mark.long
def test_decode_gives_every_peer_the_same_work_and_a_ratio(call, monkeypatch, capsys):
    monkeypatch.setattr(FakePeer, "opened", [])
    monkeypatch.setattr(benchmark_decode, "Ours", FakeOurs)
    monkeypatch.setattr(benchmark_peers, "Peer", FakePeer)
    monkeypatch.setattr(benchmark_peers, "LlamaCpp", FakePeer)
    code, result = call(*DECODE, "--peer", "transformers", "llama.cpp", "--peer-defaults")
    assert code == 0
    sides = ["transformers", "llama.cpp", "llama.cpp defaults"]
    assert list(result["peers"]) == list(result["ratio"]) == sides
    assert [peer.about.get("defaults") for peer in FakePeer.opened] == [None, False, True]
    work = [("prefill", 200), ("decode", 2), ("decode", 2), ("decode", 1), ("decode", 1)]
    assert all(peer.calls == [*work, ("close",)] for peer in FakePeer.opened)
    for name in sides:
        assert result["ratio"][name] == pytest.approx({"prefill": 2, "decode": 4})
        assert result[name]["prefill_tokens_per_second"] == 200
        assert result[name]["decode_tokens_per_second"] == pytest.approx(100)
        assert result["prefill_log_probabilities_max_abs_difference"][name] == 0
    assert set(result["cache"]) == {"hybridkv", "transformers"}
    assert result["cache"]["transformers"]["bytes_per_token"] == 10
    assert "llama.cpp defaults" in capsys.readouterr().out


def test_llama_cpp_is_asked_for_as_many_tokens_as_the_others_consume(monkeypatch):
    asked = []
    peer = benchmark_peers.LlamaCpp.__new__(benchmark_peers.LlamaCpp)  # without its process
    monkeypatch.setattr(peer, "ask", lambda command: asked.append(command) or {"seconds": 0.5})
    assert peer.decode(np.zeros(3, np.int32)) == {"seconds": [0.5]}
    assert asked == [{"call": "generate", "count": 4}]  # the first is not timed


def test_log_probabilities_do_not_move_when_taken_twice():
    once = benchmark_decode.log_probabilities([1.0, 2.0, 4.0])
    assert np.exp(once).sum() == pytest.approx(1)
    np.testing.assert_allclose(benchmark_decode.log_probabilities(once), once)


@pytest.mark.parametrize("peer", ["transformers", "llama.cpp"])
def test_a_peer_that_is_not_installed_is_one_line(call, capsys, peer):
    code, _ = call("decode", "--peer", peer, "--peer-python", sys.executable)
    assert code == 2
    error = capsys.readouterr().err
    assert "peers extra" in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("decode", "--peer-defaults"), "--peer llama.cpp"),
        (("decode", "--tokens", 0), "at least 1"),
        (("engine", "--streams", 8), "prompts need a slot"),
        (("engine", "--busy", 1), "--busy"),
        (("engine", "--turns", 1), "--turns"),
        (("engine", "--tokens", 0), "--tokens"),
        (("schemes", "--shared", 3200), "--shared"),
        (("schemes", "--rounds", 0), "--rounds"),
        (("schemes", "--contexts", 0), "--contexts"),
    ],
)
def test_a_size_out_of_range_is_one_line(call, capsys, arguments, words):
    code, _ = call(*arguments)
    assert code == 2
    error = capsys.readouterr().err
    assert words in error
    assert error.count("\n") == 1


@pytest.mark.long
def test_engine_measures_every_bar_and_compiles_nothing(call, capsys):
    code, result = call(
        "engine", "--slots", 4, "--context", 140, "--tokens", 3, "--rounds", 1, "--turns", 16,
        "--streams", 2, "--prompt", 130, "--prompt-new", 2, "--requests", 4,
    )  # fmt: skip
    assert code == 0
    assert list(result["bars"]) == list(benchmark_engine.BARS)
    assert result["compilations"] == 0, result["compiled"]
    assert result["bars"]["compilations"] == {"value": 0, "bar": 0, "met": True}
    decode = result["decode"]
    assert set(decode["turn_ms"]) == {"together", "one_request", "generator"}
    assert decode["times_one_request"] == pytest.approx(
        4 * decode["turn_ms"]["one_request"] / decode["turn_ms"]["together"]
    )
    full = result["between_tokens"]["always"]
    assert full["tokens"] == 2 * (16 - 1)
    assert full["share_of_tokens_beside_a_tile"] == 1
    assert full["p99_ms"] >= full["p50_ms"] > 0
    assert full["prompts_ended"] > 0
    mixed = result["mixed"]
    assert mixed["requests"] == 4
    assert mixed["computed_tokens"] >= mixed["prompt_tokens"] - mixed["reused_tokens"] > 0
    assert "time between tokens of 2 streams" in capsys.readouterr().out


def test_gaps_are_told_apart_by_whether_a_tile_ran():
    told = benchmark_engine._gaps(np.array([1.0, 1.0, 6.0, 2.0]), np.array([0, 0, 1, 0], bool))
    assert (told["with_tile_ms"], told["without_tile_ms"]) == (6000, 1000)
    assert told["share_of_time_beside_a_tile"] == 0.6
    assert told["share_of_tokens_beside_a_tile"] == 0.25
    assert benchmark_engine._gaps(np.ones(3), np.ones(3, bool))["without_tile_ms"] is None


def test_poisson_arrivals_keep_their_rate_and_do_not_wait_for_those_before(monkeypatch):
    monkeypatch.setattr(benchmark_engine.time, "perf_counter", lambda: 0.0)
    due = benchmark_engine.poisson(np.random.default_rng(0), rate=20.0)
    assert not due(0.0, 0)
    arrived = 0
    while due(100.0, arrived):
        arrived += 1
    assert 1800 < arrived < 2200


@pytest.mark.long
def test_schemes_measures_bytes_rates_and_reuse(call, capsys):
    code, result = call(
        "schemes", "--contexts", 130, 260, "--tokens", 2, "--rounds", 1,
        "--prompt", 400, "--shared", 390,
    )  # fmt: skip
    assert code == 0
    schemes = {"hybrid", "generic", "off"}
    assert set(result["decode"]["ms"]) == schemes
    assert all(set(row) == {"130", "260"} for row in result["decode"]["ms"].values())
    assert result["decode"]["generic_logits_max_abs_difference"] < 1e-4
    held = result["bytes"]["model"]
    assert held["off"] == held["hybrid"] | {"snapshot": 0}
    assert held["generic"]["1M"] == 1024 * held["generic"]["1k"]
    assert held["hybrid"]["1M"] < 1024 * held["hybrid"]["1k"]
    assert held["generic"]["snapshot"] == 0
    flash = result["bytes"]["v4_flash"]
    assert flash["hybrid, packed rows"]["1M"] < flash["hybrid, float32 rows"]["1M"]
    reuse = {(row["scheme"], row["request"]): row for row in result["reuse"]}
    assert set(reuse) == {(name, number) for name in schemes for number in (1, 2, 3)}
    assert all(row["reused"] + row["computed"] == 400 for row in reuse.values())
    assert {reuse["off", number]["reused"] for number in (1, 2, 3)} == {0}
    assert reuse["generic", 2]["reused"] == 384
    assert reuse["hybrid", 3]["reused"] == 384
    assert "V4-Flash" in capsys.readouterr().out
