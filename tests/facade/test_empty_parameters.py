"""What a script may do with a parameter that is empty on this rank: ask for its shape and type, and not compute with it."""

from __future__ import annotations

import copy
import io
import itertools
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, get_swa_multi_avg_fn
from torch.utils.dlpack import from_dlpack

import hf_zero
from hf_zero.errors import StateError
from hf_zero.utils import safe_get_full_grad
from tests.support import ranks
from tests.support.models import CASES, class_loss
from tests.support.parity import DTYPES, Run, initialize, prepare

MLP = CASES["mlp"]
Operation = Callable[[Any, Any, Tensor], Any]

# Of an empty parameter, another one, and a tensor of the whole shape.
OPERATIONS: dict[str, Operation] = {
    "p + 1": lambda p, q, x: p + 1,
    "1 - p": lambda p, q, x: 1 - p,
    "p += 1": lambda p, q, x: p.data.add_(1),
    "sum": lambda p, q, x: p.sum(),
    "mean": lambda p, q, x: torch.mean(p),
    "norm": lambda p, q, x: p.norm(),
    "detach().norm": lambda p, q, x: p.detach().norm(),
    "vector_norm": lambda p, q, x: torch.linalg.vector_norm(p),
    "clone": lambda p, q, x: p.clone(),
    "detach().clone": lambda p, q, x: p.detach().clone(),
    "data.clone": lambda p, q, x: p.data.clone(),
    "deepcopy of data": lambda p, q, x: copy.deepcopy(p.data),
    "deepcopy + 1": lambda p, q, x: copy.deepcopy(p) + 1,
    "stack": lambda p, q, x: torch.stack([p, p]),
    "cat": lambda p, q, x: torch.cat([p.detach(), q.detach()]),
    "equal": lambda p, q, x: torch.equal(p, q),
    "==": lambda p, q, x: p == q,
    "allclose": lambda p, q, x: torch.allclose(p.data, q.data),
    "in": lambda p, q, x: q in [p],
    "isnan": lambda p, q, x: torch.isnan(p).any(),
    "bool": lambda p, q, x: bool(p),
    "iteration": lambda p, q, x: list(p),
    "index": lambda p, q, x: p[:1],
    "view": lambda p, q, x: p.view(-1),
    "flatten": lambda p, q, x: p.flatten(),
    "T": lambda p, q, x: p.T,
    "zeros_like": lambda p, q, x: torch.zeros_like(p),
    "cpu": lambda p, q, x: p.cpu(),
    "data.cpu().clone": lambda p, q, x: p.data.cpu().clone(),
    "float": lambda p, q, x: p.float(),
    "to": lambda p, q, x: p.to(torch.float32),
    "numpy": lambda p, q, x: p.detach().numpy(),
    "numpy.asarray": lambda p, q, x: numpy.asarray(p.detach()),
    "tolist": lambda p, q, x: p.tolist(),
    "data.tolist": lambda p, q, x: p.data.tolist(),
    "item": lambda p, q, x: p.item(),
    "dlpack": lambda p, q, x: from_dlpack(p.detach()),
    "foreach_mul": lambda p, q, x: torch._foreach_mul([p], 2),
    "foreach_lerp": lambda p, q, x: torch._foreach_lerp_([x], [p.data], 0.1),
    "foreach_norm": lambda p, q, x: torch._foreach_norm([p, q]),
    "lerp_": lambda p, q, x: x.lerp_(p, 0.1),
    "copy_ into it": lambda p, q, x: p.data.copy_(x),
    "copy_ of it": lambda p, q, x: x.copy_(p.data),
    "mul_": lambda p, q, x: p.data.mul_(2),
    "out=": lambda p, q, x: torch.add(x, 1, out=p.data),
    "set_": lambda p, q, x: x.set_(p.data),
    "init": lambda p, q, x: nn.init.zeros_(p),
    "linear": lambda p, q, x: functional.linear(torch.randn(1, 8), p),
    "einsum": lambda p, q, x: torch.einsum("ij->i", p),
    "parameters_to_vector": lambda p, q, x: nn.utils.parameters_to_vector([p, q]),
    "vector_to_parameters": lambda p, q, x: nn.utils.vector_to_parameters(x.flatten(), [p]),
    "data = data of another": lambda p, q, x: setattr(p, "data", q.data),
    "broadcast": lambda p, q, x: dist.broadcast(p.data, 0),
    "all_reduce": lambda p, q, x: dist.all_reduce(p.detach()),
    "save of data": lambda p, q, x: torch.save(p.data, io.BytesIO()),
    "state of data": lambda p, q, x: __import__("safetensors.torch").torch.save({"a": p.detach()}),
    "a Parameter of it": lambda p, q, x: nn.Parameter(p.data).sum(),
}


def _engine(dtype: str = "fp32", stage: int = 3) -> Any:
    engine = initialize(MLP.build(), Run(stage, dtype))
    _step(engine, dtype)
    return engine


def _step(engine: Any, dtype: str = "fp32", step: int = 0) -> None:
    engine.backward(class_loss(engine, prepare(MLP.rows(step, 0, ranks.rank()), DTYPES[dtype])))
    engine.step()


def _refused() -> None:
    engine = _engine()
    (name, param), (_, other) = itertools.islice(engine.module.named_parameters(), 2)
    assert param.numel() == other.numel() == 0
    for label, operation in OPERATIONS.items():
        whole = torch.ones(param.ds_shape)
        with pytest.raises(StateError, match=rf"{name} is divided .* use hf_zero\.utils\.AveragedWeights"):
            pytest.fail(f"{label} gave {operation(param, other, whole)}")
        assert torch.equal(whole, torch.ones(param.ds_shape)), label
    with pytest.raises(RuntimeError, match="incompatible tensor type"):  # torch's own: nothing is asked of ``param``
        nn.Parameter(torch.ones(2)).data = param.data
    _looked_at(engine, param)
    _is_itself_in_modules(engine, param)
    _loaded(engine)
    engine.destroy()


def _looked_at(engine: Any, param: Any) -> None:
    """What needs no values is as ever; nothing is sent (the job's order of collectives is checked)."""
    assert param.shape == param.data.shape == param.detach().shape == (0,) and param.size() == (0,)
    assert param.dtype == param.data.dtype == torch.float32 and param.device == param.data.device == ranks.device()
    assert not param.is_meta and not param.data.is_meta and param.is_leaf and param.requires_grad and param.grad is None
    assert param.numel() == 0 and param.element_size() == 4 and param.is_floating_point() and torch.is_floating_point(param)
    assert param.data_ptr() == 0 and param.untyped_storage().nbytes() == 0 and param.storage_offset() == 0 and param.is_contiguous()
    assert {param: 1}[param] == 1 and param != None and "ShardedParameter" in repr(param) and isinstance(param, nn.Parameter)  # noqa: E711
    assert param.new_zeros(2).tolist() == [0, 0] and torch.autograd.graph.get_gradient_edge(param).node.variable is param
    assert copy.deepcopy(param).ds_shape == param.ds_shape
    param.data = param.data  # its own
    param.register_hook(lambda grad: grad).remove()
    _selected_by_dimensions(engine)
    assert sum(p.numel() for p in engine.module.parameters()) == 0


def _selected_by_dimensions(engine: Any) -> None:
    """A script that selects matrices, for a penalty or a param group without weight decay, leaves none out without a word."""
    shapes = {name: param.ds_shape for name, param in engine.module.named_parameters()}
    assert {len(shape) for shape in shapes.values()} == {1, 2}
    for param, shape in zip(engine.module.parameters(), shapes.values(), strict=True):
        told = param.dim(), param.ndim, param.ndimension(), param.data.dim(), param.detach().ndim, torch.Tensor.dim(param)
        assert told == (len(shape),) * 6, (told, shape)
    with pytest.raises(StateError, match="is divided"):
        sum(param.pow(2).sum() for param in engine.module.parameters() if param.dim() > 1)


def _is_itself_in_modules(engine: Any, param: Any) -> None:
    """Moves and casts of modules leave it where its engine keeps it; a change of type is refused."""
    module = engine.module
    for move in (module.cpu, module.float, lambda: module.to("cpu"), lambda: module.to(torch.float32)):
        move()
        assert next(module.parameters()) is param and param.numel() == 0
    with pytest.raises(StateError, match=r"converted from torch\.float32 to torch\.bfloat16"):
        module.bfloat16()
    _step(engine, step=1)


def _loaded(engine: Any) -> None:
    """A state dict of stand-ins is loaded into the parameters that it stands for, and is no copy of their values."""
    state = engine.module.state_dict()
    engine.module.load_state_dict(state)
    copies = [{k: v.clone() for k, v in state.items()}, copy.deepcopy(state), {k: v.to(torch.float64) for k, v in state.items()}]
    copied, another = copy.deepcopy(engine.module), _engine()
    for given, target in ((copies[0], engine.module), (copies[1], engine.module), (copies[2], engine.module), (state, copied)):
        with pytest.raises(StateError, match=r"a state dict without its values was loaded into"):
            target.load_state_dict(given)
    with pytest.raises(StateError, match="no values of it"):
        another.module.load_state_dict({k: v * 0.5 for k, v in state.items()})
    with pytest.raises(RuntimeError, match="incompatible tensor type"):
        nn.Parameter(torch.ones(2)).data = next(iter(state.values()))  # would read from no memory
    another.destroy()


def test_nothing_is_computed_with_nothing() -> None:
    ranks.run_ranks(_refused, 2)


def _rows_frozen() -> None:
    """A hook that zeroes the gradient of rows up to ``len(p)``, as axolotl freezes a range of an embedding, zeroes them all."""
    engine = _engine()
    params = [param for param in engine.module.parameters() if param.dim() > 1]
    for param in params:
        assert len(param) == len(param.data) == len(param.detach()) == param.ds_shape[0] > 2
        param.register_hook(partial(_zero_rows, 2, len(param)))
    engine.backward(class_loss(engine, prepare(MLP.rows(1, 0, ranks.rank()), DTYPES["fp32"])))
    gradients = [safe_get_full_grad(param) for param in params]
    assert all(grad[:2].any() and not grad[2:].any() for grad in gradients)


def _zero_rows(first: int, last: int, gradient: Tensor) -> None:
    gradient[first:last].zero_()


def test_a_hook_that_freezes_rows_knows_how_many_there_are() -> None:
    ranks.run_ranks(_rows_frozen, 2)


# -- a class of a script's own ------------------------------------------------------------------------------------------


class Scaled(nn.Parameter):
    """As a script marks parameters of its own."""

    def scale(self) -> Tensor:
        return self * 2


def _own_class() -> None:
    model = MLP.build()
    first = next(iter(model.children()))
    first.weight = Scaled(first.weight.data.clone())
    engine = initialize(model, Run(3))
    _step(engine)
    param: Any = first.weight
    assert isinstance(param, Scaled) and param.numel() == 0
    with pytest.raises(StateError, match="is divided"):
        param.scale()
    copied = copy.deepcopy(engine.module)
    for holder in (engine.module, copied):
        weight: Any = next(iter(holder.children())).weight
        with hf_zero.zero.GatheredParameters([weight]):
            assert type(weight) is Scaled and weight.scale().shape == weight.ds_shape
    engine.destroy()


def test_a_class_of_a_scripts_own() -> None:
    ranks.run_ranks(_own_class, 2)


# -- averages that scripts keep -----------------------------------------------------------------------------------------


class Ema:
    """An average as diffusers keeps it: ``shadow_params``, updated, copied in and out."""

    def __init__(self, parameters: Any) -> None:
        self.shadow = [p.clone().detach() for p in parameters]

    def step(self, parameters: Any, decay: float = 0.9) -> None:
        for shadow, param in zip(self.shadow, parameters, strict=True):
            shadow.sub_((1 - decay) * (shadow - param))

    def copy_to(self, parameters: Any) -> None:
        for shadow, param in zip(self.shadow, parameters, strict=True):
            param.data.copy_(shadow.to(param.device).data)


def _torch_average(model: nn.Module, gathered: Any) -> Any:
    with gathered():
        average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))

    def update() -> None:
        with gathered():
            average.update_parameters(model)

    return update, lambda: dict(average.module.named_parameters())


def _swa(model: nn.Module, gathered: Any) -> Any:
    with gathered():
        average = AveragedModel(model, multi_avg_fn=get_swa_multi_avg_fn(), use_buffers=True)

    def update() -> None:
        with gathered():
            average.update_parameters(model)

    return update, lambda: dict(average.module.named_parameters())


def _diffusers(model: nn.Module, gathered: Any) -> Any:
    with gathered():
        average = Ema(model.parameters())

    def update() -> None:
        with gathered(), torch.no_grad():
            average.step(model.parameters())

    return update, lambda: dict(zip(dict(model.named_parameters()), average.shadow, strict=True))


def _of_state_dict(model: nn.Module, gathered: Any) -> Any:
    with gathered():
        average = {name: value.clone() for name, value in model.state_dict().items()}

    def update() -> None:
        with gathered():
            for name, value in model.state_dict().items():
                average[name].mul_(0.9).add_(value, alpha=0.1)

    return update, lambda: average


def _of_copy(model: nn.Module, gathered: Any) -> Any:
    """A teacher: a deep copy that is updated in place."""
    with gathered():
        teacher = copy.deepcopy(model).requires_grad_(False)

    def update() -> None:
        with gathered(), torch.no_grad():
            for slow, param in zip(teacher.parameters(), model.parameters(), strict=True):
                slow.data.mul_(0.9).add_(param.data, alpha=0.1)

    return update, lambda: dict(teacher.named_parameters())


def _foreach(model: nn.Module, gathered: Any) -> Any:
    with gathered():
        average = [param.detach().clone() for param in model.parameters()]

    def update() -> None:
        with gathered(), torch.no_grad():
            torch._foreach_lerp_(average, [param.detach() for param in model.parameters()], 0.1)

    return update, lambda: dict(zip(dict(model.named_parameters()), average, strict=True))


def _history(model: nn.Module, gathered: Any) -> Any:
    """All weights of the last steps are kept, and averaged at the end."""
    history: list[list[Tensor]] = []

    def update() -> None:
        with gathered():
            history.append([param.detach().cpu().float().clone() for param in model.parameters()])

    def found() -> dict[str, Tensor]:
        stacked = [torch.stack(values).mean(0) for values in zip(*history, strict=True)]
        return dict(zip(dict(model.named_parameters()), stacked, strict=True))

    return update, found


AVERAGES: dict[str, Callable[[nn.Module, Any], Any]] = {
    "AveragedModel, EMA": _torch_average,
    "AveragedModel, SWA": _swa,
    "EMAModel": _diffusers,
    "of a state dict": _of_state_dict,
    "of a copy": _of_copy,
    "foreach": _foreach,
    "history": _history,
}


def _kept_averages(stage: int) -> None:
    """Each kind of average beside the same one of plain PyTorch: equal, or at stage 3 outside of a gather an error."""
    from contextlib import nullcontext

    for (label, kind), inside in itertools.product(AVERAGES.items(), (False, True)):
        engine, model = initialize(MLP.build(), Run(stage)), MLP.build()

        def gathered(engine: Any = engine, inside: bool = inside) -> Any:
            return hf_zero.zero.GatheredParameters(list(engine.module.parameters())) if inside else nullcontext()

        _step(engine)
        if stage == 3 and not inside:
            with pytest.raises(StateError, match=r"use hf_zero\.utils\.AveragedWeights"):
                update, found = kind(engine.module, gathered)
                update()
                pytest.fail(f"{label}: {found()}")
            engine.destroy()
            continue
        _take(model, engine)
        (update, found), (expect, wanted) = kind(engine.module, gathered), kind(model, nullcontext)
        for step in range(1, 3):
            _step(engine, step=step)
            _take(model, engine)
            update()
            expect()
        for name, value in wanted().items():
            assert value.numel() and torch.equal(found()[name], value), f"{label}, stage {stage}: {name}"
        engine.destroy()


def _take(model: nn.Module, engine: Any) -> None:
    """Gives a plain model the weights of an engine's."""
    with hf_zero.zero.GatheredParameters(list(engine.module.parameters())), torch.no_grad():
        for mine, param in zip(model.parameters(), engine.module.parameters(), strict=True):
            mine.copy_(param)


@pytest.mark.fast_rows("3")
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_averages_of_scripts_are_right_or_refused(stage: int) -> None:
    ranks.run_ranks(_kept_averages, 2, stage)


def test_averages_on_one_rank() -> None:
    ranks.run_ranks(_kept_averages, 1, 2)


# -- tied names with different values ------------------------------------------------------------------------------------


def _both_names(folder: Path) -> None:
    from safetensors.torch import load_file, save_file
    from transformers import GPT2Config, GPT2LMHeadModel

    from tests.support.zero3 import transformers_zero3, whole_parameters

    file = folder / "model.safetensors"
    if ranks.rank() == 0:
        GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=32, n_embd=16, n_layer=1, n_head=2)).save_pretrained(folder)
        values = load_file(file)
        save_file({**values, "lm_head.weight": values["transformer.wte.weight"] + 1}, file, metadata={"format": "pt"})
    dist.barrier()
    plain = GPT2LMHeadModel.from_pretrained(folder)
    with transformers_zero3(Run(3)):
        model = GPT2LMHeadModel.from_pretrained(folder)
    for name, value in whole_parameters(model).items():
        assert torch.equal(value, plain.get_parameter(name)), name
    assert (model.lm_head.weight is model.transformer.wte.weight) is (plain.lm_head.weight is plain.transformer.wte.weight)


def test_weights_under_both_of_two_tied_names_are_compared_whole(tmp_path: Path) -> None:
    ranks.run_ranks(_both_names, 2, tmp_path)
