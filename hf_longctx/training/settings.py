"""Settings as fields of a dataclass: read from a YAML file, from the command line over it, and written back."""

import dataclasses
import difflib
import types
from argparse import SUPPRESS, ArgumentParser, BooleanOptionalAction
from contextlib import suppress
from pathlib import Path
from typing import Any, get_args

import yaml


def setting(default: Any, text: str, choices: tuple = (), free: bool = False):
    """A field with its help.

    Args:
        default: None where something else decides.
        text: what it is, and the source of the default.
        choices: the values it may have; none: any.
        free: whether the setting may differ when a run goes on, because what the run computes does not depend on it.
    """
    return dataclasses.field(default=default, metadata={"help": text, "choices": choices, "free": free})


def option(name: str) -> str:
    """The setting's option on the command line."""
    return f"--{name.replace('_', '-')}"


def add_settings(parser: ArgumentParser, settings: type) -> None:
    """An option for every setting. One that is not used leaves no trace, so that a file's value can stand."""
    for entry in dataclasses.fields(settings):
        kind, text = _kind(entry), entry.metadata["help"]
        if entry.default not in (None, False):
            text += f" (default: {entry.default})"
        how = {"type": kind, "metavar": kind.__name__.upper()}
        if kind is bool:
            how = {"action": BooleanOptionalAction}
        elif entry.metadata["choices"]:
            how = {"choices": entry.metadata["choices"]}
        parser.add_argument(option(entry.name), dest=entry.name, default=SUPPRESS, help=text, **how)


def read_settings(settings: type, file: str | None, options: dict[str, Any]):
    """Settings from a YAML file, and over them the options of the command line.

    Raises:
        ValueError: the file is no mapping in YAML, or has a name that is no setting, or a value of another type.
        OSError: the file cannot be read.
    """
    entries = {entry.name: entry for entry in dataclasses.fields(settings)}
    values = {} if file is None else _read_yaml(file)
    for name, value in values.items():
        if name not in entries:
            close = difflib.get_close_matches(str(name), entries, 1)
            hint = f"Did you mean {close[0]}?" if close else f"The settings are {', '.join(entries)}."
            raise ValueError(f"{file} sets {name}, which is no setting. {hint}")
        values[name] = _convert(value, entries[name], file)
    return settings(**values | {name: options[name] for name in options if name in entries})


def write_settings(settings) -> str:
    """All settings in YAML, as `read_settings` reads them."""
    return yaml.safe_dump(dataclasses.asdict(settings), sort_keys=False)


def check_choices(settings) -> None:
    """Raise ValueError if a setting is none of its choices."""
    for entry in dataclasses.fields(settings):
        value, choices = getattr(settings, entry.name), entry.metadata["choices"]
        undecided = value is None and entry.default is None
        if choices and value not in choices and not undecided:
            raise ValueError(f"{option(entry.name)} is {value!r}; it must be one of {', '.join(choices)}.")


def locked(settings) -> dict[str, Any]:
    """The settings that must stay when a run goes on."""
    return {e.name: getattr(settings, e.name) for e in dataclasses.fields(settings) if not e.metadata["free"]}


def _kind(entry):
    return next((kind for kind in get_args(entry.type) if kind is not types.NoneType), entry.type)


def _read_yaml(file):
    try:
        values = yaml.safe_load(Path(file).read_text())
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{file} is no YAML: {' '.join(str(error).split())}") from error
    if not isinstance(values, dict):
        raise ValueError(f"{file} holds no settings; it must have lines such as `steps: 1000`.")
    return values


def _convert(value, entry, file):
    kind = _kind(entry)
    if type(value) is kind or (value is None and entry.default is None):
        return value
    if kind is str and type(value) in (int, float):
        return str(value)  # a folder may be named 2024
    if kind in (int, float) and type(value) in (int, float, str):
        with suppress(ValueError):
            number = float(value)  # YAML takes 1e-3 for a text, and 1 for no float
            if kind is float or number.is_integer():
                return kind(number)
    raise ValueError(f"{file} sets {entry.name} to {value!r}; it must be {kind.__name__}: {entry.metadata['help']}.")


__all__ = ["add_settings", "check_choices", "locked", "option", "read_settings", "setting", "write_settings"]
