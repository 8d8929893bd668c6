"""Test the exact sequence of phases and the bytes sent in one step of a two-block model, for every stage, on 2 ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.support import ranks
from tests.support.models import STEP_VOTE_BYTES, TwoBlocks

pytestmark = pytest.mark.quick

_FORWARD = ["pre_forward (root)", "pre_forward (layers.0)", "pre_forward (layers.1)", "backward"]
_STEP = ["all_reduce (micro-steps)", "finish_reduce", "norm"]
_NORM = ["all_reduce (gradient norm)"]
_UPDATE = ["clip", "update"]
_SPREAD = ["all_gather (root)", "all_gather (layers.0)", "all_gather (layers.1)", "spread"]
_SHARDED_GRADIENTS = ["reduce_scatter (layers.1)", "reduce_scatter (layers.0)", "reduce_scatter (root)", "end_backward"]
_LATE = ["all_reduce (late gradients)"]
_STAGE_3 = """
    pre_forward (root), all_gather (root), gathering (root), gathered (root),
    all_gather (layers.0), gathering (layers.0),
    pre_forward (layers.0), gathered (layers.0), all_gather (layers.1), gathering (layers.1), post_forward (layers.0), sharded (layers.0),
    pre_forward (layers.1), gathered (layers.1), post_forward (layers.1), sharded (layers.1),
    post_forward (root), all_reduce (another round),
    backward, all_reduce (behind the forward), pre_backward (root),
    pre_backward (layers.1), all_gather (layers.1), gathering (layers.1), gathered (layers.1),
    all_gather (layers.0), gathering (layers.0), reduce_scatter (layers.1),
    pre_backward (layers.0), gathered (layers.0), sharded (layers.1), reduce_scatter (layers.0), reduce_scatter (root),
    end_backward, sharded (root), sharded (layers.0), all_reduce (late gradients)
"""

EXPECTED = {
    0: [
        *_FORWARD,
        *("all_reduce (layers.1)", "all_reduce (layers.0)", "all_reduce (root)", "end_backward"),
        *_LATE,
        *_STEP,
        *_UPDATE,
        "spread",
    ],
    1: [*_FORWARD, *_SHARDED_GRADIENTS, *_LATE, *_STEP, *_NORM, *_UPDATE, *_SPREAD],
    2: [*_FORWARD, *_SHARDED_GRADIENTS, *_LATE, *_STEP, *_NORM, *_UPDATE, *_SPREAD],
    3: [*(label.strip() for label in _STAGE_3.split(",")), *_STEP, *_NORM, *_UPDATE, "spread"],
}


def _second_step(stage: int) -> tuple[list[str], int, int]:
    """Return the labels of the second step (the first also learns the order), this rank's bytes sent in it, and the bytes of all units."""
    import hf_zero
    from hf_zero.observe import record_labels

    model = TwoBlocks()
    zero: dict[str, Any] = {"stage": stage, "stage3_param_persistence_threshold": 0, "stage3_max_reuse_distance": 0}
    zero["stage3_prefetch_bucket_size"] = 1  # one block ahead
    config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "AdamW"}, "zero_optimization": zero}
    engine, *_ = hf_zero.initialize(model=model, model_parameters=model.parameters(), config=config)
    networks = {id(network): network for network in (engine.collectives, engine.stepper.reducer.exchange.collectives)}

    def sent() -> int:
        return sum(network.sent_bytes for network in networks.values())

    before = 0
    for _ in range(2):
        before = sent()
        with record_labels() as labels:
            engine.backward(engine(torch.ones(2, 8)))
            engine.step()
    return labels, sent() - before, sum(4 * unit.layout.padded_numel for unit in engine.units)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_sequence_and_bytes_of_a_step(stage: int) -> None:
    answers = ranks.run_ranks(_second_step, 2, stage)
    whole = answers[0][2]
    # Stage 0: an all-reduce moves 2 (N-1)/N of the units. 1, 2: reduce-scatter and spread, (N-1)/N each, and the norm (8 bytes).
    # All: the vote of a step; late gradients (8 bytes, and 4 for each unit). 3: gathers of the root once and of the blocks twice, the
    # reduce-scatter, the norm, and two votes (12 and 4 bytes).
    root = 4 * 32
    votes = STEP_VOTE_BYTES + 8 + 3 * 4
    expected_bytes = {
        0: whole + votes,
        1: whole // 2 * 2 + 8 + votes,
        2: whole // 2 * 2 + 8 + votes,
        3: (2 * whole - root) // 2 + whole // 2 + 8 + votes + 12 + 4,
    }
    for labels, sent, _ in answers:
        assert [label.removeprefix("hf_zero::") for label in labels] == EXPECTED[stage]
        assert sent == expected_bytes[stage]


def _step_after_another_forward() -> tuple[int, list[str]]:
    """Return the blocks that are unsharded when a step begins, and the labels of the step."""
    import hf_zero
    from hf_zero.core.units.layout import UnitState
    from hf_zero.observe import record_labels

    zero = {"stage": 3, "stage3_param_persistence_threshold": 0}
    config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "AdamW"}, "zero_optimization": zero}
    engine, *_ = hf_zero.initialize(model=TwoBlocks(), config=config)
    engine.backward(engine(torch.ones(2, 8)))
    engine(torch.ones(2, 8))  # its backward never comes
    whole = sum(unit.state is UnitState.UNSHARDED for unit in engine.units)
    with record_labels() as labels:
        engine.step()
    assert all(unit.state is UnitState.SHARDED for unit in engine.units)
    engine.destroy()
    return whole, labels


def test_a_step_reshards_what_a_forward_left_whole_and_gathers_nothing() -> None:
    for whole, labels in ranks.run_ranks(_step_after_another_forward, 2):
        assert whole > 0
        assert not [label for label in labels if "all_gather" in label]


class _Tower(nn.Module):
    """Four blocks of one linear layer, and a head that belongs to the root; ``prompt`` is added to what the first one gets."""

    def __init__(self) -> None:
        super().__init__()
        self.prompt = nn.Parameter(torch.zeros(8))
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.head = nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.prompt
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.head(x).square().mean()  # type: ignore[no-any-return]


def _gathered_in_backward(trained: list[str], asks: list[bool]) -> tuple[list[str], float]:
    """Return the blocks gathered in the second step's backward if only ``trained`` have gradients, and the largest difference from torch.

    ``asks``: for each rank whether its input requires a gradient too.
    """
    import hf_zero
    from hf_zero.observe import record_labels

    torch.manual_seed(0)
    models = [_Tower(), _Tower()]
    models[1].load_state_dict(models[0].state_dict())
    for model in models:
        for name, param in model.named_parameters():
            param.requires_grad_(name.startswith(tuple(trained)))
    zero = {"stage": 3, "stage3_param_persistence_threshold": 0, "stage3_max_reuse_distance": 0, "stage3_prefetch_bucket_size": 1}
    config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "SGD", "params": {"lr": 0.5}}, "zero_optimization": zero}
    engine, *_ = hf_zero.initialize(model=models[0], config=config, model_parameters=[p for p in models[0].parameters() if p.requires_grad])
    optimizer = torch.optim.SGD([param for param in models[1].parameters() if param.requires_grad], lr=0.5)
    gathered: list[str] = []
    for step in range(2):
        x = torch.full((2, 8), 1.0 + step, requires_grad=asks[ranks.rank()])
        models[1](x.detach()).backward()
        optimizer.step()
        optimizer.zero_grad()
        loss = engine(x)
        with record_labels() as labels:
            engine.backward(loss)
        engine.step()
        assert (x.grad is not None) == asks[ranks.rank()]
        gathered = [label.split("(")[1].rstrip(")") for label in labels if "all_gather" in label]
    with hf_zero.zero.GatheredParameters(list(models[0].parameters())):
        pairs = zip(models[0].parameters(), models[1].parameters(), strict=True)
        return gathered, max((one - other).abs().max().item() for one, other in pairs)


_ALL = ["layers.3", "layers.2", "layers.1", "layers.0"]


def _backbones() -> None:
    for trained, asks, expected in (
        (["head"], [False, False], []),
        (["head", "layers.3"], [False, False], _ALL[:1]),
        (["layers.1", "layers.2"], [False, False], _ALL[:3]),
        (["layers"], [False, False], _ALL),
        (["prompt"], [False, False], _ALL),
        (["head"], [False, True], _ALL),
        (["layers.2"], [True, False], _ALL),
    ):
        gathered, difference = _gathered_in_backward(trained, asks)
        assert (gathered, difference < 1e-6) == (expected, True), (trained, asks, gathered, difference)


def test_backward_gathers_nothing_below_what_trains_unless_a_rank_asks() -> None:
    ranks.run_ranks(_backbones, 2)


class _Repeats(_Tower):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in (*self.layers, self.layers[2], self.layers[2]):
            x = torch.tanh(layer(x))
        return self.head(x).square().mean()  # type: ignore[no-any-return]


def _most_whole(labels: list[str]) -> int:
    """Return the largest number of blocks of ``layers`` that are whole at the same time."""
    whole: set[str] = set()
    most = 0
    for label in (label for label in labels if "(layers." in label):
        name = label.split("(layers.")[1]
        whole = whole | {name} if "all_gather" in label or "broadcast" in label else whole - {name} if "sharded" in label else whole
        most = max(most, len(whole))
    return most


def _gathered_in_forward() -> tuple[list[list[str]], list[int], float]:
    """Return the blocks gathered in each of three forwards, the most that are whole in initialize and each, the difference from torch."""
    import hf_zero
    from hf_zero.observe import record_labels

    torch.manual_seed(0)
    models = [_Repeats(), _Repeats()]
    models[1].load_state_dict(models[0].state_dict())
    zero = {"stage": 3, "stage3_param_persistence_threshold": 0, "stage3_max_reuse_distance": 0, "stage3_prefetch_bucket_size": 1}
    config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "SGD", "params": {"lr": 0.5}}, "zero_optimization": zero}
    with record_labels() as labels:
        engine, *_ = hf_zero.initialize(model=models[0], config=config)
    optimizer = torch.optim.SGD(models[1].parameters(), lr=0.5)
    gathered, most = [], [_most_whole(labels)]
    for step in range(3):
        x = torch.full((2, 8), 1.0 + step)
        models[1](x).backward()
        optimizer.step()
        optimizer.zero_grad()
        with record_labels() as labels:
            loss = engine(x)
        gathered.append([label.split("(layers.")[1].rstrip(")") for label in labels if "all_gather (layers" in label])
        most.append(_most_whole(labels))
        engine.backward(loss)
        engine.step()
    with hf_zero.zero.GatheredParameters(list(models[0].parameters())):
        pairs = zip(models[0].parameters(), models[1].parameters(), strict=True)
        return gathered, most, max((one - other).abs().max().item() for one, other in pairs)


def test_a_block_that_runs_again_stays_whole_and_initialize_shards_one_by_one() -> None:
    for (first, second, third), most, difference in ranks.run_ranks(_gathered_in_forward, 2):
        assert "".join(first) == "0123" + "0123", "the first forward learns that block 2 runs again, in one more pass"
        assert "".join(second) == "".join(third) == "0123"
        assert most == [1, 2, 2, 2] and difference < 1e-6
