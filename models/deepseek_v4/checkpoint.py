"""A model on disk: ``config.json`` beside either safetensors or an Orbax checkpoint."""

import pathlib
import shutil

import jax
from flax import nnx
from orbax.checkpoint import v1 as ocp

from models.deepseek_v4.config import load_config
from models.deepseek_v4.model import DeepseekV4
from models.deepseek_v4.weights import load_safetensors
from models.files import WeightsError, checkpoint_folder

ORBAX_FOLDER = "params"


def load_model(folder: str | pathlib.Path) -> DeepseekV4:
    """Reads a model from a folder in Hugging Face layout, or one that ``save_orbax`` wrote.

    Raises:
      ConfigError: the config is missing or of another architecture.
      WeightsError: weights are missing or do not fit the config.
    """
    folder = checkpoint_folder(folder)
    config = load_config(folder)
    model = nnx.eval_shape(lambda: DeepseekV4(config, nnx.Rngs(0)))
    if (folder / ORBAX_FOLDER).is_dir():
        _load_orbax(model, folder / ORBAX_FOLDER)
    else:
        load_safetensors(model, folder)
    return model


def save_orbax(model: DeepseekV4, config_file: pathlib.Path, folder: str | pathlib.Path) -> None:
    """Writes the model's parameters and a copy of ``config_file``; ``folder`` must not exist."""
    folder = pathlib.Path(folder).absolute()
    folder.mkdir(parents=True)
    ocp.save(folder / ORBAX_FOLDER, nnx.to_pure_dict(nnx.state(model)))
    shutil.copyfile(config_file, folder / "config.json")


def _load_orbax(model: DeepseekV4, folder: pathlib.Path) -> None:
    state = nnx.state(model)
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    wanted = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=device), nnx.to_pure_dict(state)
    )
    try:
        values = ocp.load(folder.absolute(), wanted)
    except Exception as error:  # orbax raises bare exceptions for damaged and foreign trees alike
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise WeightsError(f"{folder} is not a checkpoint of this config: {first}") from error
    nnx.replace_by_pure_dict(state, values)
    nnx.update(model, state)
