"""Test parameters that are frozen, unfrozen, added and removed during training: each step trains the same ones as in plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import hf_zero
from hf_zero.errors import StateError, UnsupportedError
from tests.parity.fuzzer.grammar import parse
from tests.parity.fuzzer.report import everywhere
from tests.parity.fuzzer.verdict import verdicts_of
from tests.support import ranks

Change = Callable[[nn.Module, Any], None]  # gets the model, and what has ``add_param_group``


class _Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 12), nn.Linear(12, 8)
        self.adapter: nn.Module | None = None

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        change = self.second(torch.tanh(self.first(rows)))
        return rows + (change if self.adapter is None else change + self.adapter(rows))


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_Layer() for _ in range(4))
        self.head = nn.Linear(8, 3)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            rows = layer(rows)
        return self.head(rows)


def _model() -> _Model:
    torch.manual_seed(5)
    model = _Model()
    model.layers[0].requires_grad_(False)
    model.layers[2].first.bias.requires_grad_(False)
    return model


def _requires(path: str, wanted: bool) -> Change:
    def change(model: nn.Module, optimizer: Any) -> None:
        owner = model.get_submodule(path.rpartition(".")[0]) if path.endswith(("weight", "bias")) else model.get_submodule(path)
        (getattr(owner, path.rpartition(".")[2]) if path.endswith(("weight", "bias")) else owner).requires_grad_(wanted)

    return change


def _add_adapter(model: nn.Module, optimizer: Any) -> None:
    draw = torch.Generator().manual_seed(11)
    adapter = nn.Linear(8, 8)
    with torch.no_grad():
        for param in adapter.parameters():
            param.copy_(0.1 * torch.randn(param.shape, generator=draw))
    model.layers[1].adapter = adapter
    optimizer.add_param_group({"params": adapter.parameters(), "lr": 0.03})


BEFORE_STEP: dict[int, list[Change]] = {
    1: [_requires("layers.0", True)],
    2: [_requires("head.bias", False), _requires("layers.1.second.weight", False)],
    3: [_requires("layers.3", False), _requires("layers.0", False)],
    4: [_add_adapter, _requires("layers.2.first.bias", True)],
    5: [_requires("layers.3", True), _requires("head.bias", True)],
    6: [_requires("layers.1", False), _requires("layers.0.first", True)],
    7: [_requires("layers.1", True)],
}
BEFORE_UPDATE: dict[int, list[Change]] = {5: [_requires("layers.2.second", False)], 6: [_requires("layers.2.second", True)]}
STEPS = 9


def _groups(model: nn.Module) -> list[dict[str, Any]]:
    return [
        {"params": [param for param in model.parameters() if param.ndim > 1], "weight_decay": 0.1},
        {"params": [param for param in model.parameters() if param.ndim < 2], "weight_decay": 0.0},
    ]


def _rows(step: int, micro: int, rank: int) -> torch.Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(1000 * step + 10 * micro + rank))


def _optimizer(name: str, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    return {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD, "adagrad": torch.optim.Adagrad, "adafactor": torch.optim.Adafactor}[name](
        groups, lr=0.02, **({"momentum": 0.9} if name == "sgd" else {})
    )


def _plain(name: str, world: int, micro_steps: int) -> list[dict[str, torch.Tensor]]:
    model = _model()
    optimizer = _optimizer(name, _groups(model))
    found = []
    for step in range(STEPS):
        for change in BEFORE_STEP.get(step, ()):
            change(model, optimizer)
        for micro in range(micro_steps):
            for rank in range(world):
                (model(_rows(step, micro, rank)).square().mean() / (world * micro_steps)).backward()
        for change in BEFORE_UPDATE.get(step, ()):
            change(model, optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        found.append({key: value.detach().clone() for key, value in model.named_parameters()})
    return found


def _engine(model: nn.Module, client: Any, stage: int, micro_steps: int = 1, **config: Any) -> Any:
    sections = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": micro_steps,
        "gradient_clipping": 0.5,
        "zero_allow_untested_optimizer": True,
        **config,
    }
    sections["zero_optimization"] = {"stage": stage, "stage3_param_persistence_threshold": 0, **config.get("zero_optimization", {})}
    return hf_zero.initialize(model=model, optimizer=client, config=sections)[0]


def _whole(model: nn.Module) -> dict[str, torch.Tensor]:
    with hf_zero.zero.GatheredParameters(list(model.parameters())):
        return {key: value.detach().clone() for key, value in model.named_parameters()}


def _trained(name: str, stage: int, micro_steps: int, **config: Any) -> list[dict[str, torch.Tensor]]:
    model = _model()
    engine = _engine(model, _optimizer(name, _groups(model)), stage, micro_steps, **config)
    found = []
    for step in range(STEPS):
        for change in BEFORE_STEP.get(step, ()):
            change(model, engine.optimizer)
        for micro in range(micro_steps):
            engine.backward(engine(_rows(step, micro, ranks.rank())).square().mean())
            if micro + 1 == micro_steps:
                for change in BEFORE_UPDATE.get(step, ()):
                    change(model, engine.optimizer)
            engine.step()
            engine.zero_grad()
        found.append(_whole(model))
    engine.destroy()
    return found


def _compare(stages: list[int], names: list[str], micro_steps: int, config: dict[str, Any]) -> None:
    for name in names:
        expected = _plain(name, ranks.world(), micro_steps)
        for stage in stages:
            found = _trained(name, stage, micro_steps, **config)
            for step, (ours, plain) in enumerate(zip(found, expected, strict=True)):
                for key in plain:
                    label = f"{name}, stage {stage}, {micro_steps} micro-steps, step {step}: {key}"
                    torch.testing.assert_close(
                        ours[key], plain[key], rtol=2e-4, atol=2e-6, msg=lambda text, label=label: f"{label}: {text}"
                    )


@pytest.mark.fast_rows("1-2", "2-2")
@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("micro_steps", [1, 2])
def test_each_step_trains_what_requires_a_gradient(world: int, micro_steps: int) -> None:
    names = ["adamw", "sgd", "adagrad"] if micro_steps == 1 else ["adamw"]
    stages = [1, 3] if (micro_steps, world) == (1, 2) else [0, 1, 2, 3]  # the fast rows have each stage and each optimizer
    ranks.run_ranks(_compare, world, stages, names, micro_steps, {})


def test_whole_tensors_and_offloaded_states_too() -> None:
    ranks.run_ranks(_compare, 2, [1, 3], ["adafactor"], 1, {})
    ranks.run_ranks(_compare, 2, [2, 3], ["adamw"], 1, {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}})


def _resumed(folder: str) -> None:
    """Continue a run that was saved in the middle in a new engine, whose units are laid out for other parameters."""
    for stage in (1, 3):
        expected = _trained("adamw", stage, 1)
        model = _model()
        engine = _engine(model, _optimizer("adamw", _groups(model)), stage)
        for step in range(STEPS):
            for change in BEFORE_STEP.get(step, ()):
                change(model, engine.optimizer)
            if step == 4:
                engine.save_checkpoint(f"{folder}/{stage}")
                engine.destroy()
                flags = {key: value.requires_grad for key, value in model.named_parameters()}
                model = _model()
                model.requires_grad_(True)
                _add_adapter(model, torch.optim.SGD(model.head.parameters()))
                groups = _groups(model)
                adapter = {id(param) for param in model.layers[1].adapter.parameters()}
                for group in groups:
                    group["params"] = [param for param in group["params"] if id(param) not in adapter]
                groups.append({"params": model.layers[1].adapter.parameters(), "lr": 0.03})
                engine = _engine(model, _optimizer("adamw", groups), stage)
                engine.load_checkpoint(f"{folder}/{stage}")
                for key, value in model.named_parameters():
                    value.requires_grad_(flags[key])
            engine.backward(engine(_rows(step, 0, ranks.rank())).square().mean())
            for change in BEFORE_UPDATE.get(step, ()):
                change(model, engine.optimizer)
            engine.step()
            found = _whole(model)
            for key in found:
                torch.testing.assert_close(found[key], expected[step][key], rtol=2e-4, atol=2e-6, msg=f"stage {stage}, step {step}: {key}")
        engine.destroy()


def test_checkpoints_keep_the_steps_of_each_parameter(tmp_path: Any) -> None:
    ranks.run_ranks(_resumed, 2, str(tmp_path))


def _apart() -> None:
    for stage in (0, 1, 2, 3):
        model = _model()
        engine = _engine(model, _optimizer("adamw", _groups(model)), stage)
        model.layers[1].first.weight.requires_grad_(ranks.rank() == 0)
        engine.backward(engine(_rows(0, 0, ranks.rank())).square().mean())
        with pytest.raises(StateError, match=r"layers\.1\.first\.weight \(param group 0\) on rank\(s\) 0"):
            engine.step()
        engine.destroy()


def test_ranks_that_freeze_differently_are_told() -> None:
    ranks.run_ranks(_apart, 2)


# What requires no gradient when the step comes has one of a backward before: torch's optimizers look at ``grad`` alone.
FROZEN_BEHIND_BACKWARD = (
    "add_adapter layer=blocks.0 how=group trains=1; forward data=0; backward; freeze layer=blocks.0; step; forward data=1; backward; step",
    "cell frozen=blocks.0; unfreeze layer=blocks.0; forward data=0; backward; freeze layer=blocks.0; step; forward data=1; backward; step",
    "freeze layer=blocks.1; forward data=0; backward; step; unfreeze layer=blocks.1; forward data=1; backward; freeze layer=blocks.1; "
    "step; forward data=2; backward; step",
)
IN_A_WINDOW = (
    "cell accumulation=2; add_adapter layer=blocks.0 how=group trains=1; forward data=0; backward; freeze layer=blocks.0; step; "
    "zero_grad how=engine; forward data=1; backward; step; forward data=2; backward; step; forward data=3; backward; step",
    "cell accumulation=2 frozen=head; unfreeze layer=head; forward data=0; backward; step; freeze layer=head; forward data=1; backward; "
    "step; unfreeze layer=head; forward data=2; backward; step; forward data=3; backward; freeze layer=head; step",
)


@pytest.mark.parametrize("all_cells", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("texts", [FROZEN_BEHIND_BACKWARD, IN_A_WINDOW], ids=["each step", "accumulation"])
def test_a_gradient_counts_whatever_is_frozen_behind_its_backward(texts: tuple[str, ...], all_cells: bool) -> None:
    """The fast cells: two ranks, stage 0 in fp32 and 3 in bf16."""
    scripts = [script for text in texts for script in everywhere(parse(text))]
    if not all_cells:
        cells = {(0, "fp32"), (3, "bf16")}
        scripts = [one for one in scripts if one.cell.ranks == 2 and (one.cell.stage, one.cell.dtype) in cells]
    found = {str(script): verdict for script, verdict in zip(scripts, verdicts_of(scripts), strict=True) if verdict.word != "equal"}
    assert not found, "\n".join(f"{verdict}: {script}" for script, verdict in found.items())


def _added_to_one_group() -> None:
    """Add a frozen parameter with a gradient to the param group of one rank only: one error on all of them."""
    for stage in (0, 3):
        model = _model()
        optimizer = _optimizer("adamw", _groups(model))
        engine = _engine(model, optimizer, stage)
        adapter = model.layers[1].adapter = nn.Linear(8, 8)
        if ranks.rank() == 0:
            optimizer.param_groups[0]["params"].append(adapter.weight)
        engine.backward(engine(_rows(0, 0, ranks.rank())).square().mean())
        adapter.requires_grad_(False)
        with pytest.raises(StateError, match=r"layers\.1\.adapter\.weight: first trained after initialize\(\), but on some ranks"):
            engine.step()
        engine.destroy()


def test_a_frozen_parameter_that_joins_on_one_rank_is_told() -> None:
    ranks.run_ranks(_added_to_one_group, 2)


def _broken_off() -> None:
    """Check that a backward that failed leaves no gradient anywhere, including parameters that would be added by the step."""

    def fail(grad: torch.Tensor) -> None:
        raise ArithmeticError

    for stage in (0, 3):
        model = _model()
        engine = _engine(model, _optimizer("adamw", _groups(model)), stage)
        _add_adapter(model, engine.optimizer)
        rows = _rows(0, 0, ranks.rank()).requires_grad_()
        rows.register_hook(fail)
        with pytest.raises(ArithmeticError):
            engine.backward(engine(rows).square().mean())
        assert all(param.grad is None for param in model.parameters()), stage
        engine.destroy()


def test_a_backward_that_broke_off_leaves_no_gradient_to_join_with() -> None:
    ranks.run_ranks(_broken_off, 2)


def _first_update_without_backward() -> None:
    """Check that ``step`` updates with a gradient that was written to a parameter which no step has trained."""
    for stage in (0, 1, 2):  # a rank that has a part of a parameter refuses the assignment
        model = _model()
        engine = _engine(model, torch.optim.SGD(_groups(model), lr=0.5), stage, gradient_clipping=0.0)
        before = _whole(model)["layers.0.first.bias"]
        model.layers[0].first.bias.grad = torch.full((12,), float(1 + ranks.rank()))
        engine.step()
        after = _whole(model)["layers.0.first.bias"]
        torch.testing.assert_close(after, before - 0.5 * 1.5, msg=f"stage {stage}")
        engine.destroy()


def test_a_gradient_that_was_written_to_a_frozen_parameter_counts() -> None:
    ranks.run_ranks(_first_update_without_backward, 2)


def _foreign() -> None:
    model = _model()
    optimizer = _optimizer("adamw", _groups(model))
    engine = _engine(model, optimizer, 2)
    with pytest.raises(ValueError, match="more than one parameter group"):
        engine.optimizer.add_param_group({"params": [model.head.weight]})
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(3))]})
    engine.backward(engine(_rows(0, 0, ranks.rank())).square().mean())
    with pytest.raises(StateError, match="is not a parameter of the model"):
        engine.step()
    engine.destroy()


def test_what_is_no_parameter_of_the_model_cannot_join() -> None:
    ranks.run_ranks(_foreign, 2)


def _of_the_configuration() -> None:
    """Check that the configuration's optimizer, which was given no parameters, trains every parameter that requires a gradient."""
    for stage in (0, 1, 2, 3):
        model = _model()
        optimizer = {"optimizer": {"type": "AdamW", "params": {"lr": 0.02}}}
        engine = _engine(model, None, stage, **optimizer)
        before = _whole(model)
        model.layers[0].requires_grad_(True)
        model.layers[3].adapter = nn.Linear(8, 8)
        for step in range(2):
            engine.backward(engine(_rows(step, 0, ranks.rank())).square().mean())
            engine.step()
        after = _whole(model)
        assert all(not torch.equal(after[key], before.get(key, torch.zeros(()))) for key in after if key != "layers.2.first.bias"), stage
        engine.destroy()


def test_the_configurations_optimizer_trains_all_that_requires_a_gradient() -> None:
    ranks.run_ranks(_of_the_configuration, 2)


def _wide() -> None:
    """Train a model in float64 next to parameters of other dtypes: it trains in float64."""
    torch.manual_seed(2)
    plain = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 3)).double()
    for stage in (0, 1, 2, 3):
        torch.manual_seed(2)
        model = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 3)).double()
        reference, expected = torch.nn.Sequential(*plain), {key: value.detach().clone() for key, value in plain.state_dict().items()}
        reference.load_state_dict(expected)
        engine = _engine(model, torch.optim.SGD(model.parameters(), lr=0.1), stage, micro_steps=2, gradient_clipping=0.0)
        rows = [torch.randn(4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(rank)) for rank in range(ranks.world())]
        for _ in range(2):
            engine.backward(engine(rows[ranks.rank()]).square().mean() / 3)
            engine.step()
        loss = sum(reference(part).square().mean() for part in rows) / (3 * len(rows))
        gradients = torch.autograd.grad(loss, list(reference.parameters()))
        for (key, value), gradient in zip(_whole(model).items(), gradients, strict=True):
            torch.testing.assert_close(value, expected[key] - 0.1 * gradient, rtol=1e-12, atol=1e-13, msg=f"stage {stage}: {key}")
        engine.destroy()


def test_float64_gradients_stay_float64() -> None:
    ranks.run_ranks(_wide, 2)


def _complex() -> None:
    model = nn.ParameterDict({"turn": nn.Parameter(torch.ones(3, dtype=torch.complex64)), "scale": nn.Parameter(torch.ones(3))})
    with pytest.raises(UnsupportedError, match="turn: parameters of complex numbers"):
        _engine(model, torch.optim.SGD(model.parameters(), lr=0.1), 1)


def test_complex_parameters_are_refused_by_name() -> None:
    ranks.run_ranks(_complex, 2)


def _lazy() -> None:
    for stage in (0, 3):
        model = nn.Sequential(nn.LazyLinear(4), nn.Linear(4, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with pytest.raises(StateError, match=r"0.weight, 0.bias has no shape before the first forward \(a lazy module\)"):
            _engine(model, optimizer, stage)
        model(torch.ones(1, 3))
        _engine(model, optimizer, stage).destroy()


def test_parameters_without_a_shape_are_refused_by_name() -> None:
    ranks.run_ranks(_lazy, 2)
