"""Strict configuration: frozen structs, TOML in and out, `--set key=value`. Every error names the key and the way out.

Values are checked against the struct's types before they become a struct, so that an error can say what was given,
what is allowed and which spelling comes nearest. Contradictions between values are raised by the structs themselves
(`__post_init__`) and pass through whole; only the file is added to where they are.
"""

from __future__ import annotations

import difflib
import json
import math
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NoReturn, TypeVar

import msgspec
import tomli_w
from msgspec import inspect as types

from packtrain.core.errors import BadValue, PacktrainError, UnknownKey, UsageError

T = TypeVar("T", bound=msgspec.Struct)
Key = tuple[str, ...]

INT_MIN, INT_MAX = -(1 << 63), (1 << 63) - 1
SHOWN_MAX = 80
"""Characters of a value that an error repeats."""
SET = "--set"
CONTAINERS = (types.StructType, types.DictType, types.VarTupleType, types.ListType)


class _Absent:
    """Where one side of a comparison has nothing; shown as `absent`."""


ABSENT = _Absent()


# --- in and out --------------------------------------------------------------------------------------


def decode(data: bytes | Mapping[str, Any], cls: type[T], where: str = "") -> T:
    """A struct from TOML bytes (or a parsed table). `where`: the file, for errors.

    Raises UnknownKey, BadValue, or whatever the struct itself raises when its values contradict each other.
    """
    return _build(_table(data, where), cls, (), where)


def read_section(data: bytes | Mapping[str, Any], section: str, cls: type[T], where: str = "") -> T:
    """One section of a spec file, as strict as `decode`; the other sections are not looked at. Missing: `cls()`."""
    return _build(_table(data, where).get(section, {}), cls, (section,), where)


def encode(struct: msgspec.Struct) -> bytes:
    """TOML that `decode` reads back as an equal struct. Raises BadValue where it could not (nan, text not in UTF-8)."""
    table = _without_none(msgspec.to_builtins(struct))
    _check(table, types.type_info(type(struct)), (), "")
    return tomli_w.dumps(table).encode()


def override(struct: T, settings: Sequence[str]) -> T:
    """A copy with each `key=value` set in turn; contradictions are judged once, after the last.

    The value is TOML; where text is wanted it needs no quotes. Keys reach into tables (`train.mesh.fsdp=8`) and lists
    (`data.stores.0.weight=2`; the index after the last appends). Raises UsageError for what is not key=value.
    """
    table, kind = _without_none(msgspec.to_builtins(struct)), types.type_info(type(struct))
    for setting in settings:
        key, text = _setting(setting)
        table = _set(table, kind, key, (), text)
    return _build(table, type(struct), (), SET)


def difference(old: msgspec.Struct | Mapping[str, Any], new: msgspec.Struct | Mapping[str, Any]) -> list[str]:
    """One line a value that differs, `model.layers: 12 -> 14`, through nested structs, dicts and lists."""
    return list(_differences(msgspec.to_builtins(old), msgspec.to_builtins(new), ()))


def _build(table: Any, cls: type[T], key: Key, where: str) -> T:
    _check(table, types.type_info(cls), key, where)
    try:
        return msgspec.convert(table, cls)
    except PacktrainError as error:
        error.where = ": ".join(part for part in (where, error.where) if part)
        raise
    except msgspec.ValidationError as error:
        what, _, path = str(error).partition(" - at ")
        raise BadValue(what, where=_place(where, (*key, path.strip("`").removeprefix("$.")))) from error


def _table(data: bytes | Mapping[str, Any], where: str) -> Mapping[str, Any]:
    if isinstance(data, Mapping):
        return data
    try:
        return tomllib.loads(data.decode())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        what = str(error) or "nested too deep"
        raise BadValue(f"this is not TOML: {what}", where=where, fix="see toml.io for the form of a value") from error


def _without_none(value: Any) -> Any:
    """TOML has no null: a field that is None is left out (and must be None by default to be read back)."""
    if isinstance(value, dict):
        return {key: _without_none(inner) for key, inner in value.items() if inner is not None}
    return [_without_none(inner) for inner in value] if isinstance(value, list | tuple) else value


# --- checking ----------------------------------------------------------------------------------------


def _check(value: Any, kind: types.Type, key: Key, where: str) -> None:
    """Raises UnknownKey or BadValue for the first thing in `value` that `kind` does not allow."""
    match kind:
        case types.StructType():
            _check_struct(value, kind, key, where)
        case types.DictType():
            _expect(isinstance(value, Mapping), value, kind, key, where)
            for name, inner in value.items():
                _expect(_is_text(name), name, types.StrType(), (*key, str(name)), where)
                _check(inner, kind.value_type, (*key, str(name)), where)
        case types.VarTupleType() | types.ListType():
            _expect(isinstance(value, list | tuple), value, kind, key, where)
            for index, inner in enumerate(value):
                _check(inner, kind.item_type, (*key, str(index)), where)
        case types.UnionType():
            _check_union(value, kind, key, where)
        case _:
            _expect(_is_plain(value, kind), value, kind, key, where)


def _check_struct(value: Any, kind: types.StructType, key: Key, where: str) -> None:
    _expect(isinstance(value, Mapping), value, kind, key, where)
    fields = _fields(kind)
    for name, inner in value.items():
        if name not in fields:
            _unknown(kind, (*key, str(name)), where)
        _check(inner, fields[name].type, (*key, name), where)
    for name, field in fields.items():
        if field.required and name not in value:
            missing = _dotted((*key, name))
            raise BadValue(
                f"{missing} is missing; it has no default", where=_place(where, (*key, name)),
                fix=f"add it, for example {_written_as(missing, field.type, where)}",
            )


def _check_union(value: Any, kind: types.UnionType, key: Key, where: str) -> None:
    """Where only one alternative can be written, its own error; else one that names all of them."""
    written = _written(kind)
    if len(written) == 1:
        return _check(value, written[0], key, where)
    _expect(any(_allowed(value, one) for one in written), value, kind, key, where)


def _written(kind: types.UnionType) -> list[types.Type]:
    """The alternatives that TOML can say: all but None."""
    return [one for one in kind.types if not isinstance(one, types.NoneType)]


def _is_plain(value: Any, kind: types.Type) -> bool:
    match kind:
        case types.BoolType():
            return isinstance(value, bool)
        case types.IntType():
            return type(value) is int and INT_MIN <= value <= INT_MAX
        case types.FloatType():
            return _is_plain(value, types.IntType()) or (isinstance(value, float) and math.isfinite(value))
        case types.StrType():
            return _is_text(value)
        case types.LiteralType():
            return any(type(value) is type(one) and value == one for one in kind.values)
    raise AssertionError(f"core/config.py knows no fields of type {type(kind).__name__}")


def _is_text(value: Any) -> bool:
    """A str that UTF-8 can hold (an argument or a path may carry bytes that are none)."""
    return isinstance(value, str) and not re.search("[\ud800-\udfff]", value)


def _expect(good: bool, value: Any, kind: types.Type, key: Key, where: str) -> None:
    if good:
        return
    name, allowed = _dotted(key), _described(kind)
    near = _nearest(value, [one for one in _literals(kind) if isinstance(one, str)])
    fix = f"did you mean {_shown(near)}?" if near else f"for example {_written_as(name, kind, where)}"
    raise BadValue(f"{name or 'this'} is {_shown(value)}; allowed: {allowed}", where=_place(where, key), fix=fix)


def _unknown(kind: types.StructType, key: Key, where: str) -> NoReturn:
    """Names the key, the nearest right spelling here or the same name in another section, and the keys allowed here."""
    names, here = list(_fields(kind)), key[:-1]
    near = _nearest(key[-1], names)
    full = _dotted((*here, near)) if near else ""
    allowed = f"allowed {'in ' + _dotted(here) if here else 'here'}: {', '.join(names)}"
    elsewhere = "" if full else _elsewhere(kind, key[-1], here)
    hint = f"did you mean {full or elsewhere}? " if full or elsewhere else ""
    raise UnknownKey(f"no key is called {_dotted(key)}", where=_place(where, key), fix=hint + allowed)


def _elsewhere(kind: types.StructType, name: str, here: Key) -> str:
    """The dotted key below `kind` whose last part is spelt `name` or nearly so."""
    ends = {path[-1]: path for path in _paths(kind, here)}
    near = _nearest(name, list(ends))
    return _dotted(ends[near]) if near else ""


def _paths(kind: types.Type, key: Key) -> Iterator[Key]:
    if isinstance(kind, types.StructType):
        for name, field in _fields(kind).items():
            yield (*key, name)
            yield from _paths(field.type, (*key, name))


def _fields(kind: types.StructType) -> dict[str, types.Field]:
    return {field.encode_name: field for field in kind.fields}


def _nearest(given: Any, allowed: list[str]) -> str:
    found = difflib.get_close_matches(given, allowed, n=1) if isinstance(given, str) else []
    return found[0] if found else ""


# --- words for people --------------------------------------------------------------------------------


def _described(kind: types.Type) -> str:
    match kind:
        case types.BoolType():
            return "true or false"
        case types.IntType():
            return "a whole number"
        case types.FloatType():
            return "a finite number"
        case types.StrType():
            return "text"
        case types.LiteralType():
            return ", ".join(_shown(one) for one in kind.values)
        case types.VarTupleType() | types.ListType():
            return f"a list, each entry {_described(kind.item_type)}"
        case types.UnionType():
            return " or ".join(_described(one) for one in _written(kind))
    return "a table"


def _example(kind: types.Type) -> str:
    match kind:
        case types.BoolType():
            return "true"
        case types.IntType():
            return "8"
        case types.FloatType():
            return "0.5"
        case types.StrType():
            return '"text"'
        case types.LiteralType():
            return _shown(kind.values[0])
        case types.VarTupleType() | types.ListType():
            return f"[{_example(kind.item_type)}]"
        case types.UnionType():
            return _example(_written(kind)[0])
        case types.DictType():
            return f"{{name = {_example(kind.value_type)}}}"
    return "{...}"


def _written_as(name: str, kind: types.Type, where: str) -> str:
    """How a right value would be written, where the wrong one was: in a file or on the command line."""
    return f"{SET} {name}={_example(kind)}" if where == SET else f"{name} = {_example(kind)}"


def _literals(kind: types.Type) -> list[Any]:
    if isinstance(kind, types.UnionType):
        return [value for one in kind.types for value in _literals(one)]
    return list(kind.values) if isinstance(kind, types.LiteralType) else []


def _shown(value: Any) -> str:
    """A value as TOML writes it, nearly, and cut short; control characters are escaped."""
    if value is ABSENT:
        return "(absent)"
    text = repr(value) if isinstance(value, float) else json.dumps(value, default=str)
    return text if len(text) <= SHOWN_MAX else text[: SHOWN_MAX - 3] + "..."


def _dotted(key: Key) -> str:
    return ".".join(part if re.fullmatch(r"[\w-]{1,80}", part, re.ASCII) else _shown(part) for part in key)


def _place(where: str, key: Key) -> str:
    return ": ".join(part for part in (where, _dotted(key)) if part)


# --- --set -------------------------------------------------------------------------------------------


def _setting(setting: str) -> tuple[Key, str]:
    name, equals, text = setting.partition("=")
    key = tuple(part.strip() for part in name.split("."))
    if not equals or not all(key) or not _is_text(setting):
        raise UsageError(f"{_shown(setting)} is not key=value", where=SET, fix=f"write it like {SET} model.layers=12")
    return key, text.strip()


def _set(value: Any, kind: types.Type, key: Key, done: Key, text: str) -> Any:
    """`value` with the entry at `key` replaced by what `text` says; `done` is the key of `value` itself."""
    if not key:
        return _value(text, kind, done)
    (part, *rest), at = key, (*done, key[0])
    match _container(kind):
        case types.StructType() as struct:
            if part not in _fields(struct):
                _unknown(struct, at, SET)
            inner = _fields(struct)[part].type
            return {**(value or {}), part: _set((value or {}).get(part), inner, tuple(rest), at, text)}
        case types.DictType(value_type=inner):
            return {**(value or {}), part: _set((value or {}).get(part), inner, tuple(rest), at, text)}
        case types.VarTupleType(item_type=inner) | types.ListType(item_type=inner):
            items, index = list(value or ()), _index(part, len(value or ()), done)
            items[index:index + 1] = [_set(items[index] if index < len(items) else None, inner, tuple(rest), at, text)]
            return items
    raise UnknownKey(
        f"{_dotted(done)} is {_described(kind)}; it has no key {part}", where=_place(SET, at),
        fix=f"set it whole: {_written_as(_dotted(done), kind, SET)}",
    )


def _container(kind: types.Type) -> types.Type:
    """What a key reaches into: of an optional table or list, that table or list."""
    alternatives = kind.types if isinstance(kind, types.UnionType) else (kind,)
    return next((one for one in alternatives if isinstance(one, CONTAINERS)), kind)


def _index(part: str, length: int, key: Key) -> int:
    if part.isascii() and part.isdigit() and len(part) < 10 and int(part) <= length:
        return int(part)
    entries = f"has {length} {'entry' if length == 1 else 'entries'}"
    raise BadValue(
        f"{_dotted(key)} {entries}; {_dotted((part,))} is none of them", where=_place(SET, (*key, part)),
        fix=f"use {length} to append" + (f", or 0 to {length - 1}" if length else ""),
    )


def _value(text: str, kind: types.Type, key: Key) -> Any:
    """`text` as TOML where that is allowed here, else as it stands; the error is about the first of the two."""
    try:
        table = tomllib.loads(f"value = {text}")
    except (tomllib.TOMLDecodeError, RecursionError):
        table = {}
    said = table["value"] if list(table) == ["value"] else text
    try:
        _check(said, kind, key, SET)
    except PacktrainError:
        if not _allowed(text, kind):
            raise
        return text
    return said


def _allowed(value: Any, kind: types.Type) -> bool:
    try:
        _check(value, kind, (), "")
    except PacktrainError:
        return False
    return True


# --- difference --------------------------------------------------------------------------------------


def _differences(old: Any, new: Any, key: Key) -> Iterator[str]:
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        for name in dict.fromkeys([*old, *new]):
            yield from _differences(old.get(name, ABSENT), new.get(name, ABSENT), (*key, str(name)))
    elif isinstance(old, list | tuple) and isinstance(new, list | tuple):
        for index in range(max(len(old), len(new))):
            one, two = (side[index] if index < len(side) else ABSENT for side in (old, new))
            yield from _differences(one, two, (*key, str(index)))
    elif old is ABSENT or new is ABSENT or isinstance(old, bool) != isinstance(new, bool) or old != new:
        yield f"{_dotted(key)}: {_shown(old)} -> {_shown(new)}"
