"""Provide the base class of DeepSpeed's configuration sections, for programs that define their own sections."""

from __future__ import annotations

from functools import reduce
from typing import Any

from pydantic import BaseModel, ConfigDict

from hf_zero.observe import logger


class DeepSpeedConfigModel(BaseModel):
    """A section whose keys are its pydantic fields; unknown keys are errors, and assigned values are validated too.

    A deprecated key has ``Field(..., json_schema_extra={"deprecated": True, ...})`` with further entries: ``new_param`` is the key that
    replaces it (dotted if that key belongs to a section inside this one), ``new_param_fn`` converts the old value to the new one,
    ``set_new_param=False`` only warns, and ``deprecated_msg`` is added to the warning.

    Args:
        strict: Whether values "auto" are kept; otherwise these keys count as not given.
        **data: Keys and values of the section.

    Raises:
        ValidationError: A key or a value is wrong.
        AssertionError: A deprecated key and its replacement are both given.
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
