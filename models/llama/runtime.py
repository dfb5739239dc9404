"""Llama as the engine takes it."""

from hybridkv import formats
from hybridkv.formats import RowFormat
from models.llama import steps
from models.llama.model import Llama
from models.runtime import ModuleRuntime


class LlamaRuntime(ModuleRuntime):
    """A Llama over a cache of one row a token and layer."""

    def __init__(
        self, model: Llama, *, format: RowFormat | None = None, cells_per_block: int = 16
    ) -> None:
        format = format or formats.plain(model.config.dtype)
        geometry = model.config.geometry(row_format=format, cells_per_block=cells_per_block)
        super().__init__(model, geometry, tile=steps.tile_step, decode=steps.decode_step)
