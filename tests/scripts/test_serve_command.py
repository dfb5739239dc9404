"""What the server does without a client: options, keys, and how tokens are named."""

import sys
import threading
import types

import pytest
from commands import call
from geometries import toy_geometry
from places import REPOSITORY

sys.path.insert(0, str(REPOSITORY / "scripts"))

import serve
from serving_prompts import PLAIN_STOP, plain_chat
from serving_replies import TokenNames
from serving_tenants import Keys, digest

from hybridkv.errors import UserError
from models.text import ByteText, TokenizerText


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--slots", 0], "--slots must be at least 1"),
        (["--max-waiting", -1], "--max-waiting must be at least 0"),
        (["--default-max-tokens", 0], "--default-max-tokens must be at least 1"),
        (["--port", 70000], "--port must be at most 65535"),
        (["--logprobs", 21], "--logprobs must be at most 20"),
        (["--request-timeout", 0], "--request-timeout must be above 0"),
        (["--grace", "inf"], "--grace must be a number of seconds"),
        (["--grace", "nan"], "--grace must be a number of seconds"),
        (["--tile", -16], "--tile must be at least 1"),
        (["--tile", 0], "--tile must be at least 1"),
        (["--host", "0.0.0.0"], "give --api-keys FILE"),
        (["--host", "::"], "give --api-keys FILE"),
        (["--api-keys", "/nowhere/keys"], "cannot read the API keys"),
        (["--api-keys", "/dev/null"], "holds no API key"),
        (["--chat"], "no chat template"),
        (["--host", "192.0.2.1", "--allow-anyone"], "cannot listen on 192.0.2.1"),
        (["--host", "a" * 70 + ".b", "--allow-anyone"], "that is no name of a machine"),
        (["--checkpoint", "/nowhere"], "/nowhere"),
        (["--tile", 100, "--port", 0], "tile is 100 tokens: use a multiple of"),
    ],
)
def test_a_server_that_cannot_be_as_asked_says_so_in_one_line(
    monkeypatch, capsys, arguments, words
):
    code, out, err = call(serve.main, monkeypatch, capsys, *arguments)
    assert (code, out) == (2, "")
    assert words in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (UserError("another process has the store open"), 2, "error: another process has"),
        (ZeroDivisionError("planted"), 1, ""),
    ],
)
def test_a_server_whose_engine_cannot_be_made_ends(monkeypatch, capsys, caplog, error, code, words):
    def fail(*_):
        raise error

    make_server, guards = serve.make_server, []

    def guarded(*given, **more):
        """A server that stays up fails this test, not the whole run."""
        server = make_server(*given, **more)
        guards.append(threading.Timer(60, lambda: setattr(server, "should_exit", True)))
        guards[0].start()
        return server

    monkeypatch.setattr(serve, "make", fail)
    monkeypatch.setattr(serve, "make_server", guarded)
    ended, _, err = call(serve.main, monkeypatch, capsys, "--port", 0)
    assert guards[0].is_alive()
    guards[0].cancel()
    assert ended == code
    listening, *told = err.splitlines()
    assert "ready when /health says so" in listening
    assert "".join(told).startswith(words)
    assert len(told) == bool(words)
    assert ("ZeroDivisionError" in caplog.text) == (code == 1)


def test_a_server_is_named_after_its_checkpoint_and_uses_a_template_where_there_is_one(tmp_path):
    def served(*arguments, chats=True):
        text = ByteText()
        text.chats = chats
        return serve.served(serve.parse([*map(str, arguments)]), None, text)

    assert served().name == "shakespeare"
    assert served("--checkpoint", tmp_path / "mine").name == "mine"
    assert served("--served-name", "x").name == "x"
    assert served().template
    assert not served("--no-chat").template
    assert not served(chats=False).template


def test_every_key_is_a_namespace_of_its_own_that_does_not_tell_the_key():
    keys = Keys()
    names = [keys.namespace(x) for x in (None, "Bearer a", "bearer  a ", "Bearer b", "Bearer A")]
    assert names[0] == ""
    assert names[1] == names[2]
    assert len(set(names)) == 4
    assert names[1] == f"key:{digest('a')}"
    assert len(digest("a")) == 64


def test_a_file_of_keys_that_is_not_text_is_refused(tmp_path):
    (tmp_path / "keys").write_bytes(b"\xff\xfe")
    with pytest.raises(UserError, match="cannot read"):
        Keys.read(tmp_path / "keys")


def test_a_plain_conversation_begins_with_the_one_before_and_its_reply():
    turns = [{"role": "user", "content": "Who?"}]
    first = plain_chat(turns)
    reply = "Me.\nI am."
    turns += [{"role": "assistant", "content": reply}, {"role": "user", "content": "Why?"}]
    assert plain_chat(turns).startswith(first + reply + PLAIN_STOP)


def test_tokens_are_named_by_their_text_or_where_they_have_none_by_number():
    names = TokenNames(ByteText())
    assert names.of(65) == ("A", [65])
    assert names.of(0xC3) == ("bytes:\\xc3", [0xC3])

    class Tokenizer:
        def decode(self, ids, skip_special_tokens=True):
            return "".join(["\N{REPLACEMENT CHARACTER}", " \xe9"][i] for i in ids)

        def get_added_tokens_decoder(self):
            return {}

    names = TokenNames(TokenizerText(Tokenizer()))
    assert names.of(0) == ("token_id:0", None)
    assert names.of(1) == (" \xe9", [0x20, 0xC3, 0xA9])


def test_the_engine_has_the_sizes_of_the_command_line(monkeypatch, tmp_path):
    made = []
    monkeypatch.setattr(serve, "Engine", lambda *given, **more: made.append((given, more)))
    arguments = "--slots 3 --context 100 --tile 32 --snapshots 5 --logprobs 2 --digests"
    arguments += f" --scheme off --publish never --store {tmp_path} --host-tokens 64"
    runtime, text = types.SimpleNamespace(geometry=toy_geometry()), ByteText()
    serve.make_engine(serve.parse(arguments.split()), runtime, text)
    (((model, steps, sizes, options), more),) = made
    assert (model, more["text"], steps.tile) == (runtime, text, 32)
    capacity, block = sizes.capacity, runtime.geometry.block_tokens
    assert capacity.slots == 3
    assert capacity.blocks_per_sequence * block >= 100 + 32
    assert capacity.blocks == 4 * capacity.blocks_per_sequence
    assert (sizes.snapshots, sizes.reuse, sizes.tiers.path) == (5, False, tmp_path)
    assert (options.logprobs, options.digests, options.publish.value) == (2, True, "never")
