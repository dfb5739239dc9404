r"""Who asks: the API key becomes a namespace, and nothing else does.

    Authorization: Bearer KEY --> "key:" + SHA-256(KEY) --> Request.namespace --> root of the chain
    no Authorization          --> ""                   --/

Prefixes of two tenants cannot be shared, by construction, not by a check that could be forgotten:

- No field of a request body reaches the namespace; ``Keys.namespace`` alone makes it, and requests
  are made in one place (``serving_prompts.requests``).
- The namespace is hashed into the root from which the hashes of all blocks of a prompt are chained
  (``hybridkv.prefixes.identity.Identity.root``). Equal tokens under two namespaces have different
  hashes, so that the directory, host memory and the store have no name under which one tenant's
  blocks could be found by another. The engine's other ways to share ask the namespace as well:
  samples are of one request, and who follows a prompt that is being computed is of its namespace.
- Two keys have one namespace only where SHA-256 has a collision; none has the empty one.

The key itself is not kept, logged or stored. What is stored holds digests, which somebody who reads
the store can test guesses against: use long random keys.
"""

import hashlib
import pathlib

from serving_errors import ApiError

from hybridkv.errors import UserError

_DOMAIN = b"hybridkv.serve.tenant.1\0"


def digest(key: str) -> str:
    """SHA-256 of a key, hexadecimal."""
    return hashlib.sha256(_DOMAIN + key.encode()).hexdigest()


class Keys:
    """The keys that may ask; without a list, whoever asks is a tenant of its own."""

    def __init__(self, allowed: frozenset[str] | None = None) -> None:
        """Keeps digests.

        Args:
          allowed: ``digest`` of each key; None lets everybody in.
        """
        self.allowed = allowed

    @classmethod
    def read(cls, path: pathlib.Path | None) -> "Keys":
        """Keys from a file: one a line, blank lines and those with ``#`` first do not count.

        Raises:
          UserError: it cannot be read, or holds no key.
        """
        if path is None:
            return cls()
        try:
            lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"cannot read the API keys in {path}: {error}") from error
        keys = frozenset(digest(line) for line in lines if line and not line.startswith("#"))
        if not keys:
            raise UserError(f"{path} holds no API key: write one a line, or leave --api-keys out")
        return cls(keys)

    def namespace(self, authorization: str | None) -> str:
        """The namespace of a request.

        Args:
          authorization: its header.

        Raises:
          ApiError: 401, the header is no bearer token, or the key is not one of the list.
        """
        if authorization is None:
            if self.allowed is not None:
                raise _refused("no API key: send it as 'Authorization: Bearer KEY'")
            return ""
        scheme, _, key = authorization.strip().partition(" ")
        key = key.strip()
        if scheme.lower() != "bearer" or not key:
            raise _refused("the Authorization header is not of the form 'Bearer KEY'")
        name = digest(key)
        if self.allowed is not None and name not in self.allowed:
            raise _refused("the API key is not known here")
        return f"key:{name}"


def _refused(message: str) -> ApiError:
    headers = {"www-authenticate": "Bearer"}
    return ApiError(401, message, code="invalid_api_key", headers=headers)
