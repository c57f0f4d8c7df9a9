"""Strict construction of a dataclass tree from plain containers: every key known, every value of its declared type.

A value is never bent into another meaning. What is accepted beyond the exact type: an integer where a float is
declared, a float without a fraction where an integer is (3e4), and numbers written as text ("1e-4") for both, since
YAML 1.1 reads `1e-4` as text. A number where text is declared is refused: YAML has already turned `1e5` into 100000.0,
and nobody can tell what had been written.

A key is its field's name without a trailing underscore, so that `from_` can be the field of a key that Python reserves.
"""

import dataclasses
import json
import math
import types
import typing
from typing import Any

from dstrain.config.errors import InputError, nearest


def build(cls: type, plain: Any, where: str = "") -> Any:
    """An instance of dataclass `cls` from a mapping of plain values.

    `where` is the dotted key of the mapping itself ("" for the root). Fields with a default may be absent. Raises
    InputError naming the full dotted key for an unknown or missing key and for a value of another type.
    """
    if not isinstance(plain, dict):
        raise InputError(f"{where or 'the configuration'}: a group of keys is expected, got {show(plain)}")
    hints = key_hints(cls)
    for key in plain:
        if key not in hints:
            raise InputError(unknown_key(_join(where, key), [_join(where, name) for name in hints]))
    values = {}
    for field in dataclasses.fields(cls):
        name = key_of(field)
        key = _join(where, name)
        if name in plain:
            values[field.name] = _convert(hints[name], plain[name], key)
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise InputError(f"missing key {key!r} ({describe(hints[name])})")
    return cls(**values)


def plain_of(config: Any) -> Any:
    """The inverse of `build`: a dataclass tree as plain containers under its keys."""
    if dataclasses.is_dataclass(config):
        return {key_of(field): plain_of(getattr(config, field.name)) for field in dataclasses.fields(config)}
    return [plain_of(item) for item in config] if isinstance(config, list) else config


def key_of(field: dataclasses.Field) -> str:
    """The configuration key of a dataclass field."""
    return field.name.removesuffix("_")


def key_hints(cls: type) -> dict[str, Any]:
    """Key -> declared type of every field of dataclass `cls`."""
    hints = typing.get_type_hints(cls)
    return {key_of(field): hints[field.name] for field in dataclasses.fields(cls)}


def key_type(cls: type, dotted: str) -> Any:
    """The declared type of the key `dotted` below dataclass `cls`; list items are addressed by their index.

    Raises InputError with the nearest valid name where there is no such key.
    """
    here: Any = cls
    parts = dotted.split(".")
    for i, part in enumerate(parts):
        inner = without_none(here)
        if dataclasses.is_dataclass(inner):
            hints = key_hints(inner)
            if part in hints:
                here = hints[part]
                continue
            siblings = [".".join([*parts[:i], name]) for name in hints]
            raise InputError(unknown_key(dotted, siblings, all_keys(cls)))
        if typing.get_origin(inner) is list:
            if not part.isdecimal():
                raise InputError(f"unknown key {dotted!r}: {'.'.join(parts[:i])} is a list, its items are 0, 1, 2, …")
            here = typing.get_args(inner)[0]
            continue
        raise InputError(f"unknown key {dotted!r}: {'.'.join(parts[:i])} is {describe(here)} and has no keys below it")
    return here


def all_keys(cls: type, where: str = "") -> list[str]:
    """Every dotted key below dataclass `cls`, groups included, list items left out."""
    keys = []
    for name, hint in key_hints(cls).items():
        keys.append(_join(where, name))
        if dataclasses.is_dataclass(without_none(hint)):
            keys += all_keys(without_none(hint), _join(where, name))
    return keys


def unknown_key(dotted: str, siblings: list[str], everywhere: list[str] = ()) -> str:
    """The line for an unknown key: a key of that name in another group, else the nearest, else the valid siblings."""
    elsewhere = [key for key in everywhere if key.rsplit(".", 1)[-1] == dotted.rsplit(".", 1)[-1]]
    return f"unknown key {dotted!r}{nearest(dotted, elsewhere or siblings)}"


def is_text(hint: Any) -> bool:
    """Whether a declared type is text and nothing else (null aside)."""
    return without_none(hint) is str


def allows_null(hint: Any) -> bool:
    return types.NoneType in typing.get_args(hint)


def container_of(hint: Any) -> type | None:
    """The plain container that holds a declared type: dict for a group of keys, list for a list, else None."""
    kind = without_none(hint)
    if dataclasses.is_dataclass(kind):
        return dict
    return list if typing.get_origin(kind) is list else None


def without_none(hint: Any) -> Any:
    """The type inside `X | None`; any other type as it is."""
    parts = [part for part in typing.get_args(hint) if part is not types.NoneType]
    return parts[0] if isinstance(hint, types.UnionType) and len(parts) == 1 else hint


def describe(hint: Any) -> str:
    """A declared type in words."""
    if isinstance(hint, types.UnionType):
        return " or ".join(describe(part) for part in typing.get_args(hint))
    if typing.get_origin(hint) is list:
        return f"list of {describe(typing.get_args(hint)[0])}"
    if dataclasses.is_dataclass(hint):
        return f"{{{', '.join(key_hints(hint))}}}"
    return {int: "integer", float: "number", str: "text", bool: "true or false", types.NoneType: "null"}[hint]


def show(value: Any) -> str:
    """A value as YAML would write it, cut to a line."""
    text = json.dumps(value) if value is None or isinstance(value, bool) else repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _convert(hint: Any, value: Any, key: str) -> Any:
    if isinstance(hint, types.UnionType):
        parts = [part for part in typing.get_args(hint) if part is not types.NoneType]
        if value is None and allows_null(hint):
            return None
        if len(parts) == 1:
            return _convert_one(parts[0], value, key, hint)
        # float | str: text that reads as a number is a number, so "1e9" and 1e9 mean the same
        number = _number(value)
        if number is not None and float in parts:
            return number
        if isinstance(value, str) and str in parts:
            return value
        raise _mismatch(hint, value, key)
    return _convert_one(hint, value, key, hint)


def _convert_one(kind: Any, value: Any, key: str, declared: Any) -> Any:
    if dataclasses.is_dataclass(kind):
        return build(kind, value, key)
    if typing.get_origin(kind) is list:
        if not isinstance(value, list | tuple):
            raise _mismatch(declared, value, key)
        return [_convert(typing.get_args(kind)[0], item, f"{key}.{i}") for i, item in enumerate(value)]
    if kind is str:
        if isinstance(value, bool | int | float):
            raise InputError(f"{key}: text expected, got {show(value)}; write it in quotes in the YAML file "
                             "(unquoted, YAML turns 1e5 into 100000.0 and no into false)")
        if isinstance(value, str):
            return value
    elif kind is bool:
        if isinstance(value, bool):
            return value
    else:
        number = _number(value)
        if number is not None and kind is float:
            return number
        if number is not None and kind is int and number == int(number):
            # int() of the original keeps integers beyond 2^53 exact
            return int(value) if isinstance(value, int) else int(number)
    raise _mismatch(declared, value, key)


def _number(value: Any) -> float | None:
    """The finite number that a value is or spells, else None; true and false are not numbers."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None


def _mismatch(hint: Any, value: Any, key: str) -> InputError:
    return InputError(f"{key}: {describe(hint)} expected, got {show(value)}")


def _join(where: str, name: Any) -> str:
    return f"{where}.{name}" if where else str(name)
