"""Makes a store smaller: whole extensions, leaves first, of those the oldest."""

import dataclasses
import time
from collections.abc import Callable

from hybridkv.tiers.store import Store
from hybridkv.tiers.store.records import StoreError


@dataclasses.dataclass(frozen=True)
class Pruned:
    """What went."""

    extensions: int
    bytes: int


def prune(
    store: Store,
    *,
    to_bytes: int | None = None,
    older_than_s: float | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Pruned:
    """Removes extensions and then compacts.

    An extension that a younger one goes on from stays as long as that one does.

    Args:
      store: a writer.
      to_bytes: removes until the store has at most so many bytes, or nothing is left.
      older_than_s: removes what was written more than so many seconds ago.
      progress: is told (extensions that were looked at, extensions in all).

    Raises:
      StoreError: neither or a negative limit; or as ``Store.remove``.
    """
    given = [x for x in (to_bytes, older_than_s) if x is not None]
    if not given or min(given) < 0:
        raise StoreError("give to_bytes or older_than_s, at least 0")
    before, gone = store.bytes_used, 0
    order = store.leaf_first()
    for number, extension in enumerate(order):
        old = older_than_s is not None and extension.written < time.time() - older_than_s
        large = to_bytes is not None and store.bytes_used > to_bytes
        if not old and not large:
            break  # of the leaves this is the oldest, so none is old
        store.remove(extension.blocks, extension.snapshot_ids)
        gone += 1
        if progress is not None:
            progress(number + 1, len(order))
    store.compact(beyond_capacity=True)  # the engine's may be another than the store was made with
    return Pruned(gone, before - store.bytes_used)
