"""Test values that a script writes to parameters between the phases of a step: plain PyTorch's results, or an error on all ranks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import hf_zero
from hf_zero.core.units.unit import is_sharded
from hf_zero.errors import StateError
from tests.support import ranks

LR, STEPS = 0.1, 4
Write = Callable[[nn.Module], None]


def _model() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.Linear(16, 2))


def _assign(model: nn.Module) -> None:
    model[0].weight.data = model[0].weight.data * 0.5
    model[2].bias.data = torch.full_like(model[2].bias.data, 0.25)


@torch.no_grad()
def _in_place(model: nn.Module) -> None:
    model[0].weight.clamp_(-0.125, 0.125)
    model[3].bias.fill_(0.25)


def _through_data(model: nn.Module) -> None:
    model[2].weight.data.mul_(1.5)
    model[3].weight.data.copy_(torch.full_like(model[3].weight.data, 0.25))


def _load(model: nn.Module) -> None:
    model.load_state_dict({key: torch.full_like(value, 0.0625) for key, value in model.state_dict().items()})


def _apply(model: nn.Module) -> None:
    model._apply(lambda tensor: tensor.clone())


WRITES = {"assign": _assign, "in place": _in_place, "data": _through_data, "load": _load, "apply": _apply}
MOMENTS = ("before forward", "before backward", "before step", "after step")


def _rows(step: int, rank: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * step + rank)).to(dtype)


def _gathered(model: nn.Module, write: Write, wanted: bool) -> None:
    with hf_zero.zero.GatheredParameters(list(model.parameters()), enabled=wanted):
        write(model)


class _Plain:
    """Plain PyTorch with fp32 masters beside 16-bit parameters: an element whose 16-bit value was written replaces its master."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.model = _model().to(dtype)
        self.masters = [param.detach().float() for param in self.model.parameters()]
        self.optimizer = torch.optim.SGD([nn.Parameter(master) for master in self.masters], lr=LR, momentum=0.5)

    def adopt(self) -> None:
        for param, master in zip(self.model.parameters(), self._held(), strict=True):
            master.data.copy_(torch.where(master.to(param.dtype) == param, master, param.float()))

    def _held(self) -> list[Any]:
        return self.optimizer.param_groups[0]["params"]

    def update(self) -> None:
        self.adopt()
        for param, master in zip(self.model.parameters(), self._held(), strict=True):
            master.grad = param.grad.float()
            param.grad = None
        self.optimizer.step()
        with torch.no_grad():
            for param, master in zip(self.model.parameters(), self._held(), strict=True):
                param.copy_(master)


def _at(moment: str, writes: list[Callable[[], None]], now: str) -> None:
    for write in writes if now == moment else ():
        write()


def _compare(stage: int, dtype: str, optimizer: str) -> None:
    for name, write in WRITES.items():
        for moment in MOMENTS:
            if moment == "before backward" and (stage == 3 or name in ("in place", "load")):
                continue  # torch refuses the one, and at stage 3 the weights are not there
            if stage == 3 and name in ("load", "apply"):
                continue
            wide = torch.bfloat16 if dtype == "bf16" else torch.float32
            plain = _Plain(wide)
            config: dict[str, Any] = {"train_micro_batch_size_per_gpu": 4, "gradient_clipping": 0.0, "zero_optimization": {"stage": stage}}
            config["zero_optimization"]["stage3_param_persistence_threshold"] = 40
            if dtype == "bf16":
                config["bf16"] = {"enabled": True}
            model = _model()
            engine = hf_zero.initialize(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=LR, momentum=0.5), config=config)[0]
            for step in range(STEPS):
                label = f"{name} {moment}, stage {stage}, {dtype}, step {step}"

                both = [partial(write, plain.model), partial(_gathered, model, write, stage == 3)]
                at = partial(_at, moment if step == 1 else "", both)
                at("before forward")
                rows = [_rows(step, rank, wide) for rank in range(ranks.world())]
                losses = [plain.model(part).square().mean() / ranks.world() for part in rows]
                loss = engine(rows[ranks.rank()]).square().mean()
                at("before backward")
                grads = [torch.zeros_like(param, dtype=torch.float32) for param in plain.model.parameters()]
                for each in losses:
                    for total, grad in zip(grads, torch.autograd.grad(each, list(plain.model.parameters())), strict=True):
                        total += grad.float()
                engine.backward(loss)
                for param, total in zip(plain.model.parameters(), grads, strict=True):
                    param.grad = total.to(param.dtype)
                at("before step")
                engine.step()
                plain.update()
                at("after step")
                plain.adopt()
                bound = {"rtol": 2e-2, "atol": 2e-2} if dtype == "bf16" else {"rtol": 1e-5, "atol": 1e-6}
                for param, master, expected in zip(model.parameters(), plain._held(), plain.model.parameters(), strict=True):
                    found = hf_zero.utils.safe_get_full_fp32_param(param)
                    torch.testing.assert_close(found, master.data, msg=lambda text, label=label: f"{label}: {text}", **bound)
                    with hf_zero.zero.GatheredParameters([param]):
                        torch.testing.assert_close(param.data, expected.data, msg=lambda text, label=label: f"{label}: {text}", **bound)
            engine.destroy()


@pytest.mark.fast_rows("fp32-0", "bf16-3")
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_what_is_written_counts(stage: int, dtype: str) -> None:
    ranks.run_ranks(_compare, 2, stage, dtype, "sgd")


def _engine(stage: int, **config: Any) -> tuple[nn.Module, Any]:
    model = _model()
    sections = {
        "train_micro_batch_size_per_gpu": 4,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": LR}},
        **config,
    }
    sections["zero_optimization"] = {"stage": stage, "stage3_param_persistence_threshold": 40}
    return model, hf_zero.initialize(model=model, model_parameters=model.parameters(), config=sections)[0]


def _saved(folder: str) -> None:
    """Check that a save contains values written before it, at every stage."""
    for stage in (0, 1, 2, 3):
        model, engine = _engine(stage)
        _gathered(model, _through_data, stage == 3)
        engine.save_checkpoint(f"{folder}/{stage}")
        _, other = _engine(stage)
        other.load_checkpoint(f"{folder}/{stage}")
        found = hf_zero.utils.safe_get_full_fp32_param(other.module[3].weight)
        assert bool((found == 0.25).all()), stage
        engine.destroy()
        other.destroy()


def test_a_save_has_what_was_written(tmp_path: Any) -> None:
    ranks.run_ranks(_saved, 2, str(tmp_path))


def _refused() -> None:
    for stage in (0, 1, 2, 3):
        model, engine = _engine(stage)
        loss = engine(_rows(0, ranks.rank())).square().mean()
        engine.backward(loss)
        if ranks.rank() == 1:
            model[0].weight.data = torch.zeros(5, 5)
        text = "was given data while it was divided" if stage == 3 else "A parameter of an engine keeps its shape"
        with pytest.raises(StateError, match=rf"{text}[^$]*rank 1"):
            engine.step()
        engine.destroy()


def test_what_one_rank_assigns_is_refused_on_all() -> None:
    ranks.run_ranks(_refused, 2)


def _frozen() -> None:
    """Check that a frozen parameter written on one rank inside a gather is the same on all ranks afterwards, at every stage."""
    for stage in (0, 1, 2, 3):
        model = _model()
        model[0].requires_grad_(False)
        config = {"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 40}}
        engine = hf_zero.initialize(model=model, optimizer=torch.optim.SGD(model[2].parameters(), lr=LR), config=config)[0]
        with hf_zero.zero.GatheredParameters(list(model[0].parameters()), modifier_rank=1):
            if ranks.rank() == 1:
                model[0].weight.data.fill_(0.5)
                model[0].bias.data.fill_(0.5)
        with hf_zero.zero.GatheredParameters(list(model[0].parameters())):
            assert all(bool((param == 0.5).all()) for param in model[0].parameters()), stage
        engine.destroy()


def test_frozen_parameters_are_alike_after_a_write_on_one_rank() -> None:
    ranks.run_ranks(_frozen, 2)


def _frozen_alone() -> None:
    """Check that a frozen parameter written by one rank in a gather without broadcast is refused; writes of all ranks, or sent ones, are
    kept.
    """
    for stage in (0, 1, 2):
        model = _model()
        model[0].requires_grad_(False)
        config = {"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": stage}}
        engine = hf_zero.initialize(model=model, optimizer=torch.optim.SGD(model[2].parameters(), lr=LR), config=config)[0]
        weight = model[0].weight

        def train(engine: Any = engine) -> None:
            engine.backward(engine(_rows(0, 0, torch.float32)).square().mean())
            engine.step()

        with hf_zero.zero.GatheredParameters([weight]):
            weight.data.fill_(0.5)
        train()
        with hf_zero.zero.GatheredParameters([weight], modifier_rank=1), hf_zero.zero.GatheredParameters([weight]):
            if ranks.rank() == 1:
                weight.data.fill_(0.25)
        train()
        assert bool((weight == 0.25).all()), stage
        with hf_zero.zero.GatheredParameters([weight]):
            if ranks.rank() == 1:
                weight.data.fill_(0.75)
        with pytest.raises(StateError, match=r"parameter 0\.weight was written on rank\(s\) 1 of 2, and not written"):
            train()
        engine.destroy()


def test_what_one_rank_writes_to_a_frozen_parameter_is_refused_on_all() -> None:
    ranks.run_ranks(_frozen_alone, 2)


def _onebit() -> None:
    """Check that one assignment does not stop training."""
    optimizer = {"type": "OneBitAdam", "params": {"lr": 0.01, "freeze_step": 2}}
    for stage in (0, 1):
        model, engine = _engine(stage, optimizer=optimizer)
        for step in range(5):
            before = hf_zero.utils.safe_get_full_fp32_param(model[0].weight)
            engine.backward(engine(_rows(step, ranks.rank())).square().mean())
            engine.step()
            assert not torch.equal(before, hf_zero.utils.safe_get_full_fp32_param(model[0].weight)), (stage, step)
            _apply(model)
        engine.destroy()


def test_onebit_adam_goes_on_after_an_assignment() -> None:
    ranks.run_ranks(_onebit, 2)


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + torch.tanh(self.linear(hidden))


def _divided() -> Any:
    """Return an engine at stage 3 whose blocks are resharded between forward and backward."""
    torch.manual_seed(3)
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": LR}},
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0, "stage3_max_reuse_distance": 0},
    }
    return hf_zero.initialize(model=nn.Sequential(_Block(), _Block(), _Block()), config=config)[0]


def _written_divided(moment: str, who: tuple[int, ...]) -> None:
    """Assign to sharded parameters: one error, and training continues without the data; another engine does not notice."""
    written, beside = _divided(), _divided()
    for step in range(3):
        rows = _rows(step, ranks.rank(), torch.float32)

        def write(now: str, step: int = step) -> None:
            if (step, now) == (1, moment) and ranks.rank() in who:
                weight = written.module[1].linear.weight
                assert is_sharded(weight)
                weight.data = torch.full((6, 6), 0.5)

        def train(engine: Any, write: Callable[[str], None], rows: torch.Tensor = rows) -> None:
            loss = engine(rows).square().mean()
            write("before backward")
            engine.backward(loss)
            write("before step")
            engine.step()

        if step == 1:
            with pytest.raises(StateError, match=r"1\.linear\.weight was given data while it was divided .*modifier_rank=0"):
                train(written, write)
            written.zero_grad()
        train(beside, lambda _: None)
        train(written, lambda _: None)
    for mine, other in zip(written.module.parameters(), beside.module.parameters(), strict=True):
        found, expected = hf_zero.utils.safe_get_full_fp32_param(mine), hf_zero.utils.safe_get_full_fp32_param(other)
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
    written.destroy()
    beside.destroy()


@pytest.mark.fast_rows("who0-before backward", "who1-before step")
@pytest.mark.parametrize("moment", ["before backward", "before step"])
@pytest.mark.parametrize("who", [(0, 1), (1,)])
def test_what_is_assigned_to_a_divided_parameter_is_refused(moment: str, who: tuple[int, ...]) -> None:
    ranks.run_ranks(_written_divided, 2, moment, who)


def _several_divided() -> None:
    """Assign to sharded parameters of several units: one error that names all, and the next use raises nothing."""
    engine = _divided()
    rows = _rows(0, ranks.rank(), torch.float32)
    for moment in ("before backward", "before step"):
        loss = engine(rows).square().mean()
        if moment == "before step":
            engine.backward(loss)
        for index in (0, 2):
            engine.module[index].linear.weight.data = torch.zeros(6, 6)
        with pytest.raises(StateError, match=r"were given data while they were divided") as caught:
            engine.backward(loss) if moment == "before backward" else engine.step()
        assert all(name in str(caught.value) for name in ("0.linear.weight", "2.linear.weight"))
        engine.zero_grad()
        engine.backward(engine(rows).square().mean())
        engine.step()
    engine.destroy()


def test_what_is_assigned_to_several_divided_parameters_is_one_error() -> None:
    ranks.run_ranks(_several_divided, 2)


def _read_next() -> None:
    """Use the parameters next in a forward, a gather or a save, not always in a backward: it raises too."""
    engine = _divided()
    rows = _rows(0, ranks.rank(), torch.float32)
    weight = engine.module[1].linear.weight
    for use in (
        lambda: engine(rows),
        lambda: hf_zero.zero.GatheredParameters([weight]).__enter__(),
        lambda: hf_zero.utils.safe_get_full_fp32_param(weight),
    ):
        loss = engine(rows).square().mean()
        engine.module[1].linear.weight.data = torch.zeros(6, 6)
        with pytest.raises(StateError, match=r"1\.linear\.weight was given data while it was divided"):
            use()
        engine.backward(loss)
        engine.step()
    engine.destroy()


def test_the_next_use_of_an_assigned_parameter_is_refused() -> None:
    ranks.run_ranks(_read_next, 2)


class _Decaying(_Block):
    """A block that shrinks its matrix in place in each training forward, as tables of codes do."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.linear.weight.data.mul_(0.75)
        return super().forward(hidden)


def _in_forward(stage: int, bf16: bool, persist: int) -> None:
    """Check that a forward's write through ``data`` is kept like any write, although neither version nor address of the parameter
    changes.
    """
    dtype = torch.bfloat16 if bf16 else torch.float32
    torch.manual_seed(3)
    plain = nn.Sequential(*[_Decaying() for _ in range(3)])
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 4,
        "bf16": {"enabled": bf16},
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": persist, "stage3_max_reuse_distance": 0},
    }
    model = nn.Sequential(*[_Decaying() for _ in range(3)])
    model.load_state_dict(plain.state_dict())
    engine = hf_zero.initialize(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=LR), config=config)[0]
    plain = plain.to(dtype)
    masters = [nn.Parameter(param.detach().float()) for param in plain.parameters()]
    optimizer = torch.optim.SGD(masters, lr=LR)
    for step in range(3):
        plain(torch.cat([_rows(step, rank, dtype) for rank in range(ranks.world())])).square().mean().backward()
        engine.backward(engine(_rows(step, ranks.rank(), dtype)).square().mean())
        engine.step()
        for param, master in zip(plain.parameters(), masters, strict=True):
            master.data.copy_(torch.where(master.to(dtype) == param, master, param.float()))
            master.grad, param.grad = param.grad.float(), None
        optimizer.step()
        bound = {"rtol": 2e-2, "atol": 4e-3} if bf16 else {"rtol": 1e-5, "atol": 1e-6}
        for param, copied, master in zip(model.parameters(), plain.parameters(), masters, strict=True):
            copied.data.copy_(master.data)
            torch.testing.assert_close(hf_zero.utils.safe_get_full_fp32_param(param), master.data, **bound)
    engine.destroy()


@pytest.mark.fast_rows("2-0", "3-1000")
@pytest.mark.parametrize(("stage", "persist"), [(0, 0), (2, 0), (3, 0), (3, 1000)])
def test_what_a_forward_writes_through_data_counts(stage: int, persist: int) -> None:
    for bf16 in (False, True):
        ranks.run_ranks(_in_forward, 2, stage, bf16, persist)


def _differing_gather() -> None:
    """Check that values which ranks have written differently in a gather are dropped, also through ``data``, and that training
    continues.
    """
    written, beside = _divided(), _divided()
    weight = written.module[1].linear.weight
    for step in range(2):
        with (
            pytest.raises(StateError, match=r"1\.linear\.weight: written inside GatheredParameters"),
            hf_zero.zero.GatheredParameters(list(written.module.parameters())),
        ):
            weight.data.fill_(float(ranks.rank()))
        with (
            pytest.raises(StateError, match="another rank has left" if ranks.rank() else None) as caught,
            hf_zero.zero.GatheredParameters(list(written.module.parameters())),
        ):
            weight.data.fill_(0.5)
            if ranks.rank() == 0:
                raise StateError("of the script")
        assert ranks.rank() or "of the script" in str(caught.value)
        for engine in (written, beside):
            engine.backward(engine(_rows(step, ranks.rank(), torch.float32)).square().mean())
            engine.step()
        for mine, other in zip(written.module.parameters(), beside.module.parameters(), strict=True):
            found, expected = hf_zero.utils.safe_get_full_fp32_param(mine), hf_zero.utils.safe_get_full_fp32_param(other)
            torch.testing.assert_close(found, expected, rtol=0, atol=0)
    written.destroy()
    beside.destroy()


def test_what_ranks_write_differently_is_dropped() -> None:
    ranks.run_ranks(_differing_gather, 2)


def _kept_without_a_copy() -> None:
    """Check that tensors taken out of a gather keep their values when the script writes others in a later gather, between two steps."""
    _, engine = _engine(3)
    for step in range(2):
        engine.backward(engine(_rows(step, ranks.rank())).square().mean())
        engine.step()
        params = [param for param in engine.module.parameters() if not param.numel()]  # those that are divided
        with hf_zero.zero.GatheredParameters(params):
            taken = [param.detach() for param in params]
        assert taken
        before = [value.clone() for value in taken]
        for _ in range(2):
            with hf_zero.zero.GatheredParameters(params, modifier_rank=0):
                for param in params:
                    param.data.mul_(2)
        assert all(torch.equal(value, kept) for value, kept in zip(taken, before, strict=True))
    engine.destroy()


def test_values_taken_out_of_a_gather_stay_as_they_were() -> None:
    ranks.run_ranks(_kept_without_a_copy, 2)
