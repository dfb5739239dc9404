r"""The engines of ``serve.py --rollout``: reuse, cold, and the safe path, in one process.

    STATE.json <--rollbacks-- RolloutSchemes --hybrid: reuse, digests
       |   \--a person's changes, within refresh_s--^   |--cold: the same executables, no reuse
    scripts/rollout.py                                  \--generic: uniform raw rows, no reuse

Only engines of ``cold_sizes`` serve beside reuse, so that what they serve reports no cached token.
"""

import dataclasses
import json
import pathlib
import typing
from collections.abc import Callable, Mapping
from types import NoneType
from typing import Any

from hybridkv.engine.engine import Engine
from hybridkv.errors import UserError
from hybridkv.observe.rollout import RolloutStage
from hybridkv.observe.rollout_file import Rollout
from hybridkv.observe.rollout_handle import UnderWay
from hybridkv.observe.rollout_schemes import RolloutOptions, RolloutSchemes
from hybridkv.observe.shadow import ShadowOptions
from hybridkv.observe.thresholds import Thresholds
from hybridkv.prefixes.losses import Cause
from models.text import Text

SAFE = ("cold", "generic")
"""What may serve where reuse does not."""
UNDER_WAY = {"unseen": UnderWay.UNSEEN, "finish": UnderWay.FINISH}
"""Not RESTART: a stream cannot take back what it sent."""
_OTHER = ("shadow", "thresholds", "under_way", "forget", "refresh_s", "to")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RolloutChoices:
    """What a file of options says."""

    options: RolloutOptions = dataclasses.field(default_factory=RolloutOptions)
    to: RolloutStage = RolloutStage.OFF
    """Where rollbacks go."""


def read_choices(path: pathlib.Path | None) -> RolloutChoices:
    """Options from a JSON file: the fields of ``RolloutOptions``, and ``to``; see docs/serving.md.

    Args:
      path: None for the defaults.

    Raises:
      UserError: it cannot be read, or says something that cannot be meant.
    """
    if path is None:
        return RolloutChoices()
    try:
        read = json.loads(path.read_text(encoding="utf-8"), parse_constant=_no_number)
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"cannot read the options of the rollout in {path}: {error}") from error
    try:
        return _choices(read)
    except (UserError, TypeError, ValueError) as error:
        raise UserError(f"{path}: {error}") from error


def _choices(read: Any) -> RolloutChoices:
    given = _object("the file", read, _OTHER)
    thresholds = _fields(Thresholds, "thresholds", given.get("thresholds", {}))
    if "misses" in thresholds:
        misses = _object("misses", thresholds["misses"], [cause.value for cause in Cause])
        thresholds["misses"] = {Cause(name): _number(name, x) for name, x in misses.items()}
    under_way, to = given.get("under_way", "unseen"), given.get("to", "off")
    if not isinstance(under_way, str) or under_way not in UNDER_WAY:
        raise UserError(f"under_way is {under_way!r}: give one of {', '.join(UNDER_WAY)}")
    if to not in ("off", "shadow"):
        raise UserError(f"to is {to!r}: rollbacks go to off or shadow")
    options = RolloutOptions(
        shadow=ShadowOptions(**_fields(ShadowOptions, "shadow", given.get("shadow", {}))),
        thresholds=Thresholds(**thresholds),
        under_way=UNDER_WAY[under_way],
        **_fields(
            RolloutOptions,
            "the file",
            {name: given[name] for name in ("forget", "refresh_s") if name in given},
        ),
    )
    return RolloutChoices(options=options, to=RolloutStage(to))


def _fields(of: type, where: str, read: Any) -> dict[str, Any]:
    """Fields of a dataclass, each of the type that its default has."""
    fields = {field.name: field for field in dataclasses.fields(of)}
    found = dict(_object(where, read, fields))
    for name, value in found.items():
        default = fields[name].default
        if value is None and NoneType not in typing.get_args(fields[name].type):
            raise UserError(f"{name} is null: give a value, or leave it out")
        if isinstance(default, (bool, str)) and type(value) is not type(default):
            raise UserError(f"{name} is {value!r}: give {'a text' if default == '' else 'a bool'}")
        if type(default) is int and type(value) is not int and value is not None:
            raise UserError(f"{name} is {value!r}: give a whole number")
        if type(default) is float and value is not None:
            _number(name, value)
    return found


def _no_number(text: str) -> float:
    raise ValueError(f"{text} is not JSON")


def _number(name: str, value: Any) -> float:
    if type(value) not in (int, float):
        raise UserError(f"{name} is {value!r}: give a number")
    return float(value)


def _object(where: str, read: Any, known: Any) -> Mapping[str, Any]:
    if not isinstance(read, dict):
        raise UserError(f"{where} must be a JSON object")
    unknown = [name for name in read if name not in known]
    if unknown:
        raise UserError(f"{where} has no option {unknown[0]!r}: there are {', '.join(known)}")
    return read


def make_schemes(
    engine: Callable[[str], Engine],
    state: pathlib.Path,
    choices: RolloutChoices,
    *,
    safe: str,
    text: Text,
) -> RolloutSchemes:
    """Compiles all engines.

    Args:
      engine: makes that of a scheme.
      state: the file that ``scripts/rollout.py`` writes too.
      choices: how it is watched.
      safe: one of ``SAFE``.
      text: tokenizer.

    Raises:
      UserError: the engines cannot be compared.
    """
    names = dict.fromkeys(("hybrid", "cold", safe))
    return RolloutSchemes(
        {name: engine(name) for name in names},
        Rollout(state, to=choices.to),
        choices.options,
        safe=safe,
        text=text,
    )
