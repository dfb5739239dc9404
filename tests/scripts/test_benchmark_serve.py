"""The benchmark of what HTTP adds to a request, from end to end."""

import json
import sys
import time

import numpy as np
import pytest
from engines import ids_of
from places import REPOSITORY

sys.path.insert(0, str(REPOSITORY / "scripts"))

import benchmark
import benchmark_serve
import command_line
import decode_models
import serve

from hybridkv.engine.requests import Request
from hybridkv.errors import UserError


def test_the_benchmark_measures_both_sorts_of_answers(world, monkeypatch, capsys, tmp_path):
    runtime = world.engine.runner.model
    monkeypatch.setattr(decode_models, "load", lambda args: (runtime, world.text))
    monkeypatch.setattr(serve, "make_engine", lambda *_: world.engine)
    monkeypatch.setattr(command_line, "use_compilation_cache", lambda: None)
    monkeypatch.setattr(serve, "settled", lambda made: made)  # it would keep what tests leave
    for part in (world.engine, world.engine.seating):
        monkeypatch.setattr(part, "_clock", time.monotonic)
    told = tmp_path / "told.json"
    sizes = "--rounds 2 --clients 2 --prompt 20 --tokens 3 --tile 16"
    monkeypatch.setattr(sys, "argv", ["benchmark", "serve", *sizes.split(), "--json", str(told)])
    assert benchmark.main() == 0
    result = json.loads(told.read_text())
    assert result["compilations"] == 0
    for side in ("whole", "stream"):
        row = result[side]
        assert row["overhead_ms"] == np.median(row["overhead_ms_of_rounds"])
        assert row["overhead_ms"] == pytest.approx(row["http_ms"] - row["straight_ms"])
        low, high = row["overhead_between_ms"]
        assert low <= row["overhead_ms"] <= high
        path = row["path"]
        assert set(path) == {"in", "turn", "engine", "out", "turn_straight"}
        assert min(path["in"], path["engine"]) > 0
        assert row["outside_engine_ms"] < row["http_ms"]
        assert row["client_cpu_ms"] > 0
    assert "bar 5.0 ms" in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", ["benchmark", "serve", "--clients", "0"])
    with pytest.raises(UserError, match="--clients must be at least 1"):
        benchmark.main()


def test_the_interval_of_a_median_is_that_of_its_ranks():
    assert benchmark_serve.median_between(range(1, 101)) == (40, 61)
    assert benchmark_serve.median_between(range(1, 11)) == (2, 9)
    assert benchmark_serve.median_between([3.0]) == (3.0, 3.0)


def test_the_watch_notes_the_turn_that_gave_the_first_token_and_the_last(world):
    world.start()
    watch = benchmark_serve.Watch()
    request = Request(prompt=ids_of(20), max_new_tokens=3)
    watch.of(request).asked = benchmark_serve.now()
    ends = []

    def take(engine):
        engine.on_turn += [watch.look, lambda: ends.append(benchmark_serve.now())]
        benchmark_serve._take(watch, request, engine)

    before = list(world.engine.on_turn)
    world.thread.call(take).result()
    assert watch.left.acquire(timeout=20)
    world.thread.call(lambda engine: engine.on_turn.__setitem__(slice(None), before)).result()
    seen = watch.of(request)
    assert 0 < seen.asked <= seen.taken < seen.first < seen.last
    turns = [x for x in ends if seen.first <= x <= seen.last]
    assert len(turns) == 2, "one turn a token"
