"""Compiled blocks that read parameters of other blocks at stage 3: the numbers of plain PyTorch, one graph, no break."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.support import ranks
from tests.support.parity import Run, initialize

WIDTH, STEPS, RANKS = 8, 5, 2


@dataclass(frozen=True)
class Case:
    """One training. ``kept``: blocks stay unsharded from forward to backward; ``declared``: by ``register_external_parameter``."""

    compiled: bool = True
    checkpointing: str = ""
    declared: bool = False
    kept: bool = False
    begins: int = 0  # step before which the blocks are compiled
    frozen: bool = False
    stage: int = 3

    def run(self) -> Run:
        distance = {"stage3_max_reuse_distance": 10**9 * self.kept}
        return Run(stage=self.stage, extra={"zero_optimization": distance if self.stage == 3 else {}})


class Reader(nn.Module):
    """A block that computes with the weight of the block it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(WIDTH, WIDTH) * 0.1)
        self.a = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, other: nn.Module) -> Tensor:
        return torch.tanh(self.a(x) @ other.w) @ self.w + x


class Net(nn.Module):
    """Blocks that read each the next one, and the last one the first."""

    def __init__(self, checkpointing: str = "") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.begin = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList([Reader() for _ in range(3)])
        self.end = nn.Linear(WIDTH, 1)
        self.checkpointing = checkpointing

    def forward(self, x: Tensor) -> Tensor:
        x = self.begin(x)
        for index, layer in enumerate(self.layers):
            other = self.layers[(index + 1) % len(self.layers)]
            if self.checkpointing and torch.is_grad_enabled():
                x = checkpoint(layer, x, other, use_reentrant=self.checkpointing == "reentrant")
            else:
                x = layer(x, other)
        return self.end(x).square().mean()


def _rows(step: int, rank: int) -> Tensor:
    return torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank))


def _plain(case: Case) -> list[float]:
    """Train in plain PyTorch on the rows of all ranks; the losses are those of rank 0."""
    run, model = case.run(), Net()
    model.layers[1].requires_grad_(not case.frozen)
    trained = [param for param in model.parameters() if param.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=run.lr, betas=(0.9, 0.99), eps=run.eps, weight_decay=run.weight_decay)
    losses = []
    for step in range(STEPS):
        for rank in range(RANKS):
            loss = model(_rows(step, rank))
            (loss / RANKS).backward()
            losses += [loss.item()] * (rank == 0)
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            losses.append(model(_rows(step, 0)).item())
    return losses


def _train(case: Case) -> tuple[list[float], list[tuple[int, int]]]:
    """Train, with an evaluation after each step; losses, and (graphs, breaks) after each step."""
    import torch._dynamo.testing
    from torch._dynamo.utils import counters

    from hf_zero.zero import register_external_parameter

    torch._dynamo.reset()
    counters.clear()
    backend = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    model = Net(case.checkpointing)
    model.layers[1].requires_grad_(not case.frozen)
    for index, layer in enumerate(model.layers if case.declared else ()):
        register_external_parameter(layer, model.layers[(index + 1) % len(model.layers)].w)
    engine = initialize(model, case.run())
    losses, counts = [], []
    for step in range(STEPS):
        if case.compiled and step == case.begins:
            engine.compile(backend=backend, fullgraph=True)
        loss = engine(_rows(step, ranks.rank()))
        engine.backward(loss)
        engine.step()
        with torch.no_grad():
            losses += [loss.item(), engine(_rows(step, ranks.rank())).item()]
        counts.append((backend.frame_count, sum(counters["graph_break"].values())))
    engine.destroy()
    return losses, counts


def _train_all(cases: list[Case]) -> list[tuple[list[float], list[float], list[tuple[int, int]]]]:
    uncompiled = [_train(Case(False, case.checkpointing, kept=case.kept, frozen=case.frozen, stage=case.stage))[0] for case in cases]
    return [(before, *_train(case)) for before, case in zip(uncompiled, cases, strict=True)]


def _check(*cases: Case) -> None:
    for case, (uncompiled, compiled, counts) in zip(cases, ranks.run_ranks(_train_all, RANKS, list(cases), timeout=300)[0], strict=True):
        assert compiled == uncompiled, case
        assert compiled == pytest.approx(_plain(case), rel=1e-5), case
        graphs, breaks = zip(*counts, strict=True)
        assert breaks[-1] == 0 and graphs[-1] == graphs[case.begins + 1] > 0, (case, counts)


def test_reads_that_nobody_declared() -> None:
    _check(Case(), Case(checkpointing="not reentrant", kept=True, begins=1))


@pytest.mark.slow  # fast: `test_reads_that_nobody_declared`
def test_other_reads() -> None:
    more = Case(checkpointing="reentrant"), Case(checkpointing="not reentrant"), Case(kept=True, begins=1)
    _check(Case(declared=True), Case(kept=True), Case(begins=1), Case(frozen=True), Case(stage=2), *more)


def _in_loss() -> tuple[Tensor, Tensor]:
    """Compute a compiled penalty behind the forward with a weight that is sharded then."""
    found = []
    for compiles in (False, True):
        torch._dynamo.reset()
        model = Net()
        engine = initialize(model, Case().run())

        def penalty(block: nn.Module) -> Tensor:
            return block.w.square().sum()  # type: ignore[operator, union-attr]

        for step in range(2):
            loss = engine(_rows(step, ranks.rank()))
            loss = loss + (torch.compile(penalty, backend="eager") if compiles else penalty)(model.layers[1])
            engine.backward(loss)
            engine.step()
        found.append(loss.detach())
        engine.destroy()
    return found[0], found[1]


def test_a_compiled_loss_that_reads_a_block() -> None:
    plain, compiled = ranks.run_ranks(_in_loss, RANKS, timeout=300)[0]
    assert torch.equal(plain, compiled)
