"""Saving the prefix of a prompt as a checkpoint, and restoring it in another process.

    engine --SavedPrefix(engine, tokens)--> words on the host --Orbax--> folder
    folder --Orbax--> words, every digest compared --restore(engine)--> published, or nothing is

The copy to the host is made when a ``SavedPrefix`` is: the engine may go on at once, and writing it
needs no engine. It is a checkpointable of Orbax, so a prefix can be saved and loaded in one
checkpoint with the model. Copying and restoring belong to the thread of the engine, writing and
reading to any. Orbax is imported when it is needed.
"""

import asyncio
import os
import pathlib
from collections.abc import Awaitable, Callable, Coroutine, Generator
from typing import Any

import jax
import numpy as np

from hybridkv.blocks.entries import NONE, Form, Tier, kind_bits
from hybridkv.blocks.leases import Receipt
from hybridkv.blocks.pools import NeverFits, NoRoom
from hybridkv.blocks.transitions import TierState
from hybridkv.engine.engine import Engine
from hybridkv.engine.runner import Runner
from hybridkv.engine.steps import MOVED_BLOCKS, in_moves, to_device
from hybridkv.prefixes.hashing import TokenChain
from hybridkv.prefixes.needs import block_kinds, snapshot_kinds
from hybridkv.state.packing import block_spans, snapshot_spans, words_of
from hybridkv.tiers import record
from hybridkv.tiers.host import DamagedHostBytes
from hybridkv.tiers.record import PrefixRefused, PrefixWords
from hybridkv.tiers.record_parts import why_foreign
from hybridkv.tiers.store.folder import one_line
from hybridkv.tiers.store.records import Damaged

NAME = "prefix"
"""Of the checkpointable that ``save_prefix`` makes."""


class SavedPrefix:
    """The published blocks of a prompt with their snapshots, on the host.

    Pass it to ``orbax.checkpoint.v1.save_checkpointables`` beside a model; an empty one, made
    without arguments, to ``load_checkpointables``, and then call ``restore``. One process writes.
    """

    def __init__(
        self, source: Engine | Runner | None = None, tokens: Any = None, *, namespace: str = ""
    ) -> None:
        """Copies what is published of a prompt to the host; without ``source``, is empty.

        Args:
          source: the engine or runner that computed the prompt.
          tokens: integer ``[tokens]``, the prompt; whole blocks of it are kept.
          namespace: of the prompt.

        Raises:
          PrefixRefused: nothing of the prompt is published.
          UserError: the tokens are none that the model takes.
        """
        self.cut = ""
        """Why it has fewer tokens than whole blocks were asked for; empty when it does not."""
        self._words: PrefixWords | None = None
        if source is not None:
            runner = _runner(source)
            chain = runner.chain(np.asarray(tokens), namespace=namespace)
            self._words, self.cut = _copy(runner, chain)

    @property
    def words(self) -> PrefixWords:
        """The prefix itself.

        Raises:
          PrefixRefused: it is empty.
        """
        if self._words is None:
            raise PrefixRefused("this SavedPrefix is empty: load one from a checkpoint first")
        return self._words

    @property
    def tokens(self) -> np.ndarray:
        """uint32 ``[tokens]``: those whose blocks it has."""
        return self.words.tokens

    @property
    def positions(self) -> tuple[int, ...]:
        """Tokens before each of its snapshots."""
        return self.words.positions

    @property
    def nbytes(self) -> int:
        """Bytes of host memory."""
        return 0 if self._words is None else self._words.nbytes

    def restore(self, target: Engine | Runner, *, namespace: str = "") -> int:
        """Writes it to the device and publishes it; returns the tokens that are published.

        What the target has already stays as it is.

        Raises:
          PrefixRefused: it is empty, of another identity, namespace or layout, or there is no room
            for all of it. Nothing was published.
        """
        runner, words = _runner(target), self.words
        chain = _require_ours(runner, words, namespace)
        _publish(runner, chain, words)
        if runner.mover is not None:
            runner.mover.published(chain)
        if runner.ledger is not None:
            runner.ledger.add(namespace, words.tokens)
        return len(words.tokens)

    # As Orbax's StatefulCheckpointable.

    async def save(self, directory: Any) -> Awaitable[None]:
        """Orbax calls it; the bytes are on the host already."""
        words = self.words

        async def write() -> None:
            path = await directory.await_creation()
            await asyncio.to_thread(record.write, pathlib.Path(path), words)

        return _Later(write)

    async def load(self, directory: Any) -> Awaitable[None]:
        """Orbax calls it; every digest is compared."""

        async def read() -> None:
            self._words = await asyncio.to_thread(record.read, pathlib.Path(directory))
            self.cut = ""

        return _Later(read)


class _Later(Awaitable[None]):
    """Work that Orbax awaits, unless something else of the checkpoint fails first."""

    def __init__(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        self._work = work

    def __await__(self) -> Generator[Any, Any, None]:
        return self._work().__await__()


def save_prefix(
    path: str | os.PathLike[str],
    source: Engine | Runner,
    tokens: Any,
    *,
    namespace: str = "",
) -> SavedPrefix:
    """Stores what is published of a prompt, blocks and snapshots, as an Orbax checkpoint.

    Args:
      path: a folder that does not exist yet.
      source: the engine or runner that computed the prompt.
      tokens: integer ``[tokens]``, the prompt.
      namespace: of the prompt.

    Returns:
      What was stored, with the reason where that is less than all whole blocks of ``tokens``.

    Raises:
      PrefixRefused: nothing of the prompt is published, or the folder exists or can't be written.
      UserError: the tokens are none that the model takes.
    """
    from orbax.checkpoint import v1 as ocp

    saved, target = SavedPrefix(source, tokens, namespace=namespace), pathlib.Path(path).absolute()
    if target.exists():
        raise PrefixRefused(f"{target} exists already: give a folder that does not")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        ocp.save_checkpointables(target, {NAME: saved})
    except PrefixRefused:
        raise
    except Exception as error:  # whatever Orbax raises, nothing is at the path
        raise PrefixRefused(
            f"can't write the prefix to {target} ({one_line(error)}): mend that and save again"
        ) from error
    return saved


def load_prefix(
    path: str | os.PathLike[str],
    target: Engine | Runner,
    *,
    namespace: str = "",
    name: str = NAME,
) -> int:
    """Publishes a stored prefix; returns its tokens, which the next prompt finds.

    Args:
      path: folder of the checkpoint, of ``save_prefix`` or of a user's own.
      target: an engine or runner of the same model, steps and versions.
      namespace: that it was saved from.
      name: the checkpointable's name in the checkpoint.

    Raises:
      PrefixRefused: it is not there, damaged, of another identity, namespace or layout, or there is
        no room for all of it. Nothing was published.
    """
    saved = SavedPrefix()
    saved._words = record.read(pathlib.Path(path) / name)
    return saved.restore(target, namespace=namespace)


def _runner(of: Engine | Runner) -> Runner:
    return of.runner if isinstance(of, Engine) else of


# From the device.


def _copy(runner: Runner, chain: TokenChain) -> tuple[PrefixWords, str]:
    geometry, allocator = runner.model.geometry, runner.allocator
    entries, cut = _published(runner, chain)
    if not len(entries):
        raise PrefixRefused(f"nothing of these {chain.length} tokens can be saved: {cut}")
    snapshots = runner.directory.snapshot_at(entries)
    keep = (snapshots != NONE) & _usable(runner, np.maximum(snapshots, 0))
    receipt = allocator.lease(np.concatenate([entries, snapshots[keep]]))
    try:
        blocks = _read(runner, entries, Form.BLOCK)
        states = _read(runner, snapshots[keep], Form.SNAPSHOT)
    except (Damaged, DamagedHostBytes) as error:
        raise PrefixRefused(f"a part of the prefix can't be read: {error}") from error
    finally:
        allocator.release(receipt)
    block = geometry.block_tokens
    words = PrefixWords(
        identity=runner.identity,
        root=chain.root,
        block_tokens=block,
        block_spans=block_spans(geometry),
        snapshot_spans=snapshot_spans(geometry),
        tokens=chain.tokens[: len(entries) * block].copy(),
        blocks=blocks,
        positions=tuple(int(at + 1) * block for at in np.flatnonzero(keep)),
        snapshots=states,
    )
    return words, cut


def _published(runner: Runner, chain: TokenChain) -> tuple[np.ndarray, str]:
    """Entries of the leading blocks that can be copied, and why there are no more."""
    match = runner.directory.find(chain)
    usable = _usable(runner, match.entries)
    count = len(usable) if usable.all() else int(np.argmin(usable))
    at = count * chain.block_tokens
    if count < len(usable):
        return match.entries[:count], f"the block at {at} is not as prompts make it"
    if count < chain.blocks:
        return match.entries, f"the block at {at} is not published ({match.blame})"
    return match.entries, "" if count else f"they are less than a block of {chain.block_tokens}"


def _usable(runner: Runner, entries: np.ndarray) -> np.ndarray:
    """Which are whole, wherever that is, with the bits of a cold run: bool ``[n]``."""
    whole = (runner.allocator.entries.state[:, entries] == TierState.PRESENT).any(axis=0)
    return whole & runner.publisher.generated.exact_each(entries)


def _read(runner: Runner, entries: np.ndarray, form: Form) -> np.ndarray:
    """uint32 ``[n, words]``, from the device or from where else they are."""
    geometry = runner.model.geometry
    spans = block_spans(geometry) if form == Form.BLOCK else snapshot_spans(geometry)
    words = np.empty((len(entries), words_of(spans)), np.uint32)
    here = runner.allocator.entries.state[Tier.DEVICE, entries] == TierState.PRESENT
    read = _read_blocks if form == Form.BLOCK else _read_snapshots
    if here.any():
        words[here] = read(runner, entries[here])
    if not here.all():
        assert runner.mover is not None, "whole on a tier that is not there"
        words[~here] = runner.mover.read(entries[~here])
    return words


def _read_blocks(runner: Runner, entries: np.ndarray) -> np.ndarray:
    """uint32 ``[blocks, words]``."""
    places = runner.allocator.entries.place[Tier.DEVICE, entries]
    copies = [runner.steps.read_blocks(runner.cache, part) for part in in_moves(places)]
    return np.stack([words for copy in jax.device_get(copies) for words in copy][: len(entries)])


def _read_snapshots(runner: Runner, entries: np.ndarray) -> np.ndarray:
    """uint32 ``[snapshots, words]``."""
    places = runner.allocator.entries.place[Tier.DEVICE, entries]
    copies = [runner.steps.read_snapshot(runner.snapshots, int(place)) for place in places]
    return np.stack(jax.device_get(copies))


# To the device.


def _require_ours(runner: Runner, words: PrefixWords, namespace: str) -> TokenChain:
    """The prefix's chain, where it is one that this runner can read."""
    geometry = runner.model.geometry
    wrong = why_foreign(
        words,
        runner.identity,
        namespace,
        geometry.block_tokens,
        (
            (words.block_spans, block_spans(geometry)),
            (words.snapshot_spans, snapshot_spans(geometry)),
        ),
    )
    if wrong is not None:
        raise PrefixRefused(
            f"the prefix is {wrong[0]}: it can't be converted; pass the namespace it was saved "
            "from, or compute its tokens again"
        )
    if not runner.sizes.reuse:
        raise PrefixRefused("this runner publishes nothing: make it with reuse=True")
    return runner.chain(words.tokens, namespace=namespace)


def _publish(runner: Runner, chain: TokenChain, words: PrefixWords) -> None:
    """All that is not here yet: room first, then bytes, then blocks, then snapshots."""
    allocator, directory, block = runner.allocator, runner.directory, words.block_tokens
    match = directory.find(chain)
    known = len(match.entries)
    standing = directory.snapshot_at(match.entries)
    wanted = [
        (number, position)
        for number, position in enumerate(words.positions)
        if position > known * block or standing[position // block - 1] == NONE
    ]
    taken: list[Receipt] = [allocator.lease(match.entries, match.generations)]
    try:
        try:
            reservation = allocator.reserve(blocks=chain.blocks - known, snapshots=len(wanted))
        except (NoRoom, NeverFits) as error:
            raise PrefixRefused(
                f"there is no room for the prefix ({error}): finish sequences or make the pools "
                "larger"
            ) from None
        taken.append(allocator.take(reservation, Form.BLOCK, chain.blocks - known))
        taken.append(allocator.take(reservation, Form.SNAPSHOT, len(wanted)))
        allocator.cancel(reservation)
        blocks, snapshots = taken[1].entries, taken[2].entries
        _write(
            runner, blocks, words.blocks[known:], snapshots, [words.snapshots[n] for n, _ in wanted]
        )
        geometry = runner.model.geometry
        allocator.commit(blocks, kind_bits(block_kinds(geometry)))
        directory.publish(chain, known, blocks)
        if len(snapshots):
            allocator.commit(snapshots, kind_bits(snapshot_kinds(geometry)))
        shown = len(directory.find(chain).entries) * block
        for entry, (_, position) in zip(snapshots, wanted, strict=True):
            if position <= shown:  # less than all where digests collide
                directory.publish_snapshot(chain, position, int(entry))
    finally:
        for receipt in taken:
            allocator.release(receipt)


def _write(
    runner: Runner,
    blocks: np.ndarray,
    block_words: np.ndarray,
    snapshots: np.ndarray,
    snapshot_words: list[np.ndarray],
) -> None:
    """Bytes of new entries, in device order before anyone who could read them."""
    column = runner.allocator.entries.place[Tier.DEVICE]
    nothing = np.zeros(block_words.shape[1], np.uint32)
    for number, part in enumerate(in_moves(column[blocks])):
        rows = list(block_words[number * MOVED_BLOCKS : (number + 1) * MOVED_BLOCKS])
        rows += [nothing] * (MOVED_BLOCKS - len(rows))
        runner.cache = runner.steps.write_blocks(runner.cache, to_device(tuple(rows)), part)
    for entry, row in zip(snapshots, snapshot_words, strict=True):
        runner.snapshots = runner.steps.store_snapshot(
            runner.snapshots, to_device(row), int(column[entry])
        )
