"""Snapshot policies by the names that command lines give."""

import dataclasses
import re

from hybridkv.errors import UserError
from hybridkv.prefixes.policy import DENSE, POLICIES, SnapshotPolicy

NAMED = {"dense": DENSE, **POLICIES}
_PERIOD = re.compile(r"(\d+)(k?)")


def parse_policy(text: str) -> SnapshotPolicy:
    """A policy by name, or by its parts, as in ``ends+forks+8k``.

    Parts are ``ends``, ``forks``, ``thin``, and one period in tokens, where ``8k`` is 8,192.

    Raises:
      UserError: no such name or part.
    """
    if text in NAMED:
        return NAMED[text]
    policy = SnapshotPolicy(ends=False, forks=False)
    for part in text.split("+"):
        period = _PERIOD.fullmatch(part)
        if part in ("ends", "forks"):
            policy = dataclasses.replace(policy, **{part: True})
        elif part == "thin":
            policy = dataclasses.replace(policy, thin=1.0)
        elif period and int(period[1]):
            tokens = int(period[1]) * (1024 if period[2] else 1)
            policy = dataclasses.replace(policy, period=tokens)
        else:
            known = ", ".join(NAMED)
            raise UserError(
                f"no policy {text!r}: give one of {known}, or parts such as ends+forks+8k"
            )
    return policy
