"""Models and hardware as data files: every number beside where it comes from.

    data/models/v4-flash.json   {"name", "about", "geometry": {..., "source"}, "values": {...}}
    data/hardware/v6e-8.json    {"name", "about", "values": {"flops": {"value", "unit", "source"}}}

A path of one's own file is read where no name is known.
"""

import dataclasses
import importlib.resources
import json
import math
import pathlib
from collections.abc import Mapping
from typing import Any

from hybridkv import formats
from hybridkv.errors import UserError
from hybridkv.formats import RowFormat
from hybridkv.geometry import Geometry, LayerGeometry

_FORMATS: Mapping[str, RowFormat] = {
    each.name: each for each in vars(formats).values() if isinstance(each, RowFormat)
}
_FOLDER = importlib.resources.files("hybridkv.replay") / "data"


class CatalogError(UserError):
    """A description that is missing or does not say what it should."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Value:
    """One number and where it comes from."""

    name: str
    value: float
    unit: str
    source: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelData:
    """What is modelled of a model's weights and arithmetic; the cache is its geometry's."""

    name: str
    about: str
    geometry: Geometry
    geometry_source: str
    values: tuple[Value, ...]
    active_parameters: float
    """A token's operations are twice as many, attention over the context aside."""
    weight_bytes: float
    expert_bytes: float
    """Bytes of all routed experts, a part of ``weight_bytes``."""
    experts: float
    """Routed experts of a layer; 0 for none."""
    active_experts: float
    """Routed experts of a token."""
    heads: float
    head_width: float
    """Channels of a head's keys and of its values."""
    index_heads: float
    picks: float
    """Rows that a routed layer attends to; 0 where none is routed."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class HardwareData:
    """One server: devices that hold the model once, their host, its disk."""

    name: str
    about: str
    values: tuple[Value, ...]
    chips: float
    hbm_bytes: float
    """Of one chip."""
    hbm_bytes_per_second: float
    """Of one chip."""
    flops: float
    """Operations a second of one chip, bfloat16."""
    compute_efficiency: float
    memory_efficiency: float
    work_share: float
    """Share of the HBM that is neither weights nor cache."""
    step_seconds: float
    """Of every step, whatever it computes."""
    host_bytes: float
    host_share: float
    """Share of the host's memory that the cache may take."""
    host_bytes_per_second: float
    disk_bytes: float
    disk_bytes_per_second: float


def known(kind: str) -> tuple[str, ...]:
    """Names that come with the library; ``kind`` is ``models`` or ``hardware``."""
    names = (pathlib.PurePath(entry.name).stem for entry in (_FOLDER / kind).iterdir())
    return tuple(sorted(names))


def load_model(name: str) -> ModelData:
    """A model by its name, or by the path of a JSON file.

    Raises:
      CatalogError: there is none, or it lacks something.
    """
    data = _read("models", name)
    fields, values = _values(data, name, ModelData)
    parts = data.get("geometry")
    if not isinstance(parts, dict):
        raise CatalogError(f"model {name}: geometry is missing")
    try:
        geometry = _geometry(parts)
    except (KeyError, TypeError, ValueError) as error:
        raise CatalogError(f"model {name}: geometry: {error!r}") from error
    return ModelData(
        name=str(data.get("name", name)),
        about=str(data.get("about", "")),
        geometry=geometry,
        geometry_source=_source(parts, f"model {name}: geometry"),
        values=values,
        **fields,
    )


def load_hardware(name: str) -> HardwareData:
    """Hardware by its name, or by the path of a JSON file.

    Raises:
      CatalogError: there is none, or it lacks something.
    """
    data = _read("hardware", name)
    fields, values = _values(data, name, HardwareData)
    hardware = HardwareData(
        name=str(data.get("name", name)), about=str(data.get("about", "")), values=values, **fields
    )
    for field in ("hbm_bytes_per_second", "flops", "compute_efficiency", "memory_efficiency"):
        if not getattr(hardware, field) > 0:
            raise CatalogError(f"hardware {name}: {field} must be above 0")
    return hardware


def _read(kind: str, name: str) -> Mapping[str, Any]:
    entry = _FOLDER / kind / f"{name}.json"
    try:
        if name in known(kind):
            text = entry.read_text()
        elif pathlib.Path(name).is_file():
            text = pathlib.Path(name).read_text()
        else:
            raise CatalogError(
                f"no {kind.removesuffix('s')} {name!r}: give one of {', '.join(known(kind))}, or a "
                "JSON file"
            )
        data = json.loads(text)
    except (OSError, ValueError) as error:
        if isinstance(error, CatalogError):
            raise
        raise CatalogError(f"cannot read {name}: {error}") from error
    if not isinstance(data, dict):
        raise CatalogError(f"{name} holds no JSON object")
    return data


def _values(
    data: Mapping[str, Any], name: str, of: type
) -> tuple[dict[str, float], tuple[Value, ...]]:
    """Every number that ``of`` is made of, by field; and all that the file states."""
    stated = data.get("values")
    if not isinstance(stated, dict):
        raise CatalogError(f"{name}: values are missing")
    values = []
    for key, entry in stated.items():
        if not isinstance(entry, dict):
            raise CatalogError(f'{name}: {key} must be {{"value", "unit", "source"}}')
        number = entry.get("value")
        if isinstance(number, bool) or not isinstance(number, int | float):
            raise CatalogError(f"{name}: {key} is {number!r}, not a number")
        if not (math.isfinite(number) and number >= 0):
            raise CatalogError(f"{name}: {key} is {number!r}: give 0 or more")
        source = _source(entry, f"{name}: {key}")
        values.append(
            Value(name=key, value=float(number), unit=str(entry.get("unit", "")), source=source)
        )
    numbers = {each.name: each.value for each in values}
    wanted = [field.name for field in dataclasses.fields(of) if field.type in (float, "float")]
    missing = [field for field in wanted if field not in numbers]
    if missing:
        raise CatalogError(f"{name}: {', '.join(missing)} missing")
    return {field: numbers[field] for field in wanted}, tuple(values)


def _source(entry: Mapping[str, Any], where: str) -> str:
    source = entry.get("source")
    if not isinstance(source, str) or not source.strip():
        raise CatalogError(f"{where} has no source: say where the number comes from")
    return source


def _geometry(parts: Mapping[str, Any]) -> Geometry:
    layers: list[LayerGeometry] = []
    for group in parts["layers"]:
        layers += [LayerGeometry(**layer) for layer in group["layers"]] * int(group["times"])
    return Geometry(
        layers=tuple(layers),
        row_width=int(parts["row_width"]),
        rope_width=int(parts["rope_width"]),
        index_width=int(parts["index_width"]),
        window_format=_FORMATS[parts["window_format"]],
        row_format=_FORMATS[parts["row_format"]],
        index_format=_FORMATS[parts["index_format"]],
    )
