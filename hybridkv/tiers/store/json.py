"""JSON files that carry a checksum over themselves.

    {"xxh3_128":"<32 hex digits over the body's bytes>","body":{...}}

The frame is compared byte by byte and the body by its checksum, so that no byte of a file can
change unnoticed. The checksum finds damage, not malice: what is read is still checked by field.
"""

import base64
import binascii
import json
import re
from typing import Any

import xxhash

_HEAD = b'{"xxh3_128":"'
_MIDDLE = b'","body":'
_END = b"}\n"
_BODY = len(_HEAD) + 32 + len(_MIDDLE)
_HEX = re.compile(r"[0-9a-f]*")


def encode(body: dict[str, Any]) -> bytes:
    """The file's bytes."""
    text = json.dumps(body, separators=(",", ":"), allow_nan=False).encode()
    return b"".join((_HEAD, xxhash.xxh3_128_hexdigest(text).encode(), _MIDDLE, text, _END))


def decode(data: bytes) -> dict[str, Any]:
    """The body.

    Raises:
      ValueError: the bytes are not what ``encode`` makes; the message is a short reason.
    """
    body = data[_BODY : -len(_END)]
    checksum = xxhash.xxh3_128_hexdigest(body).encode()
    if data != b"".join((_HEAD, checksum, _MIDDLE, body, _END)):
        raise ValueError("its checksum does not fit its bytes")
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        raise ValueError("it is not JSON") from None
    if not isinstance(value, dict):
        raise ValueError("it is not a JSON object")
    return value


def to_base64(data: bytes) -> str:
    """As text."""
    return base64.b64encode(data).decode()


def from_base64(text: Any, name: str) -> bytes:
    """The inverse; ``name`` is for the ValueError."""
    if not isinstance(text, str):
        raise ValueError(f"{name} is not base64")
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise ValueError(f"{name} is not base64") from None


def from_hex(text: Any, size: int, name: str) -> bytes:
    """``size`` bytes from lowercase hexadecimal digits; ``name`` is for the ValueError."""
    if not isinstance(text, str) or len(text) != 2 * size or not _HEX.fullmatch(text):
        raise ValueError(f"{name} is not {size} bytes in hexadecimal")
    return bytes.fromhex(text)


def whole(value: Any, name: str, least: int, most: int) -> int:
    """An integer in ``least..most``; ``name`` is for the ValueError."""
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise ValueError(f"{name} is not a whole number in {least}..{most}")
    return value
