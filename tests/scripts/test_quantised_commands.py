"""``--cache-format`` of ``decode.py`` and ``verify.py``: what it stores, and what it refuses."""

import functools
import sys

import pytest
from commands import call, status
from flax import nnx
from places import REPOSITORY

sys.path.insert(0, str(REPOSITORY / "scripts"))

import decode
import decode_models
import verify
import verify_restore

from hybridkv.errors import UserError
from models.deepseek_v4.cache_formats import CACHE_FORMATS
from models.deepseek_v4.model import DeepseekV4
from models.deepseek_v4.toy import WIDE_TOY


def stored(geometry):
    return geometry.window_format, geometry.row_format, geometry.index_format


def loaded(*arguments):
    runtime, _ = decode_models.load(decode.parse(["--token-ids", "1", *map(str, arguments)]))
    return runtime


def refused(monkeypatch, capsys, *arguments):
    """The one line that it prints."""
    code, _, error = call(verify.main, monkeypatch, capsys, *arguments)
    assert code == 2
    return error


def test_decode_stores_rows_as_it_is_told(oracles):
    runtime = loaded("--checkpoint", oracles / "tiny_c", "--cache-format", "release")
    names = [format.name for format in stored(runtime.geometry)]
    assert names == ["fp8_rope16", "fp8_rope16", "mxfp4"]
    assert loaded("--checkpoint", oracles / "tiny_c").geometry.row_format.name == "float32"


def test_decode_cuts_blocks_as_it_is_told(oracles):
    common = ("--checkpoint", oracles / "tiny_c", "--cache-format", "release_lanes")
    one, four = loaded(*common), loaded(*common, "--cells-per-block", 4)
    assert four.geometry.block_tokens == 4 * one.geometry.block_tokens
    assert {format.align for format in stored(four.geometry)} == {128}
    with pytest.raises(UserError, match="--cells-per-block 0: a block has at least one cell"):
        loaded(*common, "--cells-per-block", 0)
    with pytest.raises(UserError, match="no --cells-per-block"):
        loaded(*common[:2], "--scheme", "generic", "--cells-per-block", 4)


def test_decode_refuses_packed_rows_for_a_llama(oracles):
    with pytest.raises(UserError, match="release is for DeepSeek-V4: use float32 or bfloat16"):
        loaded("--checkpoint", oracles / "llama_tiny", "--cache-format", "release")
    kept = loaded("--checkpoint", oracles / "llama_tiny", "--cache-format", "bfloat16")
    assert kept.geometry.row_format.name == "bfloat16"


def test_decode_refuses_any_for_generic_rows(oracles):
    with pytest.raises(UserError, match="no --cache-format"):
        loaded("--checkpoint", oracles / "tiny_c", "--scheme", "generic", "--cache-format", "v4.1")


def test_verify_checks_one_model_in_the_formats_it_is_told(monkeypatch, capsys):
    asked = []

    def check(model, count, seed):
        asked.append((model, count))
        return []

    monkeypatch.setattr(verify_restore, "restore", check)
    status(verify.main, monkeypatch, "restore", "--cells", 7, "--cache-format", "v4.1")
    assert asked == [("deepseek_v4-v4.1", 7)]
    shapes = functools.partial(nnx.eval_shape, lambda: DeepseekV4(WIDE_TOY, nnx.Rngs(0)))
    monkeypatch.setattr(verify_restore, "toy_model", lambda config: shapes())
    chosen = CACHE_FORMATS["v4.1"]
    formats = stored(verify_restore.toy_runtime("deepseek_v4-v4.1").geometry)
    assert formats == (chosen.window, chosen.rows, chosen.index)


def test_verify_refuses_a_format_for_a_llama_and_one_that_nobody_knows(monkeypatch, capsys):
    common = ("restore", "--cache-format")
    error = refused(monkeypatch, capsys, *common, "release", "--model", "llama")
    assert error == "error: --cache-format is for deepseek_v4: leave out --model llama\n"
    assert "invalid choice: 'int8'" in refused(monkeypatch, capsys, *common, "int8")
