"""Declaration of configuration keys: lenient value types, the `Section` base class, and one helper per fate.

A key is one pydantic field. Its annotation is the type, and the helper that declares it gives default, help and fate:

=============  ==========================================================================================================
`used`         the engine reads the value
`mapped`       an old spelling; the reader translates it into the key it names
`accepted`     has no effect here, for the reason given
`refused`      raises an error when it requests its feature, and names a replacement
`part`         belongs to a section that is switched on by another key, and shares that key's fate
=============  ==========================================================================================================
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Annotated, Any, ClassVar, Literal, TypeGuard, get_origin

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from pydantic.fields import FieldInfo

from hf_zero.system.secrets import hidden_under

Fate = Literal["used", "mapped", "accepted", "refused", "part"]

OFF_VALUES: tuple[Any, ...] = (None, False, 0, "", "none", {}, [])
"""Values that leave a switch of any type off."""


# --------------------------------------------------------------------------------------------------------------- values


_INT_END = 2**63  # whole numbers are counts that torch and the native library store in 64 bits


def _lenient_int(value: Any) -> Any:
    """Accept integers as people write them: 2e8, "2e8", " 16 ". Fractions, booleans and other texts are left for pydantic to refuse."""
    if isinstance(value, bool):
        raise ValueError("a boolean is not a number")
    if isinstance(value, str):
        try:
            value = int(value)
        except ValueError:
            value = _parse_float(value)
    if isinstance(value, float):
        if not math.isfinite(value) or value != int(value):
            raise ValueError("not a whole number")
        value = int(value)
    if isinstance(value, int) and abs(value) >= _INT_END:
        raise ValueError("more than fits into 64 bits")
    return value


def _lenient_float(value: Any) -> Any:
    if isinstance(value, bool):
        raise ValueError("a boolean is not a number")
    value = _parse_float(value) if isinstance(value, str) else value
    if isinstance(value, int) and abs(value) >= _INT_END:
        value = _parse_float(str(value)) if abs(value) < 10**400 else math.inf
    if isinstance(value, float) and math.isnan(value):
        raise ValueError("not a number")
    return value


def _parse_float(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError("not a number") from None


def _lower_text(value: Any) -> Any:
    return value.strip().lower() if isinstance(value, str) else value


_DTYPE_NAMES = {
    "fp16": "fp16", "float16": "fp16", "half": "fp16",
    "bf16": "bf16", "bfloat16": "bf16", "bfp16": "bf16",
    "fp32": "fp32", "float32": "fp32", "float": "fp32"
}  # fmt: skip


def _dtype_name(value: Any) -> Any:
    """Return fp16, bf16 or fp32 for any of the usual spellings, torch dtypes included (`str(torch.bfloat16)` is "torch.bfloat16")."""
    text = str(value).strip().lower().removeprefix("torch.")
    return _DTYPE_NAMES.get(text, value)


def _inf_is_never(value: Any) -> Any:
    """Return None for infinity, which accelerate writes for "never print"; None has the same meaning and is an ordinary value."""
    value = _parse_float(value) if isinstance(value, str) else value
    return None if isinstance(value, float) and math.isinf(value) else value


def _one_is_a_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


ANY_CASE = BeforeValidator(_lower_text)
"""For `Annotated[Literal[...], ANY_CASE]`: letter case does not matter."""
Int = Annotated[int, BeforeValidator(_lenient_int)]
Float = Annotated[float, BeforeValidator(_lenient_float), Field(allow_inf_nan=False)]
Bool = Annotated[bool, ANY_CASE]
"""`true`, "true", "True", "1", "yes", 1 and their opposites."""
Count = Annotated[int, BeforeValidator(_lenient_int), Field(gt=0)]
Size = Annotated[int, BeforeValidator(_lenient_int), Field(ge=0)]
NonNegative = Annotated[float, BeforeValidator(_lenient_float), Field(ge=0, allow_inf_nan=False)]
Positive = Annotated[float, BeforeValidator(_lenient_float), Field(gt=0, allow_inf_nan=False)]
Bound = Annotated[float, BeforeValidator(_lenient_float), Field(ge=0)]
"""An upper bound; infinity means no bound."""
Share = Annotated[float, BeforeValidator(_lenient_float), Field(ge=0, le=1)]
Texts = Annotated[list[str], BeforeValidator(_one_is_a_list)]
"""A list of texts; one text is a list of one."""
Steps = Annotated[Size | None, BeforeValidator(_inf_is_never)]
Dtype = Annotated[Literal["fp16", "bf16", "fp32"], BeforeValidator(_dtype_name)]
Device = Annotated[Literal["none", "cpu", "nvme"], ANY_CASE]


# ------------------------------------------------------------------------------------------------------------- sections


class Section(BaseModel):
    """A block of the configuration. Immutable; the reader reports unknown keys before a section is created."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())

    switch: ClassVar[str | None] = None
    """Key (dotted, relative to the section) that switches the section on; while it is off, no key of the section has an effect."""
    free_keys: ClassVar[bool] = False
    """Keys beyond the fields are allowed (the user's own section)."""
    rest: ClassVar[FieldInfo | None] = None
    """Fate of those further keys, if the key list has a row for them (`amp.*`)."""

    def __init_subclass__(cls, switch: str | None = None, **settings: Any) -> None:
        super().__init_subclass__(**settings)
        cls.switch = switch

    def __repr_args__(self) -> Iterator[tuple[str | None, Any]]:
        """Yield the fields for the repr: without secrets, and texts without credentials."""
        for name, value in super().__repr_args__():
            yield name, hidden_under(name, value)


SectionClass = type[Section]


def is_section_class(value: Any) -> TypeGuard[SectionClass]:
    """Return whether ``value`` is a section class; in Python 3.10 ``list[str]`` too is an instance of ``type``."""
    return isinstance(value, type) and get_origin(value) is None and issubclass(value, Section)


class FreeSection(Section):
    """A section that accepts further keys beside its fields."""

    model_config = ConfigDict(frozen=True, extra="allow", protected_namespaces=())

    free_keys: ClassVar[bool] = True


def is_on(value: Any, passes: Iterable[Any] = ()) -> bool:
    """Return whether the (typed) value of a switch turns its section on; `passes` are values that leave it off, such as a degree of 1."""
    return value not in OFF_VALUES and value not in tuple(passes)


# ---------------------------------------------------------------------------------------------------------------- fates


def _field(default: Any, text: str, fate: Fate, effect: str, extra: dict[str, Any]) -> Any:
    """Return the pydantic field for the helpers below; a callable default (a section class, `list`) becomes a factory.

    Among the extras, `secret` marks a value that is never shown: not by `explain`, in messages, or in the section's repr. `model` is the
    section that describes the keys of a block which stays a plain dictionary.
    """
    extras = {"fate": fate, "effect": effect, **{name: value for name, value in extra.items() if value not in (None, (), {})}}
    shown = not extra.get("secret", False)
    if callable(default):
        factory: Callable[[], Any] = default
        return Field(default_factory=factory, description=text, json_schema_extra=extras, repr=shown)
    return Field(default=default, description=text, json_schema_extra=extras, repr=shown)


def used(default: Any, text: str, **extra: Any) -> Any:
    """Return a field whose value the engine reads."""
    return _field(default, text, "used", text, extra)


def accepted(default: Any, text: str, why: str, **extra: Any) -> Any:
    """Return a field that has no effect, for the reason `why`."""
    return _field(default, text, "accepted", why, extra)


def mapped(default: Any, text: str, into: str, **extra: Any) -> Any:
    """Return a field for an old spelling; `into` names the key that it is translated to."""
    return _field(default, text, "mapped", f"read as {into}", {"into": into, **extra})


def refused(default: Any, text: str, instead: str, **extra: Any) -> Any:
    """Return a field that raises an error when it requests its feature; `instead` names a replacement."""
    return _field(default, text, "refused", instead, extra)


def part(default: Any, text: str, **extra: Any) -> Any:
    """Return a field that has an effect only when the switch of its section is on; it shares the fate of the switch."""
    return _field(default, text, "part", "", extra)


def section(default: Any, text: str, **extra: Any) -> Any:
    """Return a nested section without a fate of its own: it has the fate of its switch, or else of its keys."""
    return _field(default, text, "part", "", {"section": True, **extra})


def asks(value: Any, default: Any, passes: Iterable[Any] = ()) -> bool:
    """Return whether a value of a refused key requests its feature: it is neither the default, nor empty, nor listed as harmless."""
    return value not in OFF_VALUES and value != default and value not in tuple(passes)
