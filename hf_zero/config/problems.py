"""Collect faults of a configuration, so that all are reported at once, and suggest known names for an unknown key."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from functools import lru_cache

from hf_zero.errors import ConfigError, UnsupportedError
from hf_zero.system.secrets import hidden

_LONGEST = 200  # more than twice the length of any known name; longer names take long to compare


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
    arguments: list[str] = field(default_factory=list)

    def error(self, key: str, text: str) -> None:
        """Record that the value of `key` is wrong."""
        self.errors.append(f"`{key}` {text}")

    def refuse(self, key: str, value: object, instead: str) -> None:
        """Record that `key` requests a feature that this version does not have."""
        self.refusals.append(f"`{key}` is {show(value)}: {instead}")

    def mismatch(self, key: str, value: object, source: str, expected: object) -> None:
        """Record that `key` contradicts the value of its source."""
        self.mismatches.append(f"ds {key}={show(value)} vs {source}={show(expected)}")
        if source.isidentifier():  # a single argument, and no calculated value
            self.arguments.append(f"--{source} {show(value)}")

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
            blocks.append(_block(head, self.mismatches) + self._tail())
        return "\n".join(blocks)

    def _tail(self) -> str:
        """Return the remedy for mismatches as the last line of the report."""
        tail = '\nThe easiest way is to set these values to "auto" in the DeepSpeed config'
        if len(self.arguments) < len(self.mismatches):
            return f"{tail}."
        return f"{tail}; to keep them, give the arguments the same values: {' '.join(self.arguments)}."

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


def nearest(name: str, known: Iterable[str]) -> str | None:
    """Return the known name that `name` resembles most; None when it resembles none.

    Two names are similar when they are equal up to letter case and separators, when a few single-character edits turn one into the other
    (one edit for short names, two or three for longer ones), when long names share most of their text, when they have the same words in
    another order, or when one is the other without a word at the end (`train_batch`). Names of up to three characters must be equal up to
    case or swapped letters, because most short names are one edit away from `lr`.
    """
    if len(name) > _LONGEST:
        return None
    best: tuple[float, str] | None = None
    for candidate in known:
        score = max(_similarity(_plain(name), _plain(candidate)), 0.8 * (_is_cut_short(name, candidate) or _is_reordered(name, candidate)))
        if score > 0 and (best is None or score > best[0]):
            best = (score, candidate)
    return best[1] if best else None


def _is_cut_short(name: str, known: str) -> bool:
    """Return whether `name` is `known` without its last words: at least two words, and two thirds of the words, must be left."""
    words, known_words = name.lower().split("_"), known.lower().split("_")
    return 2 <= len(words) < len(known_words) <= 1.5 * len(words) and words == known_words[: len(words)]


def _is_reordered(name: str, known: str) -> bool:
    """Return whether both names have the same words, at least two, in another order (`comm_overlap`)."""
    words = name.lower().split("_")
    return len(words) > 1 and sorted(words) == sorted(known.lower().split("_"))


def _plain(name: str) -> str:
    return "".join(letter for letter in name.lower() if letter.isalnum())


def _similarity(name: str, known: str) -> float:
    """Return the similarity of two names, from 0 (different) to 1 (equal)."""
    if not name or not known:
        return 0.0
    if name == known:
        return 1.0
    if len(known) <= 3:
        return 0.9 if len(name) == len(known) and sorted(name) == sorted(known) else 0.0
    longest = max(len(name), len(known))
    allowed = 1 if len(known) <= 7 else 2 if len(known) <= 11 else 3
    if abs(len(name) - len(known)) <= allowed:
        edits = _edits(name, known)
        if edits <= allowed:
            return 1.0 - edits / longest
    ratio = SequenceMatcher(None, name, known).ratio() if longest >= 8 else 0.0
    return ratio * 0.9 if ratio >= 0.84 else 0.0


@lru_cache(maxsize=4096)
def _edits(one: str, two: str) -> int:
    """Return the number of insertions, deletions, substitutions and swaps of neighbours that turn `one` into `two`."""
    before: list[int] = []
    row = list(range(len(two) + 1))
    for i, a in enumerate(one, start=1):
        now = [i]
        for j, b in enumerate(two, start=1):
            cost = min(row[j] + 1, now[j - 1] + 1, row[j - 1] + (a != b))
            if i > 1 and j > 1 and a == two[j - 2] and one[i - 2] == b:
                cost = min(cost, before[j - 2] + 1)
            now.append(cost)
        before, row = row, now
    return row[-1]
