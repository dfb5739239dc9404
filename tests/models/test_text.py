import json

import numpy as np
import pytest
import tokenizers

from hybridkv.errors import UserError
from models.text import BYTES, ByteText, ChatTemplate, TokenizerText, load_text

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


CHAT = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</s>{% endfor %}<assistant>"
END, START = BYTES, BYTES + 1


def tokenizer():
    """A token is a byte of UTF-8, as where a vocabulary falls back to bytes; two are special."""
    vocabulary = {f"<0x{byte:02X}>": byte for byte in range(BYTES)}
    model = tokenizers.models.BPE(vocab=vocabulary, merges=[], byte_fallback=True)
    made = tokenizers.Tokenizer(model)
    made.decoder = tokenizers.decoders.Sequence(
        [tokenizers.decoders.ByteFallback(), tokenizers.decoders.Fuse()]
    )
    made.add_special_tokens(["</s>", "<s>"])
    return made


class Counted:
    """A tokenizer that counts the ids it decodes."""

    def __init__(self, inner):
        self.inner, self.ids = inner, 0

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def decode(self, ids, **options):
        self.ids += len(ids)
        return self.inner.decode(ids, **options)


@pytest.fixture
def folder(tmp_path):
    tokenizer().save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def write(folder, name, **fields):
    (folder / name).write_text(json.dumps(fields))


@pytest.mark.parametrize("text", TEXTS)
def test_a_tokenizer_file_is_used_where_there_is_one(folder, text):
    reader = load_text(folder, BYTES)
    assert isinstance(reader, TokenizerText)
    tokens = reader.encode(text)
    assert tokens.dtype == np.int32
    assert tokens.tolist() == list(text.encode())
    parts = [reader.feed(int(token)) for token in tokens]
    assert "".join(parts) == text
    assert not any("\N{REPLACEMENT CHARACTER}" in part for part in parts)
    assert reader.finish() == ""


def test_a_tokens_text_costs_the_same_however_long_the_text(folder):
    """Text is decoded from where the last characters began, not from its start."""
    counted = Counted(tokenizer())
    reader = TokenizerText(counted)
    costs = []
    for token in ("a€" * 200).encode():
        before = counted.ids
        reader.feed(token)
        costs.append(counted.ids - before)
    assert max(costs) <= 12


def test_a_part_of_a_character_is_given_at_the_end_and_not_to_the_next_text():
    for reader in (ByteText(), TokenizerText(tokenizer())):
        assert [reader.feed(byte) for byte in "a€".encode()[:2]] == ["a", ""]
        assert reader.finish() == "\N{REPLACEMENT CHARACTER}"
        assert reader.finish() == ""
        assert [reader.feed(byte) for byte in "€".encode()] == ["", "", "€"]


def test_a_special_token_has_no_text_even_inside_a_character():
    reader = TokenizerText(tokenizer())
    first, *others = "é".encode()
    assert [reader.feed(token) for token in (START, first, END, *others)] == ["", "", "", "é"]
    assert reader.encode("a</s>").tolist() == [ord("a"), END]


def test_bytes_have_no_chat():
    assert ByteText().stop_tokens == frozenset()
    with pytest.raises(UserError, match="bytes has no chat template"):
        ByteText().encode_chat([{"role": "user", "content": "x"}])


HELLO = [{"role": "user", "content": "hi"}]


def spelled(folder):
    return bytes(i for i in load_text(folder, 0).encode_chat(HELLO).tolist() if i < BYTES)


def test_a_folder_brings_its_chat_template(folder):
    with pytest.raises(UserError, match="no chat template"):
        load_text(folder, 0).encode_chat(HELLO)
    write(folder, "tokenizer_config.json", chat_template=CHAT)
    ids = load_text(folder, 0).encode_chat(HELLO)
    assert ids.tolist() == [*b"<user>hi", END, *b"<assistant>"]
    named = [{"name": "tool", "template": "t"}, {"name": "default", "template": "d"}]
    write(folder, "tokenizer_config.json", chat_template=named)
    assert spelled(folder) == b"d"
    tokens = {"bos_token": {"content": "<s>"}, "eos_token": "</s>"}
    write(
        folder, "tokenizer_config.json", chat_template="{{ bos_token }}x{{ eos_token }}", **tokens
    )
    assert load_text(folder, 0).encode_chat(HELLO).tolist() == [START, ord("x"), END]
    (folder / "chat_template.jinja").write_text("a file of its own")
    assert spelled(folder) == b"a file of its own"


def test_a_folder_says_which_tokens_stop(folder):
    assert load_text(folder, 0).stop_tokens == frozenset()
    write(folder, "config.json", eos_token_id=3)
    assert load_text(folder, 0).stop_tokens == {3}
    write(folder, "generation_config.json", eos_token_id=[4, 5])
    assert load_text(folder, 0).stop_tokens == {4, 5}


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{% for %}", "the chat template fails: "),
        ("{{ messages[0].content + 1 }}", "the chat template fails: "),
        ("{{ messages[5].content.x }}", "the chat template fails: "),
        ("{{ ''.__class__.__mro__ }}", "the chat template fails: .*unsafe"),
        ("{{ messages.append(1) }}", "the chat template fails: .*unsafe"),
        ("{{ raise_exception('no tools') }}", "refuses these messages: no tools"),
    ],
)
def test_a_template_that_fails_or_reaches_out_is_refused_in_one_line(template, message):
    with pytest.raises(UserError, match=message) as caught:
        ChatTemplate(template).render(HELLO)
    assert "\n" not in str(caught.value)


def test_template_blocks_leave_no_lines_behind():
    source = "{% for m in messages %}\n  {% if true %}\n{{ m.content }}\n{% endif %}\n{% endfor %}"
    assert ChatTemplate(source).render(HELLO) == "hi\n"


def test_a_template_without_its_package_names_the_package(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "jinja2", None)
    with pytest.raises(UserError, match="needs the jinja2 package: pip install jinja2"):
        ChatTemplate("x").render(HELLO)
