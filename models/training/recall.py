"""The recall task: facts scattered in a play, asked for later.

A fact is four bytes such as ``{K7}``: key letter, value digit. It always falls within one
overlapped row of ratio 4 (8 tokens). A query is the same four bytes further on, where the digit
can only be known from the fact: the model sees ``{K`` and must answer ``7``.
"""

import dataclasses
from typing import NamedTuple

import numpy as np

LETTERS = 26
DIGITS = 10
FACT_BYTES = 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class RecallTask:
    """How facts and queries are laid out in one sequence."""

    facts: int = 12
    """Facts a sequence at most, each with another key letter; 26 at most."""
    fewest: int | None = None
    """Facts a sequence at least, the number being drawn evenly; None for always ``facts``."""
    queries: int = 24
    """Queries a sequence, each for any of the facts told before it."""
    early: float = 0.5
    """Share of the sequence, from its start, in which facts stand."""
    near: float = 0.2
    """Share of the queries placed anywhere after their fact rather than after all facts."""


class RecallSequence(NamedTuple):
    """One sequence and where its answers are."""

    tokens: np.ndarray
    """uint8 ``[length]``."""
    answers: np.ndarray
    """int32 ``[queries]``: positions of the digits that can be known, ascending."""
    distances: np.ndarray
    """int32 ``[queries]``: tokens back to the last same digit told for the same key."""
    random: np.ndarray
    """int32 ``[...]``: positions of key letters and first-told digits, which nobody can predict."""


def plant(
    text: np.ndarray, length: int, task: RecallTask, generator: np.random.Generator
) -> RecallSequence:
    """Plants facts and queries after blanks of ``text`` (uint8, ``length`` bytes or more).

    Raises:
      ValueError: the text is too short or has too few blanks.
    """
    facts = task.facts
    if task.fewest is not None:
        facts = int(generator.integers(task.fewest, task.facts + 1))
    pieces = facts + task.queries
    body = text[: length - pieces * FACT_BYTES]
    blanks = np.flatnonzero((body == ord(" ")) | (body == ord("\n"))) + 1
    early = blanks[blanks < len(body) * task.early]
    if len(text) < length or len(early) < facts:
        raise ValueError(f"{len(text)} bytes with {len(blanks)} blanks hold no {pieces} pieces")
    told = np.sort(generator.choice(early, facts, replace=False))
    keys = generator.permutation(LETTERS)[:facts]
    values = generator.integers(0, DIGITS, facts)
    asked = generator.integers(0, facts, task.queries)
    after = np.where(generator.random(task.queries) < task.near, told[asked] + 1, told[-1] + 1)
    # Between `after` and the end; two pieces at one blank stand side by side, facts first.
    at = (
        blanks[[generator.integers(np.searchsorted(blanks, a), len(blanks)) for a in after]]
        if task.queries
        else np.zeros(0, np.int64)
    )
    place = np.concatenate([told, at])
    which = np.concatenate([np.arange(facts), asked]).astype(np.int64)
    order = np.argsort(place, kind="stable")
    return _write(body, place[order], keys[which[order]], values[which[order]])


def _write(
    body: np.ndarray, place: np.ndarray, keys: np.ndarray, values: np.ndarray
) -> RecallSequence:
    """Inserts the pieces, in ascending order of ``place``, and notes where they came to stand."""
    starts = place + FACT_BYTES * np.arange(len(place))
    pieces = np.empty((len(place), FACT_BYTES), np.uint8)
    pieces[:, 0], pieces[:, 3] = ord("{"), ord("}")
    pieces[:, 1], pieces[:, 2] = ord("A") + keys, ord("0") + values
    tokens = np.insert(body, np.repeat(place, FACT_BYTES), pieces.reshape(-1))
    answers, distances, random = [], [], list(starts + 1)
    last: dict[int, int] = {}
    for start, key in zip(starts.tolist(), keys.tolist(), strict=True):
        digit = start + 2
        if key in last:
            answers.append(digit)
            distances.append(digit - last[key])
        else:
            random.append(digit)
        last[key] = digit
    return RecallSequence(
        tokens,
        np.asarray(answers, np.int32),
        np.asarray(distances, np.int32),
        np.asarray(random, np.int32),
    )
