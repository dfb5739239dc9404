"""DeepSeek-V4 as the engine takes it."""

from hybridkv import formats
from hybridkv.formats import RowFormat
from models.deepseek_v4.decode import decode_step
from models.deepseek_v4.model import DeepseekV4
from models.deepseek_v4.tile import tile_step
from models.runtime import ModuleRuntime


class DeepseekV4Runtime(ModuleRuntime):
    """A DeepSeek-V4 over a cache whose rows are all of one format."""

    def __init__(self, model: DeepseekV4, *, format: RowFormat | None = None) -> None:
        format = format or formats.plain(model.config.dtype)
        geometry = model.config.geometry(
            window_format=format, row_format=format, index_format=format
        )
        super().__init__(model, geometry, tile=tile_step, decode=decode_step)
