"""The base class of DeepSpeed's configuration sections, for programs that describe sections of their own with it."""

from __future__ import annotations

from functools import reduce
from typing import Any

from pydantic import BaseModel, ConfigDict

from hf_zero.observe import logger


class DeepSpeedConfigModel(BaseModel):
    """A section whose keys are its pydantic fields; unknown keys are errors, values that are set later are checked too.

    An old key says with ``Field(..., json_schema_extra={"deprecated": True, ...})`` what becomes of it: ``new_param`` is the key that it is
    read as (dotted where that key belongs to a section inside this one), ``new_param_fn`` makes the new value of the old one,
    ``set_new_param=False`` leaves it at the warning, and ``deprecated_msg`` is added to that.

    Args:
        strict: Keep values that are "auto"; else they count as not given.
        **data: The keys.

    Raises:
        ValidationError: A key or a value is wrong.
        AssertionError: An old key and the one that it is read as are both given.
    """

    model_config = ConfigDict(
        validate_default=True,
        validate_assignment=True,
        use_enum_values=True,
        populate_by_name=True,
        extra="forbid",
        arbitrary_types_allowed=True,
        protected_namespaces=(),
    )

    def __init__(self, strict: bool = False, **data: Any) -> None:
        given = data if strict else {key: value for key, value in data.items() if not (isinstance(value, str) and value == "auto")}
        super().__init__(**given)
        for name, field in type(self).model_fields.items():
            extras = field.json_schema_extra
            if isinstance(extras, dict) and extras.get("deprecated") and name in self.model_fields_set:
                self._pass_on(name, extras)

    def _pass_on(self, old: str, extras: dict[str, Any]) -> None:
        new = extras.get("new_param", "")
        logger.warning("; ".join(filter(None, (f"{old} is deprecated", f"use {new}" if new else "", extras.get("deprecated_msg", "")))))
        if not new or not extras.get("set_new_param", True):
            return
        *sections, key = new.split(".")
        section = reduce(getattr, sections, self)
        if key in section.model_fields_set:
            raise AssertionError(f"{old} is the old name of {new}, and both are given; leave {old} out")
        setattr(section, key, extras.get("new_param_fn", lambda value: value)(getattr(self, old)))
