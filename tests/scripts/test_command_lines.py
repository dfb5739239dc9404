"""The command lines: what works prints its result, bad input one line and exit status 2."""

import json
import pathlib
import shutil
import subprocess
import sys

import numpy as np
import pytest
from places import REPOSITORY

sys.path.insert(0, str(REPOSITORY / "scripts"))

import command_line
import decode
import verify


@pytest.fixture(autouse=True)
def _no_compilation_cache(monkeypatch):
    """Tests neither read nor fill a user's cache."""
    monkeypatch.setattr(command_line, "use_compilation_cache", lambda: None)


def call(module, monkeypatch, capsys, *arguments: object) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "argv", ["command", *map(str, arguments)])
    with pytest.raises(SystemExit) as stop:
        command_line.run(module.main)
    out, err = capsys.readouterr()
    return stop.value.code, out, err


@pytest.fixture
def tiny(oracles) -> pathlib.Path:
    return oracles / "tiny_d"


@pytest.fixture
def edited(tiny, tmp_path):
    """A copy of the checkpoint with fields of its config changed."""

    def edit(**changes: object) -> pathlib.Path:
        folder = tmp_path / "edited"
        shutil.copytree(tiny, folder)
        fields = json.loads((folder / "config.json").read_text()) | changes
        (folder / "config.json").write_text(json.dumps(fields))
        return folder

    return edit


def test_decode_prints_ids_and_writes_statistics(tiny, tmp_path, monkeypatch, capsys):
    with np.load(tiny / "oracle.npz") as arrays:
        ids = ",".join(str(i) for i in arrays["input_ids"][0])
        greedy = arrays["greedy_tokens"][:12].tolist()
    stats = tmp_path / "stats.json"
    code, out, err = call(
        decode, monkeypatch, capsys, "--checkpoint", tiny, "--token-ids", ids,
        "--max-new-tokens", 12, "--context", 128, "--stats-json", stats,
    )  # fmt: skip
    assert code == 0
    assert [int(x) for x in out.split()] == greedy
    told = json.loads(stats.read_text())
    assert told["prompt_tokens"] == 53
    assert told["new_tokens"] == 12
    assert told["time_to_first_token_s"] > 0
    assert told["decode_tokens_per_second"] > 0
    assert set(told["cache_bytes"]) == {"compressed", "indexer", "window", "tail"}
    assert "tokens/s" in err
    assert "cache bytes by kind" in err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--token-ids", ""], "empty"),
        (["--token-ids", "1,x"], "integers"),
        (["--token-ids", "1,-1"], "outside the vocabulary"),
        (["--token-ids", "1,128"], "outside the vocabulary"),
        (["--token-ids", ",".join(["1"] * 60), "--context", "64"], "capacity is 64"),
        (["--token-ids", "1", "--max-new-tokens", "0"], "at least 1"),
        (["--token-ids", "1", "--temperature", "-1"], "temperature"),
        (["--token-ids", "1", "--top-p", "0"], "top_p"),
        (["--token-ids", "1", "--top-k", "-2"], "top_k"),
        (["--token-ids", "1", "--context", "0"], "--context"),
        (["--token-ids", "1", "--tile", "7"], "multiple of the model's block"),
        (["text"], "tokenizer.json"),
        (["--token-ids", "1", "text"], "one prompt"),
        ([], "one prompt"),
        (["--file", "/nowhere/prompt.txt"], "tokenizer.json"),
    ],
)
def test_decode_refuses_a_bad_prompt_or_option(tiny, monkeypatch, capsys, arguments, words):
    if not arguments:
        arguments = ["--token-ids", "1", "--file", "x"]
    code, out, err = call(decode, monkeypatch, capsys, "--checkpoint", tiny, *arguments)
    assert (code, out) == (2, "")
    assert words in err
    assert err.startswith("error: ")
    assert err.count("\n") == 1


def test_decode_refuses_left_padding_with_the_reason(edited, monkeypatch, capsys):
    folder = edited(pad_token_id=3)
    code, _, err = call(
        decode, monkeypatch, capsys, "--checkpoint", folder, "--token-ids", "3,3,5,6"
    )
    assert code == 2
    assert "cell boundary" in err


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "mixtral"}, "model_type"),
        ({"layer_types": ["linear_attention"] * 4}, "linear_attention"),
        ({"num_hidden_layers": 5}, "num_hidden_layers"),
        ({"scoring_func": "softmax"}, "scoring_func"),
        ({"hidden_size": 64}, "shape"),
        ({"n_routed_experts": 7}, "shape"),
    ],
)
def test_decode_refuses_a_foreign_config(edited, monkeypatch, capsys, changes, words):
    code, _, err = call(
        decode, monkeypatch, capsys, "--checkpoint", edited(**changes), "--token-ids", "1"
    )
    assert code == 2
    assert words in err
    assert err.count("\n") == 1


def test_decode_refuses_what_is_no_checkpoint(tiny, tmp_path, monkeypatch, capsys):
    empty = tmp_path / "empty"
    empty.mkdir()
    damaged = tmp_path / "damaged"
    damaged.mkdir()
    shutil.copy(tiny / "config.json", damaged)
    (damaged / "model.safetensors").write_bytes(b"not a tensor")
    for folder, words in (
        (tmp_path / "missing", "no checkpoint folder"),
        (empty, "no config.json"),
        (damaged, "not a safetensors file"),
    ):
        code, _, err = call(decode, monkeypatch, capsys, "--checkpoint", folder, "--token-ids", "1")
        assert code == 2
        assert words in err
        assert err.count("\n") == 1


def test_verify_oracle_passes_and_writes_json(tiny, tmp_path, monkeypatch, capsys):
    told = tmp_path / "told.json"
    code, out, _ = call(verify, monkeypatch, capsys, "oracle", tiny, "--tile", 12, "--json", told)
    assert code == 0
    result = json.loads(told.read_text())
    assert result["ok"]
    assert max(row["max_abs"] for row in result["rows"]) <= 1e-4
    assert "60 of 60" in out


def test_verify_oracle_fails_on_a_wrong_logit(tiny, tmp_path, monkeypatch, capsys):
    folder = tmp_path / "wrong"
    shutil.copytree(tiny, folder)
    with np.load(folder / "oracle.npz") as arrays:
        changed = {name: arrays[name].copy() for name in arrays}
    changed["decode_logits"][7, 3] += 1e-3
    np.savez(folder / "oracle.npz", **changed)
    code, out, _ = call(verify, monkeypatch, capsys, "oracle", folder, "--tile", 12)
    assert code == 1
    assert "NO" in out


def test_verify_refuses_a_folder_without_oracle(tmp_path, monkeypatch, capsys):
    code, _, err = call(verify, monkeypatch, capsys, "oracle", tmp_path)
    assert code == 2
    assert "oracle.npz" in err


def test_a_script_run_from_elsewhere_fails_without_a_traceback(tmp_path):
    done = subprocess.run(
        [sys.executable, REPOSITORY / "scripts" / "decode.py", "--checkpoint", "nowhere", "hello"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert done.stderr.strip().splitlines()[-1].startswith("error: no checkpoint folder")
