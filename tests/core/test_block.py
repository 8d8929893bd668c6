"""Test a block's counts, also if its module runs several times, raises, or is recomputed."""

from __future__ import annotations

import ast
from types import SimpleNamespace
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from hf_zero.core.schedule.block import Block
from tests.support.processes import REPO

_COUNTS = {"open", "pending", "checkpointed", "recomputes", "read_elsewhere"}


def _block(name: str = "block") -> Block:
    block: Any = Block(name, None, [])  # type: ignore[arg-type]
    block.gradients = [SimpleNamespace(collected=SimpleNamespace(piecemeal=False))]
    return block  # type: ignore[no-any-return]


def test_only_the_block_writes_its_counts() -> None:
    writers = set()
    for path in sorted((REPO / "hf_zero" / "core").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and node.attr in _COUNTS:
                writers.add(path.name)
    assert writers == {"block.py"}


def test_forwards_of_one_module_inside_each_other_are_counted() -> None:
    block = _block()
    block.entered(recomputed_later=False)
    block.entered(recomputed_later=False)
    block.left()
    assert block.open == 1
    block.left()
    block.left()  # of a forward that was forgotten meanwhile
    assert block.open == 0
    block.entered(recomputed_later=False)
    block.broken_off()
    assert block.open == 0


def test_a_block_that_is_recomputed_twice_gets_its_gradients_in_pieces() -> None:
    block = _block()
    block.entered(recomputed_later=True)
    assert not block.gradients[0].collected.piecemeal
    block.entered(recomputed_later=True)
    assert block.gradients[0].collected.piecemeal and block.checkpointed == 2
    block.ran_again()
    block.ran_again()
    block.ran_again()
    assert block.checkpointed == 0


def test_the_end_of_an_iteration_forgets_what_was_to_come() -> None:
    block = _block()
    block.entered(recomputed_later=True)
    block.watched(recomputes=True)
    assert block.awaited
    block.reset()
    assert (block.open, block.pending, block.checkpointed, block.recomputes) == (0, 0, 0, 0) and not block.awaited
    block.backward_began()
    assert block.pending == 0


def test_a_block_is_awaited_until_its_forward_is_recomputed() -> None:
    block = _block()
    block.watched(recomputes=True)
    block.backward_began()  # an output's gradient may be known long before the recomputation
    assert block.awaited
    recomputed: list[bool] = []

    def function(x: torch.Tensor) -> torch.Tensor:
        block.recomputed()
        recomputed.append(block.awaited)
        return x.sin().cos()

    checkpoint(function, torch.ones(2, requires_grad=True), use_reentrant=False).sum().backward()
    assert recomputed == [True, False]


def test_who_reads_a_block_is_remembered_once() -> None:
    block, reader, root = _block("a"), _block("b"), _block("root")
    block.read_by(reader, root)
    block.read_by(reader, root)
    assert reader.externals == root.externals == [block] and block.read_elsewhere and block.saved_outside
    reader.read_by(reader, root)
    assert reader.externals == [block]
