"""What the configuration can ask for and this version does not have.

One row per feature. A field of the schema that belongs to a feature is declared with `later(..., feature="name")`: it is refused
while the row stands here, and used as soon as the row is deleted. Building a feature therefore means deleting its row.
"""

from __future__ import annotations

NOT_YET: dict[str, str] = {}
