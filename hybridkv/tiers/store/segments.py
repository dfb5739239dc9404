"""Segments and snapshots as Orbax checkpoints: written by Orbax, read by TensorStore.

    uint32 [blocks, block_words]  --save-->  segments/<id>/    {"blocks": ...}    ocp.load reads it
    uint32 [snapshot_words]       --save-->  snapshots/<id>/   {"snapshot": ...}
                                  <--start_read--

An array is one uncompressed chunk. Where a manifest says which file has the chunk's bytes as they
are, ``store_rows`` reads them without TensorStore, which copies more. Any thread may read; one
thread writes.
"""

import contextlib
import logging
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from jaxtyping import UInt32

from hybridkv.tiers.store.manifest import SEGMENTS, SNAPSHOTS

LEAF: Mapping[str, str] = {SEGMENTS: "blocks", SNAPSHOTS: "snapshot"}
"""Name of the array in a checkpoint of each group of folders."""

_EXPECTED = (
    "Skipping merge of OCDBT checkpoints",
    "TensorStore data files not found",
    "_SignalingThread.run() raised an exception",  # which comes out of save() too
)


def save(path: pathlib.Path, leaf: str, array: UInt32[np.ndarray, "..."]) -> None:
    """Writes one array as an Orbax checkpoint; raises whatever Orbax raises."""
    from orbax.checkpoint import v1 as ocp

    context = ocp.Context()
    context.array.saving.use_ocdbt = False
    context.array.saving.use_zarr3 = True
    context.array.saving.use_compression = False
    with _without_expected_warnings(path), context:
        ocp.save(path, {leaf: array})


def start_read(path: pathlib.Path, leaf: str, shape: tuple[int, ...]) -> Any:
    """A TensorStore future of the array, which is on its way.

    Raises:
      ValueError: the array is not uint32 of this shape, or in chunks that are larger than it is;
        or whatever TensorStore raises.
    """
    import tensorstore as ts

    spec = {
        "driver": "zarr3",
        "kvstore": {"driver": "file", "path": f"{path}/state/{leaf}/"},
        "fill_missing_data_reads": False,
    }
    array = ts.open(spec, open=True, read=True).result()
    if array.dtype != ts.uint32 or tuple(array.shape) != shape:
        raise ValueError(f"it has {array.dtype.name} {list(array.shape)}, not uint32 {list(shape)}")
    # What a read allocates is decided by the chunks.
    for chunk in (array.chunk_layout.read_chunk.shape, array.chunk_layout.write_chunk.shape):
        if chunk is None or any(not c or c > s for c, s in zip(chunk, shape, strict=True)):
            raise ValueError(f"its chunks are {chunk}, larger than its shape {list(shape)}")
    return array.read()


@contextlib.contextmanager
def _without_expected_warnings(path: pathlib.Path) -> Iterator[None]:
    """Drops the two warnings that Orbax gives for a checkpoint of this form, at this path only."""

    def wanted(record: logging.LogRecord) -> bool:
        message = record.getMessage()
        return path.name not in message or not any(text in message for text in _EXPECTED)

    logger = logging.getLogger("absl")
    logger.addFilter(wanted)
    try:
        yield
    finally:
        logger.removeFilter(wanted)
