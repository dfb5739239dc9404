"""Everything that was ever computed, so that every lost token can be blamed.

    a namespace:   (root) --[7 7 2]--> (node) --[5 5]--> (leaf)
                                          +----[9 1 1 1]--> (leaf)

A radix tree whose edges are slices of the arrays that were added. The ideal hit of a prompt is its
longest prefix in the tree: it needs no block, tile or snapshot boundary, and nothing is ever
evicted from it. A token that was new when it was added costs 4 bytes while the ledger lives.
"""

from typing import Any

import numpy as np
from jaxtyping import UInt32

from hybridkv.prefixes.hashing import as_tokens, equal_tokens


class _Node:
    """``edge`` leads here; ``children`` are keyed by the first token of their own edges."""

    __slots__ = ("children", "edge")

    def __init__(self, edge: UInt32[np.ndarray, " n"]) -> None:
        self.edge = edge
        self.children: dict[int, _Node] = {}


class Ledger:
    """Per namespace, all token sequences that were ever added. Not thread-safe: one owner."""

    def __init__(self) -> None:
        self._roots: dict[str, _Node] = {}
        self._tokens = 0

    @property
    def tokens(self) -> int:
        """Tokens that are stored: common prefixes count once a namespace."""
        return self._tokens

    def add(self, namespace: str, tokens: Any) -> None:
        """Notes that ``tokens`` (one axis of integers) were computed, and so were their prefixes.

        The part that is new is copied. Add a sequence when it ends rather than token by token.

        Raises:
          UserError: see ``as_tokens``.
        """
        new = as_tokens(tokens)
        root = self._roots.setdefault(namespace, _Node(np.empty(0, np.uint32)))
        node, on_edge, shared = _walk(root, new)
        if shared == new.size:
            return
        if on_edge < node.edge.size:
            _split(node, on_edge)
        rest = new[shared:].copy()
        node.children[int(rest[0])] = _Node(rest)
        self._tokens += rest.size

    def longest(self, namespace: str, tokens: Any) -> int:
        """Tokens of the longest prefix that ``tokens`` shares with anything added before.

        Raises:
          UserError: see ``as_tokens``.
        """
        wanted = as_tokens(tokens)
        root = self._roots.get(namespace)
        return _walk(root, wanted)[2] if root is not None else 0


def _walk(root: _Node, tokens: UInt32[np.ndarray, " n"]) -> tuple[_Node, int, int]:
    """(last node whose edge agrees, tokens of that edge that do, tokens that agree in all)."""
    node, on_edge, shared = root, 0, 0
    while on_edge == node.edge.size and shared < tokens.size:
        child = node.children.get(int(tokens[shared]))
        if child is None:
            break
        node, on_edge = child, equal_tokens(child.edge, tokens[shared:])
        shared += on_edge
    return node, on_edge, shared


def _split(node: _Node, at: int) -> None:
    """Ends the node's edge after ``at`` tokens; the rest of it leads to a new node below."""
    lower = _Node(node.edge[at:])
    lower.children = node.children
    node.edge = node.edge[:at]
    node.children = {int(lower.edge[0]): lower}
