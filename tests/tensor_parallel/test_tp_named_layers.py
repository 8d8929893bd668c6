"""Models that nothing is known of: the layers that the configuration names are split, or the user gives a call that runs the model."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import hf_zero
from hf_zero.core.units.marks import tp_shard_of
from hf_zero.deepspeed import initialize as facade
from hf_zero.errors import ConfigError
from hf_zero.tensor_parallel.overrides import overrides_of
from hf_zero.tensor_parallel.plan import TpPlan
from hf_zero.tensor_parallel.planner import make_plan
from hf_zero.tensor_parallel.split import tp_model_init
from tests.support import ranks
from tests.tensor_parallel.breadth import relative

RULES = [{"patterns": [r".*\.up\.weight$"], "partition_type": "COLUMN"}, {"patterns": ["down$"], "partition_type": "row"}]


class Branching(nn.Module):
    """No model of transformers: how to run it is not known; its code looks at values."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.block = nn.ModuleDict({"up": nn.Linear(8, 12), "down": nn.Linear(12, 8, bias=True), "gate": nn.Linear(8, 3)})

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x).relu()
        if float(x.detach().sum()) != 0.25:
            hidden = hidden + self.block["down"](self.block["up"](hidden).tanh())
        return (self.block["gate"](hidden).sum(-1) - y).pow(2).mean()


def built() -> Branching:
    torch.manual_seed(5)
    return Branching()


def batch(index: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(index)
    return torch.randn(4, 6, generator=generator), torch.randn(4, generator=generator)


def config(rules: list[dict[str, Any]] | None, stage: int = 1) -> dict[str, Any]:
    section: dict[str, Any] = {"autotp_size": 2} | ({"partition_config": {"layer_specs": rules}} if rules else {})
    return {
        "train_micro_batch_size_per_gpu": 4,
        "tensor_parallel": section,
        "zero_optimization": {"stage": stage},
        "gradient_clipping": 0.0,
    }


def one_rank(steps: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    model = built()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    for step in range(steps):
        loss = model(*batch(step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, dict(model.state_dict())


def train(rules: list[dict[str, Any]] | None, stage: int, inputs: bool) -> tuple[list[str], list[float], dict[str, torch.Tensor] | None]:
    """Which parameters were split, the losses, the joined weights on rank 0."""
    model = built()
    if inputs:
        x, y = batch(0)
        tp_model_init(model, 2, inputs={"x": x, "y": y})
    elif stage == 3:  # DeepSpeed's function, before anything names the layers: left to initialize
        assert facade.tp_model_init(model, 2) is model and not any(tp_shard_of(param) for param in model.parameters())
        with pytest.raises(ConfigError, match="forward takes neither"):
            hf_zero.initialize(model=model, config=config(None, stage))
    engine = hf_zero.initialize(model=model, config=config(rules, stage), optimizer=lambda params: torch.optim.AdamW(params, lr=0.01))[0]
    split = [name for name, param in model.named_parameters() if tp_shard_of(param) is not None]
    losses = []
    for step in range(3):
        loss = engine(*batch(step))
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
    return split, losses, engine._consolidated_16bit_state_dict()


@pytest.mark.parametrize(("inputs", "stage"), [(False, 1), (False, 3), (True, 2)])
def test_trains_as_on_one_rank(inputs: bool, stage: int) -> None:
    expected, weights = one_rank(3)
    for rank, (split, losses, found) in enumerate(ranks.run_ranks(train, 2, None if inputs else RULES, stage, inputs)):
        assert losses == pytest.approx(expected, rel=1e-5)
        layers = dict.fromkeys(name.rpartition(".")[0] for name in split)
        assert list(layers) == (["first", "block.up", "block.down", "block.gate"] if inputs else ["block.up", "block.down"])
        if rank == 0:
            assert found is not None
            assert max(relative(found[name], value) for name, value in weights.items()) < 1e-5


def by_hand() -> tuple[list[float], dict[str, torch.Tensor] | None]:
    """DeepSpeed's two layers in a model whose others stay whole; what the engine has divided is an instance of them too."""
    from hf_zero.deepspeed.initialize import tp_model_init as ds_tp_model_init
    from hf_zero.deepspeed.served.tp_layers import LinearAllreduce, LinearLayer

    group = torch.distributed.group.WORLD
    assert group is not None
    model = built()
    up = model.block["up"].weight.detach().clone()
    model.block["up"], model.block["down"] = LinearLayer(model.block["up"], group), LinearAllreduce(model.block["down"], group)
    divided: Any = model.block["up"].weight
    divided.gather_params([divided])
    assert torch.equal(divided, up)
    divided._tp_partition([divided])
    assert divided.shape == (6, 8) and torch.equal(divided, up.chunk(2)[ranks.rank()])
    wide = LinearLayer(nn.Linear(4, 2), group, gather_output=True)
    assert wide(torch.ones(3, 4)).shape == (3, 2)
    with pytest.raises(ConfigError, match="LinearLayer: 3 outputs cannot be divided over 2 ranks"):
        LinearLayer(nn.Linear(4, 3), group)
    skip = config([{"patterns": [".*"], "partition_type": "skip"}])
    engine = hf_zero.initialize(model=model, config=skip, optimizer=lambda params: torch.optim.AdamW(params, lr=0.01))[0]
    losses = []
    for step in range(3):
        loss = engine(*batch(step))
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
    split = hf_zero.initialize(model=built(), config=config(RULES))[0].module.block
    assert [isinstance(split[name], LinearLayer) for name in ("up", "down", "gate")] == [True, False, False]
    assert [isinstance(split[name], LinearAllreduce) for name in ("up", "down", "gate")] == [False, True, False]
    half = ds_tp_model_init(built(), tp_size=1, dtype=torch.float16)
    with pytest.raises(ConfigError, match=r"Conflicting dtype: tp_model_init has dtype torch.float16.*trains in torch.bfloat16"):
        hf_zero.initialize(model=half, config={"train_micro_batch_size_per_gpu": 4, "bf16": {"enabled": True}})
    return losses, engine._consolidated_16bit_state_dict()


def test_layers_divided_by_hand_train_as_on_one_rank() -> None:
    expected, weights = one_rank(3)
    (losses, found), (others, _) = ranks.run_ranks(by_hand, 2)
    assert losses == others == pytest.approx(expected, rel=1e-5) and found is not None
    assert max(relative(found[name], value) for name, value in weights.items()) < 1e-5


def plan_for(rules: list[dict[str, Any]], world: int = 2, model: nn.Module | None = None) -> TpPlan:
    model = model or built()
    return make_plan(model, world, overrides=overrides_of({"partition_config": {"layer_specs": rules}}, None, model))


def test_plan_says_what_is_split_and_why() -> None:
    plan = plan_for(RULES)
    assert {path: entry.split for path, entry in plan.modules.items()} == {
        "first": "whole",
        "block.up": "column, gathered",
        "block.down": "row, scattered",
        "block.gate": "whole",
    }
    assert plan.modules["block.up"].reason == "named, and the model cannot be traced"
    assert "takes neither input_ids nor pixel_values" in plan.notes[0]


def test_the_models_own_plan_names_layers() -> None:
    model = built()
    model.config = SimpleNamespace(base_model_tp_plan={"*.up": "colwise", "*.down": "rowwise"})  # type: ignore[assignment]
    plan = make_plan(model, 2)
    assert (plan.modules["block.up"].split, plan.modules["block.down"].split, plan.modules["first"].split) == (
        "column, gathered", "row, scattered", "whole",
    )  # fmt: skip
    assert plan.source == plan.modules["block.up"].source == "tp_plan"


def test_error_says_what_to_do() -> None:
    with pytest.raises(
        ConfigError, match=r"Branching.forward takes neither.*tp_model_init\(model, tp_size=2, inputs=.*first, block.up, block.down"
    ):
        make_plan(built(), 2)
    with pytest.raises(ConfigError, match="Branching does not run on tensors without values.*'y'.*partition_config.layer_specs"):
        make_plan(built(), 2, inputs={"x": torch.empty(4, 6, device="meta")})


class Doubled(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * 2


def test_layers_that_cannot_be_split_by_name() -> None:
    with pytest.raises(ConfigError, match=r"up cannot be split by column over 5 ranks: it has 12 outputs; usable.*\[2, 3, 4, 6, 12\]"):
        plan_for(RULES, 5)
    model = built()
    model.block["up"] = Doubled(8, 12)
    with pytest.raises(ConfigError, match="block.up cannot be split by its name: Doubled computes more than a linear layer"):
        plan_for(RULES, model=model)
    model = built()
    model.block["gate"].weight = model.first.weight = nn.Parameter(torch.zeros(8, 8))
    with pytest.raises(ConfigError, match="first cannot be split by its name: it shares its weight with block.gate"):
        plan_for([{"patterns": ["first"]}], model=model)


def test_rule_that_matches_nothing_is_told(caplog: pytest.LogCaptureFixture) -> None:
    plan_for([*RULES, {"patterns": ["sideways"], "partition_type": "row"}, {"patterns": ["gate2"], "partition_type": "skip"}])
    told = [record.message for record in caplog.records if "match no linear layer" in record.message]
    assert len(told) == 1 and "layer_specs[2]" in told[0] and "first, block.up" in told[0]
