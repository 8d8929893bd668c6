"""Gradient penalties over divided sequences: derivatives of derivatives are those of whole ones, or an error says which part has none."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from hf_zero.comm.back_end import open_collectives
from hf_zero.comm.collectives import Collectives
from hf_zero.comm.topology import axis_over
from hf_zero.errors import UnsupportedError
from hf_zero.sequence_parallel.blocks import Scores
from hf_zero.sequence_parallel.exchange import all_to_all
from hf_zero.sequence_parallel.joining import Layout, given_to_all, join, join_loss, join_tokens
from hf_zero.sequence_parallel.ring import _Ring, _Rules
from tests.support import ranks

RANKS = 2
Plain = Callable[[list[Tensor], int], Tensor]  # the tensors of all ranks, a rank -> its result
COUNTED = (3.0, 5.0)


def rows(rank: int) -> Tensor:
    return torch.randn(2, 2, 4, 3, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)


def plain_of_exchange(given: list[Tensor], rank: int) -> Tensor:
    return torch.stack([other.sin()[rank] for other in given]).square() + torch.stack([other[rank] for other in given])


def of_exchange(group: Collectives, mine: Tensor) -> Tensor:
    first, second = all_to_all(group, mine.sin(), mine)
    return first.square() + second


def in_order(layout: Layout, given: list[Tensor], _rank: int) -> Tensor:
    return layout.in_order(torch.cat(given, dim=1), 1)


def plain_of_loss(given: list[Tensor], _rank: int, mean: bool) -> Tensor:
    if not mean:
        return sum((part.square().sum() for part in given), torch.zeros((), dtype=torch.float64))
    return sum(count / sum(COUNTED) * part.square().mean() for count, part in zip(COUNTED, given, strict=True))  # type: ignore[return-value]


def of_loss(group: Collectives, mine: Tensor, mean: bool) -> Tensor:
    loss = mine.square().mean() if mean else mine.square().sum()
    return join_loss(group, loss, torch.tensor(COUNTED[ranks.rank()]), mean)


def plain_of_given(given: list[Tensor], rank: int) -> Tensor:
    """Every rank's own values, with the mean of the ranks' gradients."""
    mean = torch.stack(given).mean(0)
    return given[rank].detach() + mean - mean.detach()


def penalty(result: Tensor, weight: Tensor, mine: Tensor) -> Tensor:
    """Return a score of the result of one rank with a penalty on its gradient."""
    score = (result.tanh() * weight).sum()
    (gradient,) = torch.autograd.grad(score, mine, create_graph=True)
    return score + (gradient.norm() - 1).square()


def weight_of(result: Tensor, rank: int) -> Tensor:
    return torch.randn(result.shape, generator=torch.Generator().manual_seed(9 + rank), dtype=result.dtype)


def expected(plain: Plain) -> list[Tensor]:
    """Gradients of the sum over ranks of scores and penalties, in one process."""
    given = [rows(rank).requires_grad_() for rank in range(RANKS)]
    results = [plain(given, rank) for rank in range(RANKS)]
    score = sum((results[rank].tanh() * weight_of(results[rank], rank)).sum() for rank in range(RANKS))
    gradients = torch.autograd.grad(score, given, create_graph=True)  # type: ignore[arg-type]
    total = score + sum((gradient.norm() - 1).square() for gradient in gradients)
    return list(torch.autograd.grad(total, given))  # type: ignore[arg-type]


def check_all() -> None:
    group = open_collectives(axis_over(dist.group.WORLD))  # type: ignore[arg-type]
    layout = Layout(group)
    pairs: dict[str, tuple[Callable[[Tensor], Tensor], Plain]] = {
        "exchange": (partial(of_exchange, group), plain_of_exchange),
        "join": (lambda mine: join(group, mine, 1), lambda given, _: torch.cat(given, dim=1)),
        "tokens": (lambda mine: join_tokens(layout, mine), partial(in_order, layout)),
        "mean": (lambda mine: of_loss(group, mine, True), lambda given, rank: plain_of_loss(given, rank, True)),
        "sum": (lambda mine: of_loss(group, mine, False), lambda given, rank: plain_of_loss(given, rank, False)),
        "given": (partial(given_to_all, group), plain_of_given),
    }
    for name, (divided, plain) in pairs.items():
        mine = rows(ranks.rank()).requires_grad_()
        result = divided(mine)
        penalty(result, weight_of(result, ranks.rank()), mine).backward()
        torch.testing.assert_close(mine.grad, expected(plain)[ranks.rank()], msg=lambda text, name=name: f"{name}: {text}")


def test_derivatives_of_derivatives() -> None:
    ranks.run_ranks(check_all, RANKS)


def check_refused() -> None:
    """The gradient of the ring's attention is computed block by block, without a graph."""
    group = open_collectives(axis_over(dist.group.WORLD))  # type: ignore[arg-type]
    mine = [torch.randn(1, 2, 4, 3, requires_grad=True) for _ in range(3)]
    gradients = torch.autograd.grad(_ring(group, mine).sum(), mine, create_graph=True)
    torch.testing.assert_close(gradients, torch.autograd.grad(_ring(group, mine).sum(), mine))
    with pytest.raises(UnsupportedError, match="attention of context parallelism was differentiated twice"):
        gradients[0].square().sum().backward()


def _ring(group: Collectives, mine: list[Tensor]) -> Tensor:
    out: Tensor = _Ring.apply(Layout(group), group, _Rules(Scores(1.0), True, None, 1), *mine)  # type: ignore[no-untyped-call]
    return out


def test_attention_without_second_derivative() -> None:
    ranks.run_ranks(check_refused, RANKS)
