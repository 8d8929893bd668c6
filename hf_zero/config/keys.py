"""The schema as a list of keys: each with its path, type, default and fate, taken from the pydantic fields."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from types import UnionType
from typing import Any, Union, cast, get_args, get_origin

from pydantic import TypeAdapter
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from hf_zero.config.schema.fields import Fate, Section, is_section_class
from hf_zero.config.schema.root import ZeroConfig


@dataclass(frozen=True)
class Key:
    """One key of the configuration.

    Attributes:
        path: Dotted path; `<metric>`, `<group>`, `[]` and `*` are placeholders for names that the user chooses.
        owner: Section and name of the field; None for `*`, which stands for a section's other keys.
        default: Value when the key is absent (None for sections that are absent by default).
        text: Meaning of the key.
        fate: used, mapped, accepted or refused.
        effect: Effect of the key here, the reason why it has none, or a replacement.
        is_section: The key is a section with further keys.
        passes: Values of a refused key that request nothing, beside its default.
        switch: Path of the key that switches the surrounding section on, "" without one.
        also: Other accepted spellings of the last name.
        secret: The value is never shown.
    """

    path: str
    owner: tuple[type[Section], str] | None
    default: Any
    text: str
    fate: Fate
    effect: str
    is_section: bool
    passes: tuple[Any, ...] = ()
    switch: str = ""
    also: tuple[str, ...] = ()
    secret: bool = False

    @cached_property
    def type_text(self) -> str:
        """Description of the allowed values, made when it is first read: pydantic takes a quarter of a second for all keys."""
        return type_text(*self.owner) if self.owner else "any value"


@dataclass(frozen=True)
class Nested:
    """Nesting of a field: one section, a list of sections (`list`), or a mapping from the user's names to sections (`map`)."""

    kind: str
    section: type[Section]


def extra_of(field: FieldInfo) -> dict[str, Any]:
    """Return the metadata that the helper of `schema.fields` stored on a field."""
    return cast("dict[str, Any]", field.json_schema_extra or {})


def default_of(field: FieldInfo) -> Any:
    """Return the plain default of a field; None for sections and required values."""
    value = field.get_default(call_default_factory=True)
    return None if value is PydanticUndefined or isinstance(value, Section) else value


def nested_of(section: type[Section], name: str) -> Nested | None:
    """Return the section(s) below a field; None when the field is a plain value."""
    field = section.model_fields[name]
    model = extra_of(field).get("model")
    return Nested("one", model) if model else _nested(field.annotation)


def _nested(annotation: Any) -> Nested | None:
    if is_section_class(annotation):
        return Nested("one", annotation)
    origin, args = get_origin(annotation), get_args(annotation)
    if origin in (Union, UnionType):
        return next((found for arg in args if (found := _nested(arg))), None)
    if origin in (list, dict) and args:
        inner = _nested(args[-1])
        return Nested("list" if origin is list else "map", inner.section) if inner else None
    return None


@cache
def adapter_of(section: type[Section], name: str) -> TypeAdapter[Any]:
    """Return the validator of one field, including its constraints."""
    return TypeAdapter(section.model_fields[name].rebuild_annotation())


@cache
def spellings_of(section: type[Section]) -> dict[str, str]:
    """Return every accepted spelling of a section's keys -> the field's name: names, aliases, and `stage3_` names without the prefix."""
    spellings: dict[str, str] = {}
    for name, field in section.model_fields.items():
        for spelling in (name, *extra_of(field).get("also", ())):
            spellings[spelling] = name
            if spelling.startswith("stage3_"):
                spellings[spelling.removeprefix("stage3_")] = name
    renamed = {alias for field in section.model_fields.values() for alias in extra_of(field).get("also", ())}
    for alias in renamed & section.model_fields.keys():  # an old name with a field (and a fate) of its own
        owner = next(name for name, field in section.model_fields.items() if alias in extra_of(field).get("also", ()))
        spellings[alias] = spellings[alias.removeprefix("stage3_")] = owner
    return spellings


def type_text(section: type[Section], name: str) -> str:
    """Return a description of the values that a key allows."""
    if nested_of(section, name):
        return "a block {...}"
    return _words(adapter_of(section, name).json_schema())


def _words(schema: dict[str, Any]) -> str:
    if "anyOf" in schema:
        return " or ".join(_words(option) for option in schema["anyOf"])
    if "enum" in schema:
        return "one of " + ", ".join(str(value) for value in schema["enum"])
    if "const" in schema:
        return str(schema["const"])
    kind = schema.get("type")
    if kind == "array":
        return f"a list ({_words(schema.get('items', {}))})"
    words = {
        "integer": "a whole number",
        "number": "a number",
        "boolean": "true or false",
        "string": "a text",
        "object": "a block {...}",
        "null": "null",
    }.get(kind or "", "any value")
    # After a validator of hf_zero, pydantic lists the constraint under its own name instead of JSON schema's.
    low, high = schema.get("minimum", schema.get("ge")), schema.get("maximum", schema.get("le"))
    above = schema.get("exclusiveMinimum", schema.get("gt"))
    if low is not None and high is not None:
        return f"{words} from {low} to {high}"
    if low is not None:
        return f"{words}, at least {low}"
    return f"{words} above {above}" if above is not None else words


@dataclass(frozen=True)
class _Governor:
    """The key that determines the fate of the `part` fields below it."""

    path: str
    fate: Fate
    effect: str


def _governor_of(section: type[Section], path: str, own: _Governor) -> _Governor:
    """Return the governor of the fields in `section`: the section's switch if it has one, else ``own``."""
    if section.switch is None:
        return own
    steps = section.switch.split(".")
    holder = section
    for step in steps[:-1]:
        nested = nested_of(holder, step)
        if nested is None:
            raise TypeError(f"{section.__name__}.switch {section.switch!r} names no section")
        holder = nested.section
    extra = extra_of(holder.model_fields[steps[-1]])
    return _Governor(f"{path}.{section.switch}", extra["fate"], extra["effect"])


def _inherited(extra: dict[str, Any], governor: _Governor, text: str) -> tuple[Fate, str]:
    """Return fate and effect of a field: its own, or its governor's for a `part` field."""
    if extra["fate"] != "part":
        return extra["fate"], extra["effect"]
    if governor.fate == "used":
        return "used", text
    if governor.fate == "refused":
        return "refused", f"read only with `{governor.path}`, which is refused"
    return governor.fate, governor.effect


def _walk(section: type[Section], path: str, governor: _Governor) -> Iterator[Key]:
    for name, field in section.model_fields.items():
        here = f"{path}.{name}" if path else name
        extra, nested = extra_of(field), nested_of(section, name)
        inside = governor if extra["fate"] == "part" else _Governor(here, extra["fate"], extra["effect"])
        if nested:
            inside = _governor_of(nested.section, here, inside)
        fate, effect = _inherited(extra, inside if nested else governor, field.description or "")
        passes = tuple(extra.get("passes", ()))
        switch = governor.path if governor.path != here and not nested else ""
        yield Key(
            here,
            (section, name),
            default_of(field),
            field.description or effect,
            fate,
            effect,
            nested is not None,
            passes,
            switch,
            tuple(extra.get("also", ())),
            extra.get("secret", False),
        )
        if nested:
            below = {"one": here, "list": f"{here}[]", "map": f"{here}.{extra.get('each', '<name>')}"}[nested.kind]
            yield from _walk(nested.section, below, inside)
    if section.rest is not None:
        fate, effect = _inherited(extra_of(section.rest), governor, section.rest.description or "")
        yield Key(f"{path}.*", None, None, section.rest.description or "", fate, effect, is_section=False)


@cache
def all_keys() -> dict[str, Key]:
    """Return every key of the configuration by path, in the order of the schema."""
    return {key.path: key for key in _walk(ZeroConfig, "", _Governor("", "used", ""))}
