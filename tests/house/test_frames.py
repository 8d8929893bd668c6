"""No callers' frames are read: what an engine must know of its caller is said to it (``hf_zero.integrations.callers``)."""

from __future__ import annotations

import ast
import re

from tests.support.sources import modules

TELLS = "hf_zero.system.stacks"  # says where a rank is that others wait for; nothing obeys it
READS = {"_getframe", "_current_frames", "currentframe", "getouterframes", "f_back", "f_locals", "f_globals"}
NAMED = re.compile("|".join((*sorted(READS), r"inspect\s*\.\s*stack")))  # in the text of a file that need not be parsed without one


def reads(source: str) -> list[int]:
    """Lines in which a frame is read."""
    if not NAMED.search(source):
        return []
    return [
        node.lineno
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Attribute) and (node.attr in READS or ast.unparse(node) == "inspect.stack")
    ]


def test_no_frame_is_read() -> None:
    found = {name: lines for name, path in modules().items() if name != TELLS and (lines := reads(path.read_text(encoding="utf-8")))}
    assert not found


def test_every_way_to_read_one_is_noticed() -> None:
    for line in ("sys._getframe(1)", "inspect.currentframe()", "inspect.stack()", "frame.f_back", "frame.f_locals['self']"):
        assert reads(line) == [1], line
    assert reads("torch.stack(values)") == []
