"""Test buffers and unusual parameters: rank 0's values on all ranks, integer buffers unchanged, sizes 0, 1 and below the world size."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from hf_zero.errors import CheckpointError
from tests.support import parity, ranks
from tests.support.models import CASES, Mlp, class_loss
from tests.support.parity import Run, check, check_training, initialize, reference, train
from tests.support.rows import slow_but, thinned

STAGES = (0, 1, 2, 3)


class Buffered(Mlp):
    """A model with buffers of every kind, one not persistent, one that the forward updates; a frozen weight, and frozen codes of one
    byte.
    """

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("offset", torch.randn(16))
        self.register_buffer("shift", torch.randn(16).to(torch.float8_e4m3fn))
        self.gain = nn.Parameter(torch.rand(16) + 0.5, requires_grad=False)
        self.codes = nn.Parameter(torch.randn(16).to(torch.float8_e5m2), requires_grad=False)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.register_buffer("order", torch.randperm(16))
        self.register_buffer("level", torch.randn(1).expand(16))
        self.register_buffer("mask", torch.rand(16) > 0.2, persistent=False)

    def forward(self, inputs: Tensor) -> Tensor:
        self.calls += 1
        hidden = self.entry(inputs)
        hidden = (hidden + self.offset.to(hidden.dtype))[:, self.order] * self.mask
        hidden = hidden * self.gain + self.level.to(hidden.dtype) + self.shift.to(hidden.dtype) * self.codes.to(hidden.dtype)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden)


def build_buffered(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return Buffered()


def _rank_zero_wins(run: Run) -> None:
    """Build other weights and buffers on every rank; training starts from rank 0's."""
    engine = initialize(build_buffered(seed=ranks.rank()), run)
    buffers = {name: buffer.clone() for name, buffer in engine.module.named_buffers()}
    assert (engine.module.codes.dtype, buffers["shift"].dtype) == (torch.float8_e5m2, torch.float8_e4m3fn)
    assert buffers["offset"].dtype == torch.float32  # as it was built, whatever the parameters train in
    buffers["shift"] = buffers["shift"].float()  # pickle does not know the type
    gathered: list[dict[str, Tensor]] = [{} for _ in range(ranks.world())]
    dist.all_gather_object(gathered, buffers)
    for other in gathered:
        assert all(torch.equal(other[name], gathered[0][name]) for name in buffers)
    assert buffers["order"].dtype == torch.long and buffers["mask"].dtype == torch.bool
    trace = train(engine, CASES["mlp"].rows, class_loss, run)
    assert engine.module.calls.item() == run.steps * run.accumulation
    engine.destroy()
    if ranks.rank() == 0:
        trace.weights["codes"] = trace.weights["codes"].to(parity.DTYPES[run.dtype])  # the reference casts all of its model
        check(
            trace,
            lambda follow=None: reference(build_buffered(0), CASES["mlp"].rows, class_loss, run, ranks.world(), follow),
            run,
            "buffers from rank 0",
        )


def _odd_sizes(run: Run) -> None:
    case = CASES["odd_mlp"]
    check_training(case.build, case.rows, case.forward, run, label="parameters of size 0 and 1")


class Scalars(nn.Module):
    """A model whose parameters are all smaller than the world, one of them without dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.slope = nn.Parameter(torch.tensor(0.5))
        self.shift = nn.Parameter(torch.tensor([0.1, -0.1, 0.2, 0.3]))
        self.nothing = nn.Parameter(torch.empty(0, 3))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.slope * inputs[:, :4] + self.shift


def _scalars(run: Run) -> None:
    check_training(Scalars, CASES["mlp"].rows, class_loss, run, label="scalars")


def _rotary_table_stays_fp32(stage: int) -> None:
    engine = initialize(CASES["llama"].build(), Run(stage=stage, dtype="bf16"))
    tables = {name: buffer.dtype for name, buffer in engine.module.named_buffers()}
    assert tables and set(tables.values()) == {torch.float32}, tables
    parameters = {name: parameter.dtype for name, parameter in engine.module.named_parameters()}
    assert set(parameters.values()) == {torch.bfloat16}, parameters
    engine.destroy()


class Graph(nn.Module):
    """A layer over a graph whose adjacency is a sparse buffer; each rank builds other values."""

    def __init__(self, layout: torch.layout, persistent: bool) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        adjacency = torch.eye(4) * (2 + ranks.rank())
        self.register_buffer("adjacency", adjacency.to_sparse(layout=layout), persistent=persistent)

    def forward(self, inputs: Tensor) -> Tensor:
        return torch.sparse.mm(self.adjacency, self.layer(inputs)).square().mean()


def _sparse(stage: int, folder: str) -> None:
    for layout, persistent in ((torch.sparse_coo, False), (torch.sparse_csr, True)):
        engine = initialize(Graph(layout, persistent), Run(stage=stage))
        assert torch.equal(engine.module.adjacency.to_dense(), torch.eye(4) * 2)
        engine.backward(engine(torch.ones(4, 4)))
        engine.step()
        if persistent:
            for save in (engine.save_checkpoint, engine.save_16bit_model):
                with pytest.raises(CheckpointError, match=r"adjacency: safetensors files cannot hold sparse .* persistent=False"):
                    save(folder)
        else:
            engine.save_checkpoint(folder)
            engine.load_checkpoint(folder)
        engine.destroy()


@pytest.mark.parametrize("stage", slow_but(STAGES, 1, 3))
def test_sparse_buffers_come_from_rank_zero_and_are_not_saved(stage: int, tmp_path: Path) -> None:
    ranks.run_ranks(_sparse, 2, stage, str(tmp_path))


@pytest.mark.fast_rows("2-bf16", "3-fp32")
@thinned(stage=STAGES, dtype=["fp32", "bf16"])
def test_weights_and_buffers_come_from_rank_zero(stage: int, dtype: str) -> None:
    ranks.run_ranks(_rank_zero_wins, 3, Run(stage=stage, dtype=dtype, accumulation=2))


@pytest.mark.fast_rows("2-3", "3-2", "3-4")
@thinned(stage=STAGES, world_size=[2, 3, 4])
def test_parameters_of_size_zero_and_one(stage: int, world_size: int) -> None:
    ranks.run_ranks(_odd_sizes, world_size, Run(stage=stage, accumulation=2, clip=0.1))


@pytest.mark.parametrize("stage", slow_but(STAGES, 2, 3))
def test_a_model_smaller_than_the_world(stage: int) -> None:
    ranks.run_ranks(_scalars, 4, Run(stage=stage))


@pytest.mark.parametrize("stage", slow_but(STAGES, 0, 3))
def test_rotary_tables_stay_fp32(stage: int) -> None:
    ranks.run_ranks(_rotary_table_stays_fp32, 2, stage)
