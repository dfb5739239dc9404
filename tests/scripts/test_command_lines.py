"""The command lines: what works prints its result, bad input one line and exit status 2."""

import json
import logging
import pathlib
import re
import shutil
import subprocess
import sys

import numpy as np
import pytest
from commands import call
from places import REPOSITORY

sys.path.insert(0, str(REPOSITORY / "scripts"))

import command_line
import decode
import decode_prompts
import verify

from hybridkv.errors import UserError
from models.text import ByteText


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
        decode.main, monkeypatch, capsys, "--checkpoint", tiny, "--token-ids", ids,
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
        (["--token-ids", "1", "--tile", "-128"], "--tile must be at least 1"),
        (["--token-ids", "9" * 20], "takes integers"),
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
    code, out, err = call(decode.main, monkeypatch, capsys, "--checkpoint", tiny, *arguments)
    assert (code, out) == (2, "")
    assert words in err
    assert err.startswith("error: ")
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('{"prompt": "a\\ud800"}', "is not text"),
        ("[" * 100_000, "line 1: not JSON"),
        ('{"prompt": "a", "max_new_tokens": 0}', "max_new_tokens is 0, not an integer"),
        ('{"prompt": "a", "max_new_tokens": true}', "max_new_tokens is True, not an integer"),
    ],
    ids=["surrogate", "deep", "nothing", "bool"],
)
def test_a_line_of_prompts_that_cannot_be_meant_is_refused(tmp_path, line, words):
    file = tmp_path / "lines.jsonl"
    file.write_text(f"{line}\n")
    with pytest.raises(UserError, match=words):
        decode_prompts.several(file, ByteText(), chat=False)


def test_standard_input_that_is_no_text_is_refused(monkeypatch, tmp_path):
    file = tmp_path / "bytes"
    file.write_bytes(b"a\xff")
    args = decode.parse(["-"])
    for errors in ("strict", "surrogateescape"):
        with file.open(encoding="utf-8", errors=errors) as stdin:
            monkeypatch.setattr(sys, "stdin", stdin)
            with pytest.raises(UserError, match=r"is not text|cannot read standard input"):
                decode_prompts.single(args, ByteText())


def test_decode_refuses_left_padding_with_the_reason(edited, monkeypatch, capsys):
    folder = edited(pad_token_id=3)
    code, _, err = call(
        decode.main, monkeypatch, capsys, "--checkpoint", folder, "--token-ids", "3,3,5,6"
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
        decode.main, monkeypatch, capsys, "--checkpoint", edited(**changes), "--token-ids", "1"
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
        code, _, err = call(
            decode.main, monkeypatch, capsys, "--checkpoint", folder, "--token-ids", "1"
        )
        assert code == 2
        assert words in err
        assert err.count("\n") == 1


def test_verify_oracle_passes_and_writes_json(tiny, tmp_path, monkeypatch, capsys):
    told = tmp_path / "told.json"
    code, out, _ = call(
        verify.main, monkeypatch, capsys, "oracle", tiny, "--tile", 12, "--json", told
    )
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
    code, out, _ = call(verify.main, monkeypatch, capsys, "oracle", folder, "--tile", 12)
    assert code == 1
    assert "NO" in out


def test_verify_refuses_a_folder_without_oracle(tmp_path, monkeypatch, capsys):
    code, _, err = call(verify.main, monkeypatch, capsys, "oracle", tmp_path)
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


def shakespeare(monkeypatch, capsys, stats, *arguments: object):
    """The shipped model, which speaks bytes, in small."""
    code, out, err = call(
        decode.main, monkeypatch, capsys, *arguments,
        "--max-new-tokens", 6, "--context", 400, "--stats-json", stats,
    )  # fmt: skip
    assert code == 0, err
    return out, err, json.loads(stats.read_text())


def test_decode_holds_a_conversation_and_reuses_what_was_said(tmp_path, monkeypatch, capsys):
    turns = tmp_path / "turns.txt"
    turns.write_text("JULIET: " + "O Romeo, " * 20 + "\n\nROMEO: Shall I hear more?\n")
    out, err, told = shakespeare(
        monkeypatch, capsys, tmp_path / "told.json", "--conversation", turns
    )
    assert out.count(">>> ") == 2
    first, second = told["requests"]
    assert (first["reused"], first["computed"]) == (0, first["prompt_tokens"])
    assert second["reused"] == 128
    assert second["computed"] == second["prompt_tokens"] - 128
    assert second["prompt_tokens"] == first["prompt_tokens"] + 6 + len(
        "ROMEO: Shall I hear more?\n"
    )
    assert "lost" in err
    assert told["compilations"] == 0


def test_decode_runs_prompts_of_a_file_together_over_raw_rows(tmp_path, monkeypatch, capsys):
    prompts = tmp_path / "prompts.jsonl"
    same = "FIRST CITIZEN: " + "Speak, speak. " * 12
    lines = [{"prompt": same + "A"}, {"prompt": same + "B", "max_new_tokens": 2}]
    prompts.write_text("\n".join(map(json.dumps, lines)))
    out, _, told = shakespeare(
        monkeypatch, capsys, tmp_path / "told.json", "--prompts", prompts, "--scheme", "generic"
    )
    assert out.count("--- ") == 2
    assert [row["new_tokens"] for row in told["requests"]] == [6, 2]
    assert [row["reused"] for row in told["requests"]] == [0, 128]
    assert told["scheme"] == "generic"
    assert set(told["cache_bytes"]) >= {"compressed"}
    assert told["cache_bytes"]["window"] == 0


def test_decode_asks_about_a_document_and_finds_nothing_where_reuse_is_off(
    tmp_path, monkeypatch, capsys
):
    document = tmp_path / "document.txt"
    document.write_text("The tide comes in. " * 10)
    out, _, told = shakespeare(
        monkeypatch, capsys, tmp_path / "told.json",
        "--file", document, "--ask", "When?", "--ask", "Where?", "--scheme", "off",
    )  # fmt: skip
    assert [line for line in out.splitlines() if line.startswith("--- ")] == [
        "--- When?",
        "--- Where?",
    ]
    assert [row["reused"] for row in told["requests"]] == [0, 0]
    assert all("reuse is off" in row["why"] for row in told["requests"])


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ("", "holds no prompt"),
        ('{"prompt": "a"}\n{"prompt": 3}', "line 2"),
        ("not json", "line 1: not JSON"),
        ('{"prompt": "a", "max_new_tokens": "b"}', "not an integer"),
    ],
)
def test_decode_refuses_a_malformed_file_of_prompts(tmp_path, monkeypatch, capsys, lines, words):
    file = tmp_path / "prompts.jsonl"
    file.write_text(lines)
    code, out, err = call(decode.main, monkeypatch, capsys, "--prompts", file)
    assert (code, out) == (2, "")
    assert words in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["text", "--ask", "Who?"], "--file"),
        (["text", "--slots", "0"], "--slots"),
        (["text", "--samples", "0"], "--samples"),
        (["text", "--snapshots", "-1"], "--snapshots"),
        (["text", "--min-p", "2"], "min_p"),
        (["text", "--repetition-penalty", "0"], "repetition_penalty"),
        (["text", "--chat"], "chat template"),
        (["text", "--checkpoint", "nowhere.gguf"], "nowhere.gguf"),
        (["--conversation", "/nowhere/turns.txt"], "cannot read"),
    ],
)
def test_decode_refuses_options_that_mean_nothing(monkeypatch, capsys, arguments, words):
    code, out, err = call(decode.main, monkeypatch, capsys, *arguments)
    assert (code, out) == (2, "")
    assert words in err
    assert err.count("\n") == 1


def test_log_lines_have_a_time_though_a_library_has_set_up_logging_before(monkeypatch, capsys):
    before = [logging.StreamHandler(sys.stderr)]
    monkeypatch.setattr(logging.getLogger(), "handlers", before)
    command_line.log_to_stderr()
    logging.getLogger("somewhere").warning("hello")
    told = capsys.readouterr().err
    assert re.fullmatch(r"\d{4}-\d\d-\d\d [\d:,]+ WARNING somewhere: hello\n", told)
