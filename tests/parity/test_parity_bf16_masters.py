"""Test offloaded bf16 masters with fp32 moments: Adam computes in fp32 on the widened master, rounded to bf16 once a step."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support import ranks
from tests.support.models import CASES, Batch
from tests.support.offload_runs import blocks_of, sections, ways
from tests.support.parity import Run, cast_model, initialize, prepare

CASE = CASES["odd_mlp"]
RUN = Run(dtype="bf16", steps=3)
MIXED = {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": False}
State = dict[str, Tensor]


def _feed(step: int, rank: int) -> Batch:
    return prepare(CASE.rows(step, 0, rank), torch.bfloat16)


def _plain_gradients(model: nn.Module, step: int) -> State:
    """Return the mean over ranks of their bf16 gradients, each sum rounded to bf16, as with masters and gradients in bf16."""
    found: list[State] = []
    for rank in range(ranks.world()):
        CASE.forward(model, _feed(step, rank)).backward()
        found.append({name: param.grad.float() for name, param in model.named_parameters() if param.grad is not None})
        model.zero_grad()
    return {name: sum(part[name] for part in found).bfloat16() / len(found) for name in found[0]}


def _adam(master: Tensor, grad: Tensor, mean: Tensor, square: Tensor, step: int) -> None:
    """Take one AdamW step in fp32 of a bf16 ``master``, rounded once; by torch's kernel over complete vectors, for the same rounding."""
    pad = -master.numel() % 16
    wide = [nn.functional.pad(tensor.float().flatten(), (0, pad)) for tensor in (master, grad, mean, square)]
    lists = ([tensor] for tensor in wide)
    options: dict[str, Any] = {"lr": RUN.lr, "beta1": 0.9, "beta2": 0.99, "weight_decay": RUN.weight_decay, "eps": RUN.eps}
    torch._fused_adamw_(*lists, [], [torch.tensor(float(step))], amsgrad=False, maximize=False, **options)
    for target, result in ((master, wide[0]), (mean, wide[2]), (square, wide[3])):
        target.copy_(result[: target.numel()].view_as(target))


def _reference(steps: int) -> State:
    model = cast_model(CASE.build(), torch.bfloat16)
    params = dict(model.named_parameters())
    means, squares = ({name: torch.zeros(param.shape) for name, param in params.items()} for _ in range(2))
    for step in range(steps):
        gradients = _plain_gradients(model, step)
        with torch.no_grad():
            for name, param in params.items():
                _adam(param.data, gradients.get(name, torch.zeros_like(param)), means[name], squares[name], step + 1)
    found = {f"{name} master": param.detach().clone() for name, param in params.items()}
    found.update({f"{name} exp_avg": value for name, value in means.items()})
    return {**found, **{f"{name} exp_avg_sq": value for name, value in squares.items()}}


def _state(engine: Any) -> State:
    """Return masters and moments, complete, in the dtypes in which they are stored. Collective."""
    from hf_zero.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    found = {}
    for name, param in engine.module.named_parameters():
        found[f"{name} master"] = safe_get_full_fp32_param(param).bfloat16()
        for key in ("exp_avg", "exp_avg_sq"):
            found[f"{name} {key}"] = safe_get_full_optimizer_state(param, key).clone()
    return found


def _steps(engine: Any, first: int, count: int) -> None:
    for step in range(first, first + count):
        engine.backward(CASE.forward(engine, _feed(step, ranks.rank())))
        engine.step()


def _engine(stage: int, blocks: dict[str, Any]) -> Any:
    extra = {**sections(stage, blocks), "bf16": MIXED}
    return initialize(CASE.build(), Run(**{**vars(RUN), "stage": stage, "extra": extra}))


def _wrong(engine: Any, expected: State, label: str) -> list[str]:
    types = {value.dtype for segment in engine.optimizer.segments for _, value in segment.elementwise()}
    masters = {segment.tensor.dtype for segment in engine.optimizer.segments}
    wrong = [f"{label}: moments in {types}, masters in {masters}"] if (types, masters) != ({torch.float32}, {torch.bfloat16}) else []
    found = _state(engine)
    return wrong + [f"{label}: {name}" for name, value in expected.items() if not torch.equal(found[name].cpu(), value)]


def _write_back(engine: Any) -> None:
    """Set the moment of one parameter to its own value: nothing may change, including the other moments of its unit. Collective."""
    from hf_zero.utils import safe_get_full_optimizer_state, safe_set_full_optimizer_state

    param = next(param for name, param in engine.module.named_parameters() if name.endswith("up.weight"))
    value = safe_get_full_optimizer_state(param, "exp_avg")
    safe_set_full_optimizer_state(param, value, "exp_avg")


def _train(stage: int, labels: list[str], folder: str) -> list[str]:
    torch.set_num_threads(1)
    halfway, expected = _reference(2), _reference(3)
    wrong = []
    for label in labels:
        with blocks_of(ways(stage)[label]) as blocks:
            engine = _engine(stage, blocks)
            _steps(engine, 0, 2)
            wrong += _wrong(engine, halfway, f"stage {stage}, {label}, 2 steps")
            _write_back(engine)
            wrong += _wrong(engine, halfway, f"stage {stage}, {label}, written back")
            engine.save_checkpoint(folder, tag="halfway")
            state = copy.deepcopy(engine.optimizer.state_dict())
            _steps(engine, 2, 1)
            wrong += _wrong(engine, expected, f"stage {stage}, {label}, 3 steps")
            engine.load_checkpoint(folder, tag="halfway")
            engine.optimizer.load_state_dict(state)
            wrong += _wrong(engine, halfway, f"stage {stage}, {label}, loaded")
            engine.destroy()
            engine = _engine(stage, blocks)
            engine.load_checkpoint(folder, tag="halfway")
            _steps(engine, 2, 1)
            wrong += _wrong(engine, expected, f"stage {stage}, {label}, resumed")
            engine.destroy()
    return wrong


@pytest.mark.fast_rows("3-labels2")
@pytest.mark.parametrize(
    ("stage", "labels"),
    [
        (1, ["cpu", "cpu, half, apart"]),
        (2, ["cpu, overlap", "cpu, apart", "nvme"]),
        (3, ["cpu", "both cpu, apart"]),
    ],
)
def test_masters_in_bf16_with_moments_in_fp32(stage: int, labels: list[str], tmp_path: Path) -> None:
    wrong = [text for rank in ranks.run_ranks(_train, 2, stage, labels, str(tmp_path)) for text in rank]
    assert not wrong, "\n".join(wrong)


def _refused() -> list[str]:
    import hf_zero

    found = []
    blocks = {"offload_optimizer": {"device": "cpu"}}
    for kind in (torch.optim.AdamW, torch.optim.SGD):
        model = CASE.build()
        run = Run(**{**vars(RUN), "extra": {**sections(1, blocks), "bf16": MIXED}})
        options = {"momentum": 0.9} if kind is torch.optim.SGD else {}
        try:
            initialize(model, run, optimizer=kind(model.parameters(), lr=1e-2, **options))
        except hf_zero.errors.UnsupportedError as error:
            found.append(str(error))
    return found


def test_an_optimizer_that_keeps_moments_in_bf16_is_refused_by_name() -> None:
    for answer in ranks.run_ranks(_refused, 2):
        assert ["AdamW keeps exp_avg, exp_avg_sq" in answer[0], "SGD keeps momentum_buffer" in answer[1]] == [True, True], answer
