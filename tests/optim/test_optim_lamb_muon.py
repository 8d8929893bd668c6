"""Twin of ``hf_zero/optim/lamb.py`` and ``hf_zero/optim/muon.py``."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from hf_zero.errors import ConfigError, UnsupportedError
from hf_zero.optim.factory import build_optimizer
from hf_zero.optim.lamb import Lamb
from hf_zero.optim.muon import MuonWithAuxAdam, muon_parameters, orthogonal

pytestmark = pytest.mark.quick

SHAPES = ((6, 4), (3, 8), (5,))


def params(double: bool = False) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    made = [torch.randn(shape, generator=generator) for shape in SHAPES]
    return [nn.Parameter(value.double() if double else value) for value in made]


def train(optimizer: torch.optim.Optimizer, tensors: list[nn.Parameter], steps: int = 4) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        for tensor in tensors:
            tensor.grad = torch.randn(tensor.shape, generator=generator).to(tensor.dtype)
        optimizer.step()
    return [tensor.detach() for tensor in tensors]


def lamb_by_hand(start: torch.Tensor, grads: list[torch.Tensor], settings: dict[str, Any]) -> torch.Tensor:
    """In double precision, from the published formula with the correction of the bias in the rate."""
    weight, first, second = start.double(), torch.zeros_like(start).double(), torch.zeros_like(start).double()
    beta1, beta2 = settings["betas"]
    for step, grad in enumerate(grads, start=1):
        first = beta1 * first + (1 - beta1) * grad.double()
        second = beta2 * second + (1 - beta2) * grad.double() ** 2
        inside = settings["eps"] if settings["eps_inside_sqrt"] else 0.0
        direction = first / ((second + inside) ** 0.5 + settings["eps"] - inside) + settings["weight_decay"] * weight
        norms = [float((value * value).sum()) ** 0.5 for value in (weight, direction)]
        ratio = min(max(norms[0] / norms[1], settings["min_coeff"]), settings["max_coeff"]) if all(norms) else 1.0
        rate = settings["lr"] * (math.sqrt(1 - beta2**step) / (1 - beta1**step) if settings["bias_correction"] else 1.0)
        weight = weight - rate * ratio * direction
    return weight


@pytest.mark.parametrize(
    "changed", [{}, {"weight_decay": 0.3}, {"bias_correction": False}, {"eps_inside_sqrt": True}, {"max_coeff": 0.5}, {"min_coeff": 9.0}]
)
def test_lamb_is_the_published_algorithm(changed: dict[str, Any]) -> None:
    settings = {
        "lr": 0.05,
        "betas": (0.8, 0.95),
        "eps": 1e-3,
        "weight_decay": 0.0,
        "eps_inside_sqrt": False,
        "bias_correction": True,
        "max_coeff": 10.0,
        "min_coeff": 0.01,
        **changed,
    }
    tensors = params()
    tensors[2].data.zero_()  # a norm of 0: the ratio is 1
    starts = [tensor.detach().clone() for tensor in tensors]
    optimizer = Lamb(tensors, **settings)
    found = train(optimizer, tensors)
    generator = torch.Generator().manual_seed(1)
    grads: list[list[torch.Tensor]] = [[] for _ in SHAPES]
    for _ in range(4):
        for own, shape in zip(grads, SHAPES, strict=True):
            own.append(torch.randn(shape, generator=generator))
    for value, start, own in zip(found, starts, grads, strict=True):
        assert torch.allclose(value.double(), lamb_by_hand(start, own, settings), atol=1e-6)
    assert len(optimizer.get_lamb_coeffs()) == 3


def test_lamb_refuses_what_it_does_not_have() -> None:
    with pytest.raises(UnsupportedError, match="amsgrad"):
        Lamb(params(), amsgrad=True)
    with pytest.raises(UnsupportedError, match="gradient_clipping"):
        Lamb(params(), max_grad_norm=1.0)
    with pytest.raises(ConfigError, match="min_coeff is 2.0 and max_coeff 1.0"):
        build_optimizer("Lamb", {"min_coeff": 2.0, "max_coeff": 1.0}, params())


def test_lamb_by_config_takes_every_key_of_the_json() -> None:
    given = {"lr": "1e-2", "betas": [0.9, 0.99], "eps": 1e-6, "max_coeff": 5.0, "min_coeff": 0.1, "bias_correction": False}
    optimizer = build_optimizer("Lamb", {**given, "eps_inside_sqrt": True, "weight_decay": 0.1, "set_grad_none": True}, params())
    assert type(optimizer) is Lamb
    group = optimizer.param_groups[0]
    assert (group["lr"], group["betas"], group["max_coeff"], group["eps_inside_sqrt"]) == (0.01, (0.9, 0.99), 5.0, True)


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch.optim.Muon came with torch 2.9")
def test_standard_muon_is_torchs_bit_for_bit_and_the_rest_is_adamw() -> None:
    ours, theirs = params(), params()
    settings = {"lr": 0.03, "weight_decay": 0.1}
    optimizer = MuonWithAuxAdam(
        [
            {"params": ours[:2], "use_muon": True, "momentum": 0.9, "ns_method": "standard", **settings},
            {"params": ours[2:], "use_muon": False, "betas": (0.9, 0.95), "eps": 1e-8, **settings},
        ]
    )
    found = train(optimizer, ours)
    muon = torch.optim.Muon(theirs[:2], momentum=0.9, **settings)
    adam = torch.optim.AdamW(theirs[2:], betas=(0.9, 0.95), eps=1e-8, foreach=False, **settings)
    generator = torch.Generator().manual_seed(1)
    for _ in range(4):
        for tensor in theirs:
            tensor.grad = torch.randn(tensor.shape, generator=generator)
        muon.step()
        adam.step()
    for value, expected in zip(found, theirs, strict=True):
        assert torch.equal(value, expected)


def test_the_steps_of_muons_other_parameters_are_counted_in_fp32() -> None:
    """A default dtype of 16 bit, which scripts set, would count to 256."""
    found = []
    for dtype in (torch.float32, torch.bfloat16):
        param = nn.Parameter(torch.ones(3, dtype=torch.float32))
        optimizer = MuonWithAuxAdam([{"params": [param], "use_muon": False, "lr": 0.01}])
        torch.set_default_dtype(dtype)
        try:
            for step in range(300):
                param.grad = torch.full_like(param, 1.0 + step % 3)
                optimizer.step()
        finally:
            torch.set_default_dtype(torch.float32)
        found.append(param.detach().clone())
    assert torch.equal(*found)


@pytest.mark.parametrize("shape", [(6, 4), (4, 4), (3, 40)])
def test_both_methods_are_the_same_polynomial(shape: tuple[int, int]) -> None:
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(2))
    left, values, right = torch.linalg.svd(matrix.double(), full_matrices=False)
    scaled = values / values.norm()
    for _ in range(5):
        scaled = 3.4445 * scaled - 4.7750 * scaled**3 + 2.0315 * scaled**5
    exact = left @ scaled.diag() @ right
    assert torch.allclose(orthogonal(matrix, "gram").double(), exact, atol=1e-4)
    assert torch.allclose(orthogonal(matrix, "standard").double(), exact, atol=5e-2)


@pytest.mark.parametrize("method", ["gram", "standard"])
@pytest.mark.parametrize("shape", [(3, 6, 4), (3, 4, 6), (2, 5, 5)])
def test_each_matrix_of_a_stack_of_experts_is_updated_as_a_parameter_of_its_own(method: str, shape: tuple[int, ...]) -> None:
    settings = {"use_muon": True, "lr": 0.1, "weight_decay": 0.1, "ns_method": method}
    stack = nn.Parameter(torch.randn(shape, generator=torch.Generator().manual_seed(3)))
    alone = [nn.Parameter(matrix.clone()) for matrix in stack.detach()]
    together, apart = MuonWithAuxAdam([{"params": [stack], **settings}]), MuonWithAuxAdam([{"params": alone, **settings}])
    for step in range(3):
        stack.grad = torch.randn(shape, generator=torch.Generator().manual_seed(step))
        stack.grad[1] *= 1e-3  # an expert that few tokens reach
        for param, grad in zip(alone, stack.grad, strict=True):
            param.grad = grad.clone()
        together.step()
        apart.step()
    assert torch.allclose(stack, torch.stack(list(alone)), atol=1e-5 if method == "gram" else 1e-2)


def test_a_convolution_is_one_matrix_scaled_by_the_sides_of_its_kernel() -> None:
    """Check the published factor: that of the last two dimensions of the weight, not of the matrix."""
    grad = torch.randn((64, 3, 3, 2), generator=torch.Generator().manual_seed(4))
    conv, vector = nn.Parameter(torch.zeros_like(grad)), nn.Parameter(torch.zeros(4))
    conv.grad, vector.grad = grad, torch.ones(4)
    MuonWithAuxAdam([{"params": [conv, vector], "use_muon": True, "lr": 1.0, "momentum": 0.0}]).step()
    assert torch.allclose(-conv.detach(), math.sqrt(3 / 2) * orthogonal(grad.flatten(1), "gram").view_as(grad), atol=1e-5)
    assert vector.norm() > 0.5


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wte = nn.Embedding(5, 4)
        self.embed_proj = nn.Linear(4, 4)
        self.hidden = nn.Linear(4, 4)
        self.conv = nn.Conv1d(4, 4, 2)
        self.plain = nn.Linear(4, 4, bias=False)
        self.plain.weight.use_muon = False  # type: ignore[assignment]
        self.lm_head = nn.Linear(4, 5, bias=False)


def test_hidden_matrices_are_found_and_flags_win() -> None:
    model = Model()
    found = {name for name, param in model.named_parameters() if id(param) in muon_parameters(model)}
    assert found == {"hidden.weight", "conv.weight"}
    model.lm_head.weight.use_muon = True  # type: ignore[assignment]
    assert id(model.lm_head.weight) in muon_parameters(model)


def test_muon_by_config_divides_every_group() -> None:
    model = Model()
    decayed, others = [p for p in model.parameters() if p.ndim > 1], [p for p in model.parameters() if p.ndim == 1]
    groups = [{"params": decayed, "weight_decay": 0.2}, {"params": others, "weight_decay": 0.0, "lr": 0.5}]
    config = {"lr": 0.1, "muon_lr": 0.02, "betas": [0.9, 0.98], "momentum": 0.9, "ns_method": "standard"}
    optimizer = build_optimizer("Muon", config, groups, matrices=lambda: muon_parameters(model))
    made = [(len(group["params"]), group["use_muon"], group["lr"], group["weight_decay"]) for group in optimizer.param_groups]
    assert made == [(2, True, 0.02, 0.2), (4, False, 0.1, 0.2), (3, False, 0.5, 0.0)]
    assert optimizer.param_groups[0]["momentum"] == 0.9 and optimizer.param_groups[1]["betas"] == (0.9, 0.98)


def test_what_a_group_says_of_muon_overrules() -> None:
    model = Model()
    weights = [p for p in model.parameters() if p.ndim > 1]
    groups = [
        {"params": weights[:2], "use_muon": True, "muon_lr": 0.5, "name": "first"},
        {"params": weights[2:], "use_muon": False, "betas": (0.5, 0.6), "momentum": 0.3},
    ]
    made = build_optimizer("Muon", {"lr": 0.1, "muon_lr": 0.02}, groups, matrices=lambda: muon_parameters(model)).param_groups
    assert [(len(group["params"]), group["use_muon"], group["lr"]) for group in made] == [(2, True, 0.5), (len(weights) - 2, False, 0.1)]
    assert made[0]["name"] == "first" and made[1]["betas"] == (0.5, 0.6) and "momentum" not in made[1] and "muon_lr" not in made[0]


@pytest.mark.parametrize(
    ("config", "message"),
    [({"ns_method": "cubic"}, "ns_method is 'cubic'"), ({"momentun": 0.9}, "momentun.*momentum"), ({"momentum": 1.0}, "momentum is 1")],
)
def test_mistakes_in_muon_are_named(config: dict[str, Any], message: str) -> None:
    model = Model()
    with pytest.raises(ConfigError, match=message):
        build_optimizer("Muon", config, list(model.parameters()), matrices=lambda: muon_parameters(model))
