"""DeepSeek-V4 as the engine takes it."""

from hybridkv import formats
from hybridkv.formats import RowFormat
from hybridkv.state.generic import generic_geometry
from models.deepseek_v4 import generic
from models.deepseek_v4.cache_formats import CacheFormats
from models.deepseek_v4.decode import decode_step
from models.deepseek_v4.model import DeepseekV4
from models.deepseek_v4.tile import tile_step
from models.runtime import ModuleRuntime


class DeepseekV4Runtime(ModuleRuntime):
    """A DeepSeek-V4 over a cache of the five kinds."""

    def __init__(
        self,
        model: DeepseekV4,
        *,
        format: RowFormat | CacheFormats | None = None,
        cells_per_block: int = 1,
    ) -> None:
        """Takes a model and how its rows are stored.

        Args:
          model: its weights.
          format: of all rows, or of each sort (see ``CACHE_FORMATS``); None for the model's dtype.
          cells_per_block: see ``Geometry``. TPU kernels take packed rows in blocks of at least 4.

        Raises:
          ConfigError: the model's rows cannot be stored like that.
        """
        format = format or formats.plain(model.config.dtype)
        chosen = CacheFormats.uniform(format) if isinstance(format, RowFormat) else format
        geometry = model.config.geometry(
            window_format=chosen.window,
            row_format=chosen.rows,
            index_format=chosen.index,
            cells_per_block=cells_per_block,
        )
        super().__init__(model, geometry, tile=tile_step, decode=decode_step)


class DeepseekV4GenericRuntime(ModuleRuntime):
    """A DeepSeek-V4 over uniform raw rows of a token and layer; see ``hybridkv.state.generic``.

    Any prefix of whole blocks and any length can be gone on from; each step costs O(context).
    """

    def __init__(self, model: DeepseekV4, *, block_tokens: int = 16) -> None:
        geometry = generic_geometry(model.config.geometry(), block_tokens=block_tokens)
        super().__init__(model, geometry, tile=generic.tile_step, decode=generic.decode_step)
