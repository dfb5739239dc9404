"""The tokenizer out of a GGUF file's metadata, rebuilt for the ``tokenizers`` package.

Source: llama.cpp's ``gpt2`` vocabularies: byte-level BPE with merges in order of rank.
"""

from typing import Any

from models.files import ConfigError
from models.gguf import GGUFFile
from models.text import ChatTemplate, TokenizerText, import_tokenizers

MODEL, PRE_TOKENIZER = "gpt2", "smollm"
CONTROL, USER_DEFINED = 3, 4
"""llama.cpp's types of tokens that are found before the text is split."""
STOPS = ("eos", "eot", "eom")
"""Ends of a text, of a turn and of a message."""
OFF = ("add_bos_token", "add_eos_token", "add_space_prefix")
"""What would be added to every text; no implemented vocabulary does."""


def read_text(file: GGUFFile) -> TokenizerText:
    """The file's tokenizer, with its chat template and stop tokens.

    Raises:
      UserError: the ``tokenizers`` package is missing.
      ConfigError: the vocabulary is of another kind, or lacks a part.
    """
    _check(file)
    tokens: list[str] = file.value("tokenizer.ggml.tokens", list)
    template = file.value("tokenizer.chat_template", str, None)
    ids = {
        name: file.value(f"tokenizer.ggml.{name}_token_id", int, None) for name in ("bos", *STOPS)
    }
    strange = [name for name, at in ids.items() if at is not None and not 0 <= at < len(tokens)]
    if strange:
        raise ConfigError(
            f"tokenizer.ggml.{strange[0]}_token_id is {ids[strange[0]]}: there are {len(tokens)} "
            "tokens"
        )
    bos, eos = ("" if ids[name] is None else tokens[ids[name]] for name in ("bos", "eos"))
    return TokenizerText(
        _tokenizer(file, tokens),
        chat=None if template is None else ChatTemplate(template, bos=bos, eos=eos),
        stop_tokens=frozenset(ids[name] for name in STOPS if ids[name] is not None),
        exact=True,
    )


def _check(file: GGUFFile) -> None:
    for name, only in (("model", MODEL), ("pre", PRE_TOKENIZER)):
        value = file.value(f"tokenizer.ggml.{name}", str)
        if value != only:
            raise ConfigError(f"tokenizer.ggml.{name} is {value!r}: only {only!r} is implemented")
    for name in OFF:
        if file.value(f"tokenizer.ggml.{name}", bool, False):
            raise ConfigError(f"tokenizer.ggml.{name} is true: only false is implemented")


def _tokenizer(file: GGUFFile, tokens: list[str]) -> Any:
    tokenizers = import_tokenizers(file.path)
    types: list[int] = file.value("tokenizer.ggml.token_type", list)
    merges = [tuple(merge.split(" ")) for merge in file.value("tokenizer.ggml.merges", list)]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    if len(types) != len(tokens) or len(vocabulary) != len(tokens):
        raise ConfigError(
            f"{file.path} has {len(tokens)} tokens, {len(vocabulary)} of them different, and "
            f"{len(types)} token types: convert the model to GGUF again"
        )
    for merge in merges:
        if len(merge) != 2 or any(part not in vocabulary for part in (*merge, "".join(merge))):
            raise ConfigError(f"merge {' '.join(merge)!r} is not of two tokens to a third")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=merges))
    # Digits stand alone; then the words of GPT-2.
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(
        [
            tokenizers.pre_tokenizers.Digits(individual_digits=True),
            tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    for kind, add in (
        (CONTROL, tokenizer.add_special_tokens),
        (USER_DEFINED, tokenizer.add_tokens),
    ):
        special = kind == CONTROL
        add(
            [
                tokenizers.AddedToken(token, normalized=False, special=special)
                for token, type_ in zip(tokens, types, strict=True)
                if type_ == kind
            ]
        )
    return tokenizer
