"""Settings as fields of a dataclass: read from a YAML file, from the command line over it, and written back."""

import dataclasses
import difflib
import math
import os
import types
from argparse import SUPPRESS, BooleanOptionalAction
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar, get_args

import yaml


SettingsType = TypeVar("SettingsType")
POSITIVE, NOT_NEGATIVE, BELOW_ONE = "above 0", "at least 0", "at least 0 and below 1"
SEED = f"between 0 and {2**32 - 1}"
RANGES = {
    POSITIVE: lambda value: 0 < value < math.inf,
    NOT_NEGATIVE: lambda value: 0 <= value < math.inf,
    BELOW_ONE: lambda value: 0 <= value < 1,
    SEED: lambda value: 0 <= value < 2**32,
}


ALIASES = {"wsd": "warmup_stable_decay", "bf16": "bfloat16", "fp32": "float32"}  # what others call these values


def setting(
    default: Any, text: str, choices: tuple[str, ...] = (), bounds: str | None = None, may_change: bool = False
) -> Any:
    """Make a field of a dataclass of settings.

    Args:
        default: None where a preset or a recipe decides.
        text: the help, with the source of the default.
        choices: the values it may have; none: any.
        bounds: one of `RANGES`.
        may_change: a resumed run may have another value, because its results do not depend on it.
    """
    metadata = {"help": text, "choices": choices, "bounds": bounds, "may_change": may_change}
    return dataclasses.field(default=default, metadata=metadata)


def option(name: str) -> str:
    """Return the command-line option of a setting."""
    return f"--{name.replace('_', '-')}"


def add_settings(parser: Any, settings: Any) -> None:
    """Add an option for every setting to a parser or a group of one.

    An option that is not used leaves no trace in the namespace, so that the value of a file can stand.
    """
    for entry in dataclasses.fields(settings):
        kind, text = _kind(entry), entry.metadata["help"]
        if entry.default not in (None, False):
            text += f" (default: {entry.default})"
        how: dict[str, Any] = {"type": kind, "metavar": kind.__name__.upper()}
        if kind is bool:
            how = {"action": BooleanOptionalAction}
        elif entry.metadata["choices"]:
            how = {"choices": entry.metadata["choices"], "type": lambda value: ALIASES.get(value, value)}
        parser.add_argument(option(entry.name), dest=entry.name, default=SUPPRESS, help=text, **how)


def read_settings(settings: type[SettingsType], file: str | Path | None, options: dict[str, Any]) -> SettingsType:
    """Read settings from a YAML file, and over them the options of the command line.

    Raises:
        ValueError: the file is not a mapping in YAML, or has an unknown name, or a value of another type.
        OSError: the file cannot be read.
    """
    entries = {entry.name: entry for entry in dataclasses.fields(settings)}  # ty: ignore[invalid-argument-type] - a dataclass
    values = {} if file is None else _read_yaml(file)
    for name, value in values.items():
        if name not in entries:
            close = difflib.get_close_matches(str(name), entries, 1)
            hint = f"Did you mean {close[0]}?" if close else f"The settings are {', '.join(entries)}."
            raise ValueError(f"{file} sets {name}, which is not a setting. {hint}")
        values[name] = _convert(value, entries[name], file)
    return settings(**values | {name: options[name] for name in options if name in entries})


def write_settings(settings: Any) -> str:
    """Return all settings in YAML, as `read_settings` reads them."""
    return yaml.safe_dump(dataclasses.asdict(settings), sort_keys=False)


def check_values(settings: Any) -> None:
    """Raise ValueError if a setting is none of its choices or out of its range."""
    for entry in dataclasses.fields(settings):
        value, choices, bounds = getattr(settings, entry.name), entry.metadata["choices"], entry.metadata["bounds"]
        if value is None and entry.default is None:
            continue
        if choices and value not in choices:
            raise ValueError(f"{option(entry.name)} is {value!r}; it must be one of {', '.join(choices)}.")
        if bounds and not RANGES[bounds](value):
            raise ValueError(f"{option(entry.name)} is {value}; it must be {bounds}.")


def locked(settings: Any) -> dict[str, Any]:
    """Return the settings that must stay as they are when a run is resumed."""
    return {e.name: getattr(settings, e.name) for e in dataclasses.fields(settings) if not e.metadata["may_change"]}


def _kind(entry: dataclasses.Field) -> Any:
    return next((kind for kind in get_args(entry.type) if kind is not types.NoneType), entry.type)


def _read_yaml(file):
    try:
        values = yaml.safe_load(Path(file).read_text())
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{file} is not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(values, dict):
        raise ValueError(f"{file} does not hold settings; it must have lines such as `steps: 1000`.")
    return values


def _convert(value: Any, entry: dataclasses.Field, file) -> Any:
    kind = _kind(entry)
    if entry.metadata["choices"]:
        value = ALIASES.get(value, value)
    if type(value) is kind or (value is None and entry.default is None):
        return os.path.expanduser(value) if kind is str and value else value
    if kind is str and type(value) in (int, float):
        return str(value)  # a folder may be named 2024
    if kind in (int, float) and isinstance(value, int | float | str) and not isinstance(value, bool):
        with suppress(ValueError):
            number = float(value)  # YAML takes 1e-3 for a text, and 1 for an integer
            if kind is float or number.is_integer():
                return kind(number)
    raise ValueError(f"{file} sets {entry.name} to {value!r}; it must be {kind.__name__}: {entry.metadata['help']}.")


__all__ = ["add_settings", "check_values", "locked", "option", "read_settings", "setting", "write_settings"]
