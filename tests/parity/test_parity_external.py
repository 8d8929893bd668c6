"""Test parameters read by a module that does not own them: declared, found by hooks, or refused by name; never silently empty."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.support import ranks
from tests.support.models import CASES, CLASSES, LENGTH, Block, class_loss
from tests.support.parity import Run, check_training, initialize
from tests.support.rows import slow_but, thinned

STAGES = (0, 1, 2, 3)


class Borrower(Block):
    """A block that multiplies by a matrix of another block, which it does not register as its own."""

    def __init__(self, lender: Block, declare: bool) -> None:
        super().__init__()
        self.lent = (lender,)  # a tuple: not a submodule
        if declare:
            import hf_zero

            hf_zero.zero.register_external_parameter(self, lender.up.weight)

    def forward(self, hidden: Tensor) -> Tensor:
        weight = self.lent[0].up.weight  # (2 * width, width)
        return super().forward(hidden) + functional.linear(functional.linear(hidden, weight), weight.T)


class Lending(nn.Module):
    """Two blocks, then a borrower of the first block's matrix, which was resharded before."""

    def __init__(self, declare: bool = True, from_root: bool = False) -> None:
        super().__init__()
        self.entry = nn.Linear(LENGTH, 16)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.blocks.append(Borrower(self.blocks[0], declare))
        self.head = nn.Linear(16, CLASSES)
        self.from_root = from_root

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.entry(inputs)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden)


class RootBorrows(Lending):
    """A model whose root reads a block's matrix after the block ran (an auxiliary loss, a tied projection)."""

    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(inputs) + self.blocks[1].down.weight.sum() * 0.01


class Prepared(nn.Module):
    """A model with a hook before the forward that makes the inputs with its own modules, as ms-swift's multimodal templates do."""

    def __init__(self) -> None:
        super().__init__()
        self.entry = nn.Linear(LENGTH, 16)
        self.tower = nn.ModuleList([Block(), Block()])
        self.blocks = nn.ModuleList([Block(), Block(), Block()])
        self.head = nn.Linear(16, CLASSES)
        self.register_forward_pre_hook(Prepared.prepare)

    def prepare(self, arguments: tuple[Tensor]) -> tuple[Tensor]:
        hidden = self.entry(*arguments)
        for block in self.tower:
            hidden = block(hidden)
        return (hidden,)

    def forward(self, hidden: Tensor) -> Tensor:
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden)


def _prepared(run: Run) -> None:
    def build() -> nn.Module:
        torch.manual_seed(0)
        return Prepared()

    check_training(build, CASES["mlp"].rows, class_loss, run, label="modules called by a hook before the forward")


def _declared(run: Run) -> None:
    def build() -> nn.Module:
        torch.manual_seed(0)
        return Lending(declare=True)

    check_training(build, CASES["mlp"].rows, class_loss, run, label="declared external parameter")


def _root_reads_block_parameter(run: Run) -> None:
    def build() -> nn.Module:
        import hf_zero

        torch.manual_seed(0)
        model = RootBorrows(declare=True)
        hf_zero.zero.register_external_parameter(model, model.blocks[1].down.weight)
        return model

    check_training(build, CASES["mlp"].rows, class_loss, run, label="root reads a block's parameter")


class Penalised(Lending):
    """A model whose forward adds a penalty on the parameters that it finds by iteration, before its blocks run or after them."""

    def __init__(self, first: bool) -> None:
        super().__init__()
        self.first = first

    def forward(self, inputs: Tensor) -> Tensor:
        before = _penalty(self) if self.first else None
        logits = super().forward(inputs)
        return logits * (1 + (_penalty(self) if before is None else before))


def _penalty(module: nn.Module) -> Tensor:
    norms = [torch.linalg.vector_norm(param) for name, param in module.named_parameters() if "blocks" in name]
    return 0.01 * torch.stack(norms).square().sum()


def _penalised_loss(model: nn.Module, batch: object) -> Tensor:
    module = getattr(model, "module", model)
    loss = class_loss(model, batch)  # type: ignore[arg-type]
    if module is not model and ranks.rank() == 0:  # one rank alone, for its log
        assert all(param.norm() > 0 for param in module.blocks[0].parameters())
    return loss + _penalty(module)


def _found_by_iteration(where: str, run: Run) -> None:
    def build() -> nn.Module:
        torch.manual_seed(0)
        return Lending() if where == "loss" else Penalised(where == "before the blocks")

    loss = _penalised_loss if where == "loss" else class_loss
    check_training(build, CASES["mlp"].rows, loss, run, label=f"parameters found by iteration: {where}")


def _not_declared(stage: int) -> str:
    """Return the outcome: correct (the engine found it), or an error that names the parameter."""
    torch.manual_seed(0)
    model = Lending(declare=False)
    batch = CASES["mlp"].rows(0, 0, ranks.rank())
    with torch.no_grad():
        expected = class_loss(model, batch).item()
    engine = initialize(model, Run(stage=stage))
    try:
        found = class_loss(engine, batch).item()
    except Exception as error:  # the type depends on where the empty tensor would have been used
        return str(error)
    assert found == pytest.approx(expected, rel=1e-6)
    return "right"


@pytest.mark.fast_rows("3-bf16", "0-fp32")
@thinned(stage=STAGES, dtype=["fp32", "bf16"])
def test_declared_external_parameter(stage: int, dtype: str) -> None:
    ranks.run_ranks(_declared, 2, Run(stage=stage, dtype=dtype, accumulation=2))


@pytest.mark.parametrize("stage", slow_but(STAGES, 2, 3))
def test_parameter_of_a_block_read_by_the_root(stage: int) -> None:
    ranks.run_ranks(_root_reads_block_parameter, 2, Run(stage=stage, accumulation=2))


@pytest.mark.parametrize("stage", slow_but(STAGES, 3))
def test_modules_called_by_a_hook_before_the_forward(stage: int) -> None:
    ranks.run_ranks(_prepared, 2, Run(stage=stage, accumulation=2))


@pytest.mark.parametrize("stage", slow_but(STAGES, 0, 3))
def test_undeclared_external_parameter_works_or_is_named(stage: int) -> None:
    for answer in ranks.run_ranks(_not_declared, 2, stage):
        assert answer == "right" or "blocks.0.up.weight" in answer, answer
    assert stage == 3 or answer == "right"


@pytest.mark.parametrize("where", ["loss", "before the blocks", "after the blocks"])
@pytest.mark.parametrize("dtype", slow_but(("fp32", "bf16"), "fp32"))
def test_parameters_found_by_iteration_are_whole_in_forward_and_loss(where: str, dtype: str) -> None:
    """A penalty on ``model.parameters()`` looks no attribute up, by which other reads are noticed."""
    extra = {"zero_optimization": {"stage3_max_live_parameters": 0, "stage3_max_reuse_distance": 0, "stage3_prefetch_bucket_size": 0}}
    ranks.run_ranks(_found_by_iteration, 2, where, Run(stage=3, dtype=dtype, accumulation=2, extra=extra))
