"""What observing costs is measured where it happens, and a share above the bar is told."""

import json
import sys

import pytest
from engines import renewed
from places import REPOSITORY
from scenarios.counting import counting_lab

sys.path.insert(0, str(REPOSITORY / "scripts"))

import benchmark
import benchmark_observe
import command_line

SMALL = ("observe", "--slots", "2", "--context", "40", "--turns", "6", "--scrape-s", "0.001")


@pytest.fixture
def call(monkeypatch, tmp_path):
    """Runs the subcommand on an engine that computes nothing: its status, and the JSON."""

    def run(*more: str) -> tuple[int, dict]:
        path = tmp_path / "told.json"
        monkeypatch.setattr(sys, "argv", ["benchmark", *SMALL, *more, "--json", str(path)])
        monkeypatch.setattr(command_line, "use_compilation_cache", lambda: None)
        with renewed(counting_lab()) as lab:
            monkeypatch.setattr(benchmark_observe, "_engine", lambda args: lab.engine)
            status = benchmark.main()
        return status, json.loads(path.read_text())

    return run


def test_turns_that_publish_tell_every_prompt_and_cost_more_than_those_that_do_not(call):
    _, result = call()
    assert result["prompt_messages"] >= 1
    assert result["prompt_events_us"] > result["events_us"] > 0
    parts = result["metrics_us"] + result["events_us"] + result["tokens_us"] + result["lock_us"]
    assert result["share"] == pytest.approx(parts / result["turn_us"])


@pytest.mark.parametrize(("most", "status"), [(1e-9, 1), (1e9, 0)])
def test_a_share_above_the_bar_is_a_failure(call, monkeypatch, most, status):
    monkeypatch.setattr(benchmark_observe, "MOST", most)
    assert call()[0] == status
