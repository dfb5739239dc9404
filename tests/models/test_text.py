import json

import numpy as np
import pytest

from hybridkv.errors import UserError
from models.text import BYTES, ByteText, load_text

TEXTS = ["plain", "", "größer", "日本語", "🙂 é\n"]


@pytest.mark.parametrize("text", TEXTS)
def test_bytes_are_tokens_and_come_back_as_text(text):
    tokens = ByteText().encode(text)
    assert tokens.dtype == np.int32
    assert bytes(tokens.tolist()) == text.encode()
    reader = ByteText()
    assert "".join(reader.feed(int(token)) for token in tokens) == text


def test_a_character_appears_with_its_last_byte():
    reader = ByteText()
    assert [reader.feed(byte) for byte in "a€b".encode()] == ["a", "", "", "€", "b"]


def test_bytes_that_are_no_text_become_a_replacement_character():
    reader = ByteText()
    assert reader.feed(0xFF) == "\N{REPLACEMENT CHARACTER}"
    assert reader.feed(ord("a")) == "a"


def test_readers_do_not_share_unfinished_characters():
    one, other = ByteText(), ByteText()
    assert one.feed(0xE2) == ""
    assert other.feed(ord("x")) == "x"


def test_a_byte_vocabulary_needs_no_file(tmp_path):
    assert isinstance(load_text(tmp_path, BYTES), ByteText)


@pytest.mark.parametrize("vocab", [255, 257, 512])
def test_another_vocabulary_without_a_tokenizer_is_refused_in_one_line(tmp_path, vocab):
    with pytest.raises(UserError, match=rf"no tokenizer\.json.* {vocab} is not bytes") as error:
        load_text(tmp_path, vocab)
    assert "\n" not in str(error.value)


def test_a_tokenizer_file_without_the_package_names_the_package(tmp_path, monkeypatch):
    (tmp_path / "tokenizer.json").write_text(json.dumps({}))
    monkeypatch.setitem(__import__("sys").modules, "tokenizers", None)
    with pytest.raises(UserError, match="needs the tokenizers package: pip install tokenizers"):
        load_text(tmp_path, 512)


class FakeTokenizer:
    """Stands in for the optional package: a token is a byte, and 999 is special."""

    @classmethod
    def from_file(cls, path):
        assert path.endswith("tokenizer.json")
        return cls()

    def encode(self, text, add_special_tokens=True):
        ids = [999] * add_special_tokens + list(text.encode())
        return type("Encoding", (), {"ids": ids})()

    def decode(self, ids):
        return bytes(ids).decode(errors="replace")


@pytest.mark.parametrize("text", TEXTS)
def test_a_tokenizer_file_is_used_where_there_is_one(tmp_path, monkeypatch, text):
    (tmp_path / "tokenizer.json").write_text("{}")
    package = type("tokenizers", (), {"Tokenizer": FakeTokenizer})
    monkeypatch.setitem(__import__("sys").modules, "tokenizers", package)
    reader = load_text(tmp_path, BYTES)
    tokens = reader.encode(text)
    assert tokens.dtype == np.int32
    assert tokens.tolist() == list(text.encode())
    parts = [reader.feed(int(token)) for token in tokens]
    assert "".join(parts) == text
    assert not any("\N{REPLACEMENT CHARACTER}" in part for part in parts)
