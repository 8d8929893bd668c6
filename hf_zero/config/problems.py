"""Faults of a configuration, collected so that all are reported at once."""

from __future__ import annotations

from dataclasses import dataclass, field

from hf_zero.errors import ConfigError, UnsupportedError
from hf_zero.system.secrets import hidden


class RefusedKeyError(ConfigError, UnsupportedError):
    """Error raised if the configuration requests features that are not provided. The message names each key and a replacement."""


@dataclass
class Problems:
    """Collector of findings by kind; `raise_all` raises one exception for all of them.

    Args:
        strict: Count warnings as errors.
        kind: Class of the exception; a more special one where a caller may need to distinguish it.
    """

    strict: bool = False
    kind: type[ConfigError] = ConfigError
    errors: list[str] = field(default_factory=list)
    refusals: list[str] = field(default_factory=list)
    mismatches: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    def error(self, key: str, text: str) -> None:
        """Record that the value of `key` is wrong."""
        self.errors.append(f"`{key}` {text}")

    def refuse(self, key: str, value: object, instead: str) -> None:
        """Record that `key` requests a feature that this version does not have."""
        self.refusals.append(f"`{key}` is {show(value)}: {instead}")

    def mismatch(self, key: str, value: object, source: str, expected: object) -> None:
        """Record that `key` contradicts the value of its source."""
        self.mismatches.append(f"ds {key}={show(value)} vs {source}={show(expected)}")

    def warn(self, key: str, text: str) -> None:
        """Record an unusual but harmless value; an error under `strict`."""
        (self.errors if self.strict else self.warnings).append(f"`{key}` {text}")

    @property
    def found(self) -> bool:
        """Return whether there is a finding that must stop the run."""
        return bool(self.errors or self.refusals or self.mismatches)

    def report(self) -> str:
        """Return all findings that must stop the run as one text, grouped by the user's remedy."""
        blocks = []
        if self.errors:
            blocks.append(_block("Please correct the following values of the DeepSpeed config:", self.errors))
        if self.refusals:
            blocks.append(_block("The DeepSpeed config has settings that hf_zero does not provide:", self.refusals))
        if self.mismatches:
            head = "Please correct the following DeepSpeed config values, which mismatch the training arguments:"
            tail = '\nThe easiest way is to set these values to "auto" in the DeepSpeed config.'
            blocks.append(_block(head, self.mismatches) + tail)
        return "\n".join(blocks)

    def raise_all(self) -> None:
        """Raise one exception with all findings that must stop the run; return if there are none.

        Raises:
            RefusedKeyError: A refused key requests its feature (the message has the other findings, too).
            ConfigError: There are only other findings.
        """
        if self.refusals:
            raise RefusedKeyError(self.report())
        if self.found:
            raise self.kind(self.report())


def _block(head: str, lines: list[str]) -> str:
    return "\n".join([head, *(f"- {line}" for line in lines)])


def show(value: object) -> str:
    """Return a value as JSON text, shortened when long; secrets inside it are masked."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    value = hidden(value)
    try:
        text = f'"{value}"' if isinstance(value, str) else str(value)
    except ValueError:  # Python refuses to print integers of thousands of digits
        return "a number with thousands of digits"
    return text if len(text) <= 80 else text[:77] + "..."
