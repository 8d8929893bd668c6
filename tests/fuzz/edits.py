"""Edits of texts: what is inserted, deleted, replaced, doubled, cut or flipped, and where."""

from __future__ import annotations

from hypothesis import strategies as st


def edited(data: bytes, edits: list[tuple[str, int, int, bytes]]) -> bytes:
    """``data`` after edits: what is done, where, over how many bytes, with what."""
    for kind, place, length, token in edits:
        at = place % (len(data) + 1)
        end = min(at + length, len(data))
        if kind == "insert":
            data = data[:at] + token + data[at:]
        elif kind == "delete":
            data = data[:at] + data[end:]
        elif kind == "replace":
            data = data[:at] + token + data[end:]
        elif kind == "double":
            data = data[:end] + data[at:end] + data[end:]
        elif kind == "cut":
            data = data[:at]
        else:
            data = data[:at] + bytes([data[at] ^ 1 << length % 8]) + data[at + 1 :] if at < len(data) else data
    return data


def edits(tokens: list[str]) -> st.SearchStrategy[list[tuple[str, int, int, bytes]]]:
    kinds = st.sampled_from(["insert", "delete", "replace", "double", "cut", "flip"])
    texts = st.one_of(st.sampled_from(tokens), st.text(max_size=8)).map(lambda text: text.encode("utf-8", "surrogatepass"))
    return st.lists(st.tuples(kinds, st.integers(0, 10**5), st.integers(0, 40), st.one_of(texts, st.binary(max_size=4))), max_size=6)
