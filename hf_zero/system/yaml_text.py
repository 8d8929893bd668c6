"""YAML of others: plain values, without the parts of the language that let a short text become a large value."""

from __future__ import annotations

from functools import cache
from typing import Any

LIMIT_CHARACTERS = 32 * 2**10  # PyYAML reads some 100 kB a second where a text is nothing but marks
_LEVELS = 64


def read_yaml(text: str) -> Any:
    """The value of a YAML text.

    Aliases (``*name``) are refused: nine lines of them stand for billions of values. So are lists inside lists without end.

    Args:
        text: At most 32 kB; files of settings have two.

    Raises:
        yaml.YAMLError: It is no YAML, has an alias, or is nested too deep.
        ValueError: It is longer, or holds a value that is none (a date in month 13).
        RecursionError: It is nested far too deep.
    """
    if len(text) > LIMIT_CHARACTERS:
        raise ValueError(f"it has {len(text):,} characters, more than the {LIMIT_CHARACTERS:,} of YAML that are read")
    import yaml

    return yaml.load(text, _plain_loader())  # noqa: S506  # a SafeLoader


@cache
def _plain_loader() -> Any:
    import yaml

    class PlainLoader(yaml.SafeLoader):
        """Refuses aliases and endless nesting."""

        depth = 0

        def compose_node(self, parent: Any, index: Any) -> Any:
            """The next node."""
            if self.check_event(yaml.AliasEvent):
                mark = self.peek_event().start_mark
                raise yaml.composer.ComposerError(None, None, "it has an alias (*name): write the value in its place", mark)
            self.depth += 1
            if self.depth > _LEVELS:
                raise yaml.composer.ComposerError(None, None, f"it is nested more than {_LEVELS} deep", self.peek_event().start_mark)
            try:
                return super().compose_node(parent, index)
            finally:
                self.depth -= 1

    return PlainLoader
