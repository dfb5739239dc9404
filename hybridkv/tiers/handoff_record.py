"""One sequence on its way to another process: all its kinds, whole or refused.

    HandOff --to_bytes--> safetensors                                  --from_bytes--> HandOff
                          __metadata__  header (JSON), xxh3_128 of it
                          tokens        uint32 [tokens]
                          compressed, indexer   uint32 [blocks, words of the kind]
                          window, tail          uint32 [words of the kind]

The header says who the bytes belong to, how long everything is, and the xxh3_128 of each kind of
every block and of the state. Lengths are compared with it before anything is allocated, digests
before anything is used. Digests find damage, not malice: take bytes only from whom you trust to
decode for you. Immutable; any thread.
"""

import contextlib
import dataclasses
import json
import math
import os
import pathlib
import secrets
from collections.abc import Mapping
from typing import Any

import numpy as np
import xxhash
from jaxtyping import UInt8, UInt32

from hybridkv.arithmetic import cdiv
from hybridkv.errors import UserError
from hybridkv.kinds import Kind
from hybridkv.prefixes.hashing import DIGEST_BYTES
from hybridkv.prefixes.identity import Identity
from hybridkv.tiers.digests import CHECK_BYTES, digest, kind_digests, row_digests
from hybridkv.tiers.faults import NO_FAULTS, Faults, Point
from hybridkv.tiers.record_parts import (
    MOST_NUMBER,
    identity_json,
    identity_of,
    sizes_of,
    spans_of,
)
from hybridkv.tiers.store import json as store_json
from hybridkv.tiers.store.folder import one_line
from hybridkv.tiers.store.records import WORD_BYTES

FORMAT = "hybridkv.handoff"
FORMAT_VERSION = 1
_MOST_HEADER = 100_000_000
"""What safetensors allows: about 4 million blocks."""
_HEADER, _CHECK, _TOKENS = "header", "xxh3_128", "tokens"


class HandOffRefused(UserError):  # noqa: N818 - reads as what happened
    """A sequence that is not handed over; ``kind`` is the kind to blame, where one is."""

    def __init__(self, message: str, kind: Kind | None = None) -> None:
        super().__init__(message)
        self.kind = kind


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class HandOff:
    """A sequence without a place. Made by ``HandOff.of``; nothing about sampling is in it."""

    identity: Identity
    """Of the model and steps that made the bytes."""
    root: bytes
    """``identity.root(namespace)``, 32 bytes: the namespace itself stays with its owner."""
    decode: str
    """What decides the bits of a decode step beside the identity: its batch."""
    tokens: UInt32[np.ndarray, " tokens"]
    """The prompt, then what was chosen; the last of it may not be consumed yet."""
    prompt_tokens: int
    computed: int
    """Tokens that blocks and state stand for: the position."""
    exact: bool
    """Whether the bits are those of a cold run."""
    block_tokens: int
    block_spans: Mapping[Kind, slice]
    """Words of a block by kind."""
    state_spans: Mapping[Kind, slice]
    """Words of the state by kind."""
    blocks: UInt32[np.ndarray, "blocks words"]
    """In order; rows of the last one that stand for no whole cell are zero."""
    state: UInt32[np.ndarray, " words"]
    """By logical position, see ``hybridkv.state.logical``."""
    block_checks: Mapping[Kind, UInt8[np.ndarray, "blocks 16"]]
    state_checks: Mapping[Kind, bytes]

    @classmethod
    def of(cls, **parts: Any) -> "HandOff":
        """With the digests of its blocks and its state; takes all other fields."""
        state = parts["state"]
        return cls(
            **parts,
            block_checks=row_digests(list(parts["blocks"]), parts["block_spans"]),
            state_checks=kind_digests(state, parts["state_spans"]),
        )

    @property
    def prompt(self) -> UInt32[np.ndarray, " prompt"]:
        """The prompt's tokens."""
        return self.tokens[: self.prompt_tokens]

    @property
    def generated(self) -> UInt32[np.ndarray, " generated"]:
        """Tokens after the prompt that are consumed."""
        return self.tokens[self.prompt_tokens : max(self.computed, self.prompt_tokens)]

    @property
    def pending(self) -> UInt32[np.ndarray, " pending"]:
        """Tokens after the prompt that were chosen and are not consumed yet."""
        return self.tokens[max(self.computed, self.prompt_tokens) :]

    @property
    def nbytes(self) -> int:
        """Bytes of host memory."""
        return self.blocks.nbytes + self.state.nbytes + self.tokens.nbytes

    def require_whole(self) -> None:
        """Compares every length and every digest.

        Raises:
          HandOffRefused: one does not fit; it names the kind or part.
        """
        count = cdiv(self.computed, self.block_tokens)
        words = [sum(sizes_of(spans).values()) for spans in (self.block_spans, self.state_spans)]
        if not 0 < self.computed <= len(self.tokens) or self.prompt_tokens > len(self.tokens):
            raise HandOffRefused(f"{_refused()}: position or prompt are past its tokens")
        if self.blocks.shape != (count, words[0]) or self.state.shape != (words[1],):
            raise HandOffRefused(f"{_refused()}: blocks or state are not as long as its position")
        found = row_digests(list(self.blocks), self.block_spans)
        for kind in self.block_spans:
            wrong = (found[kind] != self.block_checks[kind]).any(axis=1)
            if wrong.any():
                _damaged(kind, f"of block {int(np.argmax(wrong))}")
        for kind, span in self.state_spans.items():
            if digest(self.state[span]) != self.state_checks[kind]:
                _damaged(kind, "of the state")

    # As bytes.

    def to_bytes(self) -> bytes:
        """The sequence as one safetensors file."""
        import safetensors.numpy

        header = json.dumps(self._header(), separators=(",", ":"))
        metadata = {_HEADER: header, _CHECK: xxhash.xxh3_128_hexdigest(header.encode())}
        tensors = {_TOKENS: np.ascontiguousarray(self.tokens, np.uint32)}
        for kind, span in self.block_spans.items():
            tensors[kind.value] = np.ascontiguousarray(self.blocks[:, span])
        for kind, span in self.state_spans.items():
            tensors[kind.value] = self.state[span]
        return safetensors.numpy.save(tensors, metadata)

    def write(self, path: str | os.PathLike[str], *, faults: Faults = NO_FAULTS) -> int:
        """Writes it as a file, at once or not at all; returns its bytes.

        Args:
          path: the file; what is there is replaced.
          faults: injection points, for tests.

        Raises:
          HandOffRefused: it can't be written there.
        """
        target, data = pathlib.Path(path), self.to_bytes()
        made = target.with_name(f"{target.name}.{secrets.token_hex(8)}.tmp")
        try:
            with open(made, "xb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            faults.reach(Point.HANDOFF_EXPORT, path=made)
            os.replace(made, target)
        except OSError as error:
            with contextlib.suppress(OSError):
                made.unlink(missing_ok=True)
            raise HandOffRefused(
                f"can't write the hand-off {target} ({one_line(error)}): mend that"
            ) from error
        return len(data)

    @classmethod
    def read(cls, path: str | os.PathLike[str], *, faults: Faults = NO_FAULTS) -> "HandOff":
        """What ``write`` wrote.

        Args:
          path: the file.
          faults: injection points, for tests.

        Raises:
          HandOffRefused: it is not there, not whole, or not a hand-off.
        """
        try:
            data = pathlib.Path(path).read_bytes()
            data = faults.reach(Point.HANDOFF_IMPORT, data, pathlib.Path(path))
        except OSError as error:
            raise HandOffRefused(
                f"can't read the hand-off {path} ({one_line(error)}): give the file of one"
            ) from error
        return cls.from_bytes(data)

    @classmethod
    def from_bytes(cls, data: bytes) -> "HandOff":
        """The inverse of ``to_bytes``.

        Raises:
          HandOffRefused: they are not whole, of another version, or not a hand-off; it names the
            kind or part.
        """
        import safetensors
        import safetensors.numpy

        try:
            outer = _outer(data)
            parts = _parts(outer.pop("__metadata__", None))
            _check_lengths(outer, parts, len(data))
            tensors = safetensors.numpy.load(data)
        except (*_MALFORMED, safetensors.SafetensorError) as why:
            if isinstance(why, HandOffRefused):
                raise
            raise HandOffRefused(f"{_refused()}: {one_line(why)}") from None
        count = cdiv(parts["computed"], parts["block_tokens"])
        handoff = cls(
            tokens=tensors[_TOKENS],
            blocks=_joined(tensors, parts["block_spans"], (count, 0)),
            state=_joined(tensors, parts["state_spans"], (0,)),
            **{name: value for name, value in parts.items() if name not in _ONLY_HEADER},
        )
        if digest(handoff.tokens) != parts["token_check"]:
            raise HandOffRefused(f"{_refused()}: its tokens do not have their digest")
        handoff.require_whole()
        return handoff

    def _header(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "version": FORMAT_VERSION,
            "identity": identity_json(self.identity),
            "root": self.root.hex(),
            "decode": self.decode,
            "tokens": len(self.tokens),
            "token_check": digest(np.ascontiguousarray(self.tokens)).hex(),
            "prompt_tokens": self.prompt_tokens,
            "computed": self.computed,
            "exact": self.exact,
            "block_tokens": self.block_tokens,
            "block_words": sizes_of(self.block_spans),
            "state_words": sizes_of(self.state_spans),
            "block_checks": {
                kind.value: store_json.to_base64(self.block_checks[kind].tobytes())
                for kind in self.block_spans
            },
            "state_checks": {
                kind.value: self.state_checks[kind].hex() for kind in self.state_spans
            },
        }


_MALFORMED = (ValueError, TypeError, KeyError, AttributeError, RecursionError)
_ONLY_HEADER = ("token_count", "token_check")


def _refused() -> str:
    return "the sequence was not taken over, ask its sender for it again"


def _damaged(kind: Kind, where: str) -> None:
    raise HandOffRefused(f"{_refused()}: {kind.name} {where} does not have its digest", kind)


def _outer(data: bytes) -> dict[str, Any]:
    """The safetensors header, as it stands."""
    size = int.from_bytes(data[:8], "little")
    if len(data) < 8 or size > min(len(data) - 8, _MOST_HEADER):
        raise ValueError("its bytes end before they should, or are no hand-off")
    outer = json.loads(data[8 : 8 + size])
    if not isinstance(outer, dict):
        raise ValueError("it is no hand-off")
    return outer | {"": 8 + size}


def _parts(metadata: Any) -> dict[str, Any]:
    """The fields that the header carries, each checked."""
    if not isinstance(metadata, dict) or set(metadata) != {_HEADER, _CHECK}:
        raise HandOffRefused(f"{_refused()}: it has no header", Kind.DISK_PREFIX)
    text = metadata[_HEADER]
    if not isinstance(text, str):
        raise HandOffRefused(f"{_refused()}: its header is no text", Kind.DISK_PREFIX)
    if xxhash.xxh3_128_hexdigest(text.encode("utf-8", "surrogatepass")) != metadata[_CHECK]:
        raise HandOffRefused(f"{_refused()}: its header does not have its digest", Kind.DISK_PREFIX)
    header = json.loads(text)
    if header["format"] != FORMAT or header["version"] != FORMAT_VERSION:
        raise ValueError(f"it is not {FORMAT} version {FORMAT_VERSION}")

    def number(name: str, least: int, most: int = MOST_NUMBER) -> int:
        return store_json.whole(header[name], name, least, most)

    tokens = number("tokens", 1)
    computed, block_tokens = number("computed", 1, tokens), number("block_tokens", 1)
    block_spans = spans_of(header["block_words"], "block_words")
    state_spans = spans_of(header["state_words"], "state_words")
    if not isinstance(header["exact"], bool) or not isinstance(header["decode"], str):
        raise ValueError("a field has another type")
    count = cdiv(computed, block_tokens)
    return {
        "identity": identity_of(header["identity"]),
        "root": store_json.from_hex(header["root"], DIGEST_BYTES, "root"),
        "decode": header["decode"],
        "token_count": tokens,
        "token_check": store_json.from_hex(header["token_check"], CHECK_BYTES, "token_check"),
        "prompt_tokens": number("prompt_tokens", 1, tokens),
        "computed": computed,
        "exact": header["exact"],
        "block_tokens": block_tokens,
        "block_spans": block_spans,
        "state_spans": state_spans,
        "block_checks": {
            kind: _rows(header["block_checks"][kind.value], count) for kind in block_spans
        },
        "state_checks": {
            kind: store_json.from_hex(header["state_checks"][kind.value], CHECK_BYTES, "a digest")
            for kind in state_spans
        },
    }


def _rows(text: Any, count: int) -> UInt8[np.ndarray, "n 16"]:
    data = store_json.from_base64(text, "digests")
    if len(data) != count * CHECK_BYTES:
        raise ValueError("there are more or fewer digests than blocks")
    return np.frombuffer(data, np.uint8).reshape(count, CHECK_BYTES)


def _check_lengths(outer: dict[str, Any], parts: dict[str, Any], length: int) -> None:
    """Whether the tensors are those of the header, before one of them is made."""
    start = outer.pop("")
    count = cdiv(parts["computed"], parts["block_tokens"])
    wanted = {_TOKENS: [parts["token_count"]]}
    for kind, span in parts["block_spans"].items():
        wanted[kind.value] = [count, span.stop - span.start]
    for kind, span in parts["state_spans"].items():
        wanted[kind.value] = [span.stop - span.start]
    total = 0
    for name, shape in wanted.items():
        kind = None if name == _TOKENS else Kind(name)
        what = name if kind is None else kind.name
        tensor = outer.pop(name, None)
        if tensor is None:
            raise HandOffRefused(f"{_refused()}: it has no {what}", kind)
        if tensor["dtype"] != "U32" or tensor["shape"] != shape:
            raise HandOffRefused(f"{_refused()}: its {what} is not uint32 {shape}", kind)
        total += WORD_BYTES * math.prod(shape)
    if outer or start + total != length:
        raise ValueError("it has more or fewer bytes than its header says")


def _joined(
    tensors: Mapping[str, np.ndarray], spans: Mapping[Kind, slice], empty: tuple[int, ...]
) -> np.ndarray:
    """The kinds side by side again; ``empty`` is the shape where the model has none."""
    parts = [tensors[kind.value] for kind in spans]
    return np.concatenate(parts, axis=-1) if parts else np.empty(empty, np.uint32)
