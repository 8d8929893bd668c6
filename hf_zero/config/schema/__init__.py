"""The configuration schema: every key of the file as one field, with type, default, help and fate."""

from hf_zero.config.schema.fields import FreeSection, Section
from hf_zero.config.schema.root import ZeroConfig

__all__ = ["FreeSection", "Section", "ZeroConfig"]
