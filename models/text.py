"""Text to token ids and back, and conversations to token ids."""

import codecs
import functools
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from hybridkv.errors import UserError
from models.files import read_config

BYTES = 256
UNFINISHED = "\N{REPLACEMENT CHARACTER}"
"""What tokenizers decode part of a character to."""
Message = Mapping[str, str]
"""``role`` (``system``, ``user`` or ``assistant``, as the template knows them) and ``content``."""


class Text(Protocol):
    """A tokenizer as the command lines use it. Reading is one text at a time."""

    @property
    def stop_tokens(self) -> frozenset[int]:
        """Ids that end a reply; they have no text."""
        ...

    @property
    def chats(self) -> bool:
        """Whether ``encode_chat`` has a template."""
        ...

    def encode(self, text: str) -> np.ndarray:
        """int32 ``[tokens]``."""
        ...

    def encode_chat(
        self, messages: Sequence[Message], *, after: np.ndarray | None = None
    ) -> np.ndarray:
        """int32 ``[tokens]`` of a conversation, up to where the next reply begins.

        Args:
          messages: the whole conversation.
          after: ids it begins with: the last prompt and the reply that followed, with or without
            its stop token. Where the template puts their very text first, the answer begins with
            these ids, so that what is stored under them is found; otherwise all text is encoded
            again, and the ids agree as far as they happen to.

        Raises:
          UserError: the model has no template, or the template does not take these messages.
        """
        ...

    def stream(self) -> "Text":
        """The same tokenizer with nothing fed: one for each text that is read at a time."""
        ...

    def feed(self, token: int) -> str:
        """The text that one more token completes; may be empty."""
        ...

    def finish(self) -> str:
        """Ends the text that was fed: what was held back, a part of a character, as it is."""
        ...


class ByteText:
    """UTF-8 bytes are the tokens; a character appears when its last byte does."""

    stop_tokens: frozenset[int] = frozenset()
    chats = False

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def encode(self, text: str) -> np.ndarray:
        """int32 ``[bytes]``."""
        return np.frombuffer(text.encode(), np.uint8).astype(np.int32)

    def encode_chat(
        self, messages: Sequence[Message], *, after: np.ndarray | None = None
    ) -> np.ndarray:
        """Refused: no byte stands for a turn."""
        raise UserError("a vocabulary of bytes has no chat template: give the prompt as text")

    def stream(self) -> "ByteText":
        """See ``Text.stream``."""
        return ByteText()

    def feed(self, token: int) -> str:
        """The characters that this byte completes."""
        return self._decoder.decode(bytes([token]))

    def finish(self) -> str:
        """A replacement character if the last one is incomplete."""
        held = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return held


class ChatTemplate:
    """A Jinja template from messages to one text, run in a sandbox.

    It sees what transformers and llama.cpp show it, but for the date, which would change prompts
    under their stored state.
    """

    def __init__(self, source: str, *, bos: str = "", eos: str = "") -> None:
        self._source, self._tokens = source, {"bos_token": bos, "eos_token": eos}

    @functools.cached_property
    def _template(self) -> Any:
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        def refuse(message: str) -> None:
            raise UserError(f"the chat template refuses these messages: {message}")

        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.globals["raise_exception"] = refuse
        return environment.from_string(self._source)

    def render(self, messages: Sequence[Message]) -> str:
        """The conversation's text, up to where the next reply begins.

        Raises:
          UserError: jinja2 is missing, the template is faulty, or it refuses the messages.
        """
        try:
            import jinja2
        except ImportError as error:
            raise UserError(
                "a chat template needs the jinja2 package: pip install jinja2"
            ) from error
        try:
            return self._template.render(
                messages=[dict(message) for message in messages],
                add_generation_prompt=True,
                **self._tokens,
            )
        except (jinja2.TemplateError, TypeError) as error:
            line = " ".join(str(error).split())
            raise UserError(f"the chat template fails: {line}") from error


class TokenizerText:
    """A tokenizer of the ``tokenizers`` package.

    Args:
      tokenizer: the package's object.
      chat: the model's template, if it has one.
      stop_tokens: ids that end a reply.
      exact: whether decoding must give back the very text that was encoded. A vocabulary that lacks
        some bytes drops them without a word; an exact one refuses such a text.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        chat: ChatTemplate | None = None,
        stop_tokens: frozenset[int] = frozenset(),
        exact: bool = False,
    ) -> None:
        self._tokenizer, self._chat = tokenizer, chat
        self.stop_tokens, self._exact = stop_tokens, exact
        self.chats = chat is not None
        self._shown: list[int] = []
        self._held: list[int] = []

    def encode(self, text: str) -> np.ndarray:
        """int32 ``[tokens]``. No special token is added; one that the text spells out is found.

        Raises:
          UserError: the tokenizer is exact and has no token for a character.
        """
        ids = self._tokenizer.encode(text, add_special_tokens=False).ids
        if self._exact and (again := self._spelled(ids)) != text:
            pairs = zip(text, again + UNFINISHED, strict=False)
            lost = next((ours for ours, theirs in pairs if ours != theirs), text[-1])
            raise UserError(f"the vocabulary has no token for {lost!r}: remove it from the text")
        return np.asarray(ids, np.int32)

    def encode_chat(
        self, messages: Sequence[Message], *, after: np.ndarray | None = None
    ) -> np.ndarray:
        """See ``Text.encode_chat``.

        Raises:
          UserError: there is no template, it does not take these messages, or a message holds the
            text of a special token, which would begin or end a turn that nobody took.
        """
        if self._chat is None:
            raise UserError("this tokenizer has no chat template: give the prompt as text")
        self._check_messages(messages)
        text = self._chat.render(messages)
        if after is not None:
            said = self._spelled(after.tolist())
            if text.startswith(said):
                rest = self.encode(text[len(said) :])
                return np.concatenate([after.astype(np.int32), rest])
        return self.encode(text)

    def stream(self) -> "TokenizerText":
        """See ``Text.stream``."""
        return TokenizerText(
            self._tokenizer, chat=self._chat, stop_tokens=self.stop_tokens, exact=self._exact
        )

    def feed(self, token: int) -> str:
        """The new text, held back while it ends inside a character. Special tokens have none.

        Decodes what was held back, after the tokens shown before it: a tokenizer may join a token
        with its neighbour, but with no more.
        """
        if token in self._special:
            return ""
        self._held.append(token)
        new = self._pending()
        if not new or new.endswith(UNFINISHED):
            return ""
        self._shown, self._held = self._held, []
        return new

    def finish(self) -> str:
        """What is held back; the next token begins another text."""
        new = self._pending()
        self._shown, self._held = [], []
        return new

    def _pending(self) -> str:
        shown = self._tokenizer.decode(self._shown)
        return self._tokenizer.decode(self._shown + self._held)[len(shown) :]

    def _spelled(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False)

    @functools.cached_property
    def _special(self) -> dict[int, str]:
        added = self._tokenizer.get_added_tokens_decoder()
        return {number: token.content for number, token in added.items() if token.special}

    def _check_messages(self, messages: Sequence[Message]) -> None:
        if not messages:
            raise UserError("the conversation is empty: give at least one message")
        for number, message in enumerate(messages, start=1):
            for part in ("role", "content"):
                value = message.get(part)
                if not isinstance(value, str):
                    raise UserError(f"message {number} has {part} {value!r}: give a string")
                for special in self._special.values():
                    if special in value:
                        raise UserError(
                            f"the {part} of message {number} holds the special token {special}: "
                            "remove it"
                        )


def import_tokenizers(path: pathlib.Path) -> Any:
    """The optional package, for the file at ``path``.

    Raises:
      UserError: it is missing.
    """
    try:
        import tokenizers
    except ImportError as error:
        raise UserError(f"{path} needs the tokenizers package: pip install tokenizers") from error
    return tokenizers


def load_text(folder: pathlib.Path, vocab_size: int) -> Text:
    """The tokenizer of a checkpoint folder.

    Raises:
      UserError: the vocabulary is not bytes and the folder has no ``tokenizer.json``.
    """
    file = folder / "tokenizer.json"
    if file.is_file():
        tokenizer = import_tokenizers(file).Tokenizer.from_file(str(file))
        return TokenizerText(
            tokenizer, chat=_folder_chat(folder), stop_tokens=_folder_stops(folder)
        )
    if vocab_size == BYTES:
        return ByteText()
    raise UserError(
        f"{folder} has no tokenizer.json and its vocabulary of {vocab_size} is not bytes: "
        "add the file, or pass --token-ids"
    )


def _fields(file: pathlib.Path) -> Mapping[str, Any]:
    return read_config(file) if file.is_file() else {}


def _folder_chat(folder: pathlib.Path) -> ChatTemplate | None:
    """The template: a file of its own, as transformers saves it today, or in the tokenizer's."""
    fields = _fields(folder / "tokenizer_config.json")
    file = folder / "chat_template.jinja"
    source = file.read_text() if file.is_file() else fields.get("chat_template")
    if isinstance(source, list):  # several, by name
        source = {named["name"]: named["template"] for named in source}.get("default")
    if source is None:
        return None
    tokens = [fields.get(name) or "" for name in ("bos_token", "eos_token")]
    bos, eos = (token if isinstance(token, str) else token["content"] for token in tokens)
    return ChatTemplate(source, bos=bos, eos=eos)


def _folder_stops(folder: pathlib.Path) -> frozenset[int]:
    """Ids that end a reply: those of the generation config before the model's."""
    for name in ("generation_config.json", "config.json"):
        stop = _fields(folder / name).get("eos_token_id")
        if stop is not None:
            return frozenset(stop if isinstance(stop, list) else [stop])
    return frozenset()
