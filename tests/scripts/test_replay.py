"""The command line of the replay: what it prints and writes, and what it refuses."""

import functools
import json
import sys

import commands
import pytest
from places import REPOSITORY

sys.path.insert(0, str(REPOSITORY / "scripts"))

import replay
import replay_check

from hybridkv.replay import html
from hybridkv.replay.trace import BLOCK

TRACES = REPOSITORY / "data" / "traces"


call = functools.partial(commands.call, replay.main)


@pytest.fixture
def trace(tmp_path):
    """Conversations that grow by a block a turn, and one line that is none."""
    rows = []
    for turn in range(1, 6):
        for user in range(4):
            ids = [100 * user + n for n in range(turn * 3)] + [10**6 + 10 * turn + user]
            row = {"timestamp": 1000 * len(rows), "input_length": BLOCK * 3 * turn + 7}
            rows.append(json.dumps(row | {"output_length": 30, "hash_ids": ids}))
    rows.insert(3, '{"timestamp": 3}')
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(rows))
    return path


def test_a_replay_prints_tables_and_writes_json_and_a_report(trace, tmp_path, monkeypatch, capsys):
    told, page = tmp_path / "told.json", tmp_path / "report.html"
    code, out, _ = call(
        monkeypatch, capsys, trace, "--model", "v4-flash", "--hardware", "v6e-8",
        "--json", told, "--html", page,
    )  # fmt: skip
    assert code == 0
    assert "trace.jsonl, line 4: input_length is missing" in out
    assert "1 lines skipped" in out
    assert "recommendation: " in out
    report = json.loads(told.read_text())
    assert [run["scheme"] for run in report["runs"]] == ["hybrid", "homogeneous", "generic"]
    assert report["scheme"] == "hybrid"
    assert report["skipped_lines"] == len(report["trace"]["skipped"]) == 1
    assert report["ideal_tokens"] == report["reused_tokens"] + sum(report["lost_tokens"].values())
    assert 0 < report["token_hit_ratio"] <= report["ideal_token_hit_ratio"] < 1
    assert all(each["source"] for each in report["inputs"])
    text = page.read_text()
    assert "Plotly" in text
    assert "Memory over time" in text
    assert "src=" not in text.split("<body>")[1]


def test_a_report_says_what_it_cannot_plot_and_where_times_mean_nothing(
    trace, tmp_path, monkeypatch, capsys
):
    page = tmp_path / "report.html"
    options = ["--scheme", "homogeneous", "--html", page]
    call(monkeypatch, capsys, trace, *options)
    text = page.read_text().split("<body>")[1]
    assert "Nothing that had been computed before was computed again." in text
    assert "Lost tokens by cause" not in text
    assert "cannot keep up" not in text
    call(monkeypatch, capsys, trace, *options, "--rate", 1e6)
    assert "The server cannot keep up under homogeneous: " in page.read_text()


def test_unlimited_capacity_with_states_everywhere_is_the_ideal(
    trace, tmp_path, monkeypatch, capsys
):
    told = tmp_path / "told.json"
    code, _, _ = call(
        monkeypatch, capsys, "run", trace, "--scheme", "hybrid", "--policy", "dense",
        "--capacity-tokens", "unlimited", "--eviction", "lru", "--json", told,
    )  # fmt: skip
    assert code == 0
    report = json.loads(told.read_text())
    assert report["token_hit_ratio"] == report["ideal_token_hit_ratio"]
    assert report["restorable_share"] == 1.0
    assert report["lost_tokens"] == {}
    assert "recommendation" not in report


def test_budgets_bound_what_is_kept(trace, tmp_path, monkeypatch, capsys):
    told = tmp_path / "told.json"
    call(
        monkeypatch, capsys, trace, "--scheme", "hybrid", "--capacity-tokens", 20 * BLOCK,
        "--snapshots", 2, "--no-replay", "--json", told,
    )  # fmt: skip
    report = json.loads(told.read_text())
    assert report["places"] == {"device": {"blocks": 20, "snapshots": 2}}
    assert set(report["lost_tokens"]) <= {
        "evicted(compressed)", "evicted(window)", "no_snapshot(window)", "never_published",
    }  # fmt: skip
    assert report["lost_tokens"]


def test_several_policies_are_compared(trace, tmp_path, monkeypatch, capsys):
    told = tmp_path / "told.json"
    call(monkeypatch, capsys, trace, "--policy", "ends,dense,ends+forks+1k", "--json", told)
    runs = json.loads(told.read_text())["runs"]
    assert [run["policy"] for run in runs[:3]] == ["ends", "dense", "ends+forks+1k"]


def test_a_recorded_log_is_replayed(tmp_path, monkeypatch, capsys):
    log, made = tmp_path / "log.jsonl", tmp_path / "trace.jsonl.gz"
    rows = [{"timestamp": n, "tokens": [7] * (BLOCK + 1 + n), "output_length": 3} for n in range(3)]
    log.write_text("\n".join([*map(json.dumps, rows), "nonsense"]))
    code, out, _ = call(monkeypatch, capsys, "record", log, "--out", made)
    assert code == 0
    assert "line 4: not JSON" in out
    assert "3 requests, 4 different blocks" in out
    code, out, _ = call(monkeypatch, capsys, made, "--scheme", "homogeneous")
    assert code == 0


def test_a_report_without_plotly_says_what_to_install(trace, tmp_path, monkeypatch, capsys):
    def missing():
        raise ImportError("no plotly")

    monkeypatch.setattr(html, "_plotly", missing)
    monkeypatch.setattr(replay, "replay_all", None)  # told before minutes of it
    code, _, err = call(
        monkeypatch, capsys, trace, "--scheme", "hybrid", "--html", tmp_path / "r.html"
    )
    assert code == 2
    assert "[report]" in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nowhere.jsonl"], "cannot read the trace"),
        (["{trace}", "--model", "v9"], "no model 'v9'"),
        (["{trace}", "--hardware", "abacus"], "no hardware 'abacus'"),
        (["{trace}", "--policy", "often"], "no policy 'often'"),
        (["{trace}", "--capacity-tokens", "many"], "--capacity-tokens is 'many'"),
        (["{trace}", "--capacity-tokens", "5"], "give a block of 512"),
        (["{trace}", "--snapshots", "-3"], "give 0 or more"),
        (["{trace}", "--tile", "100"], "multiple of 512"),
        (["{trace}", "--rate", "0"], "above 0"),
        (["{trace}", "--requests", "0"], "at least 1"),
        (["{trace}", "--model", "v4-pro"], "do not fit v6e-8"),
        (["record", "nowhere.jsonl", "--out", "x.jsonl"], "cannot read"),
    ],
)
def test_bad_input_is_one_line(trace, monkeypatch, capsys, arguments, words):
    filled = [word.format(trace=trace) for word in arguments]
    code, _, err = call(monkeypatch, capsys, *filled)
    assert code == 2
    assert words in err
    assert err.count("\n") == 1


def test_the_traces_that_come_along_are_read_whole():
    names = [*replay_check.TRACES.values(), "azure2023_code.csv.gz"]
    counts = [len(replay.read_trace(TRACES / name)) for name in names]
    assert counts == [12031, 3993, 4951, 8819]


def test_a_whole_trace_has_the_figures_of_another_simulator():
    case = replay_check.cases("synthetic", ["restorable"])[1]
    assert case.options.policy == replay.parse_policy("default")
    row = replay_check.measure(case)
    assert row["ok"]
    assert row["percent"] == pytest.approx(89.5, abs=0.05)
    assert row["ideal_percent"] == pytest.approx(65.0, abs=0.05)


def test_the_check_knows_when_a_figure_is_off():
    case = replay_check.cases("synthetic", ["ideal"])[0]
    assert case.ok(65.04)
    assert not case.ok(65.1)
    floor = replay_check.cases("synthetic", ["tight"])[0]
    assert floor.ok(62.0)
    assert not floor.ok(56.6)
    curve = replay_check.cases("agent", ["lru"])[1]
    assert curve.ok(29.5)
    assert not curve.ok(29.7)
