"""Suggest known names for an unknown key."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import SequenceMatcher
from functools import lru_cache

_LONGEST = 200  # more than twice the length of any known name; longer names take long to compare


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
