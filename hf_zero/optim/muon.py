"""Muon for hidden matrices and AdamW for all other parameters, in one optimizer.

[Note: torch.optim.Muon] torch has Muon from 2.9 on, and a script that passes ``torch.optim.Muon`` gets that class. The class here serves
``"type": "Muon"`` of a configuration, for which torch's class is not enough. It is one optimizer with AdamW for embeddings, heads and
vectors; it takes tensors of more than two dimensions (stacked experts, convolutions); its default iteration (``ns_method`` "gram",
DeepSpeed's) works on the square of the shorter side; and it runs on torch 2.8, the oldest version allowed. With ``ns_method`` "standard"
both give the same bits, which a test checks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim.adam import adam
from torch.optim.adamw import adamw

from hf_zero.core.units.unit import full_shape
from hf_zero.errors import ConfigError
from hf_zero.ops.foreach import require_hyperparameters

METHODS = ("gram", "standard")
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_ITERATIONS = 5
_EPSILON = 1e-7
_NOT_HIDDEN = ("embed", "lm_head")  # words in parameter names
_MUON_DEFAULTS: dict[str, Any] = {"lr": 0.02, "momentum": 0.95, "weight_decay": 0.0, "ns_method": "gram"}
_ADAM_DEFAULTS: dict[str, Any] = {"lr": 3e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.0}


class MuonWithAuxAdam(torch.optim.Optimizer):
    """Muon (Keller Jordan, https://kellerjordan.github.io/posts/muon/) over groups with ``use_muon``, AdamW over the others.

    Muon per step and matrix: ``m`` moves to ``g`` by ``1 - momentum``, ``u`` is ``g`` moved to ``m`` by ``momentum`` (Nesterov), and
    ``p = p * (1 - lr * weight_decay) - lr * sqrt(max(1, rows / columns)) * orthogonal(u)``. State: ``momentum_buffer`` of the parameter's
    shape. With ``ns_method`` "standard" it is ``torch.optim.Muon`` bit for bit.

    [Note: Muon of more than two dimensions] As in the published code and in DeepSpeed: a tensor of three dimensions is a stack of matrices
    (``shape[0]`` experts), and each is updated as if it were a parameter of its own. A tensor of more dimensions, the weight of a
    convolution, is one matrix of ``shape[0]`` rows. ``rows / columns`` are the last two dimensions of the parameter in each case. A vector,
    which neither takes, is one column.

    Args:
        param_groups: Dicts with ``params`` and ``use_muon``; further keys are ``lr``, ``weight_decay``, and ``momentum`` and
            ``ns_method`` with Muon, ``betas`` and ``eps`` without.
        adam_w_mode: Decoupled weight decay in the groups without Muon.

    Raises:
        ValueError: A group lacks ``use_muon``, or a hyper-parameter is out of its range.
    """

    def __init__(self, param_groups: Iterable[dict[str, Any]], adam_w_mode: bool = True) -> None:
        groups = []
        for group in param_groups:
            if not isinstance(group, dict) or "use_muon" not in group:
                raise ValueError("MuonWithAuxAdam takes groups as dicts, each with use_muon true or false")
            groups.append({**(_MUON_DEFAULTS if group["use_muon"] else _ADAM_DEFAULTS), **group})
            require_hyperparameters(groups[-1]["lr"], groups[-1].get("betas", (0.9, 0.9)), groups[-1]["weight_decay"])
            if groups[-1].get("ns_method", METHODS[0]) not in METHODS:
                raise ValueError(f"ns_method is {groups[-1]['ns_method']!r}; allowed are {', '.join(METHODS)}")
            if not 0 <= groups[-1].get("momentum", 0.0) < 1:
                raise ValueError(f"momentum is {groups[-1]['momentum']!r}; it must be at least 0 and below 1")
        super().__init__(groups, {})
        self.adam_w_mode = adam_w_mode

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update every parameter that has a gradient; return the closure's loss if there is a closure."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            params = [param for param in group["params"] if param.grad is not None]
            if group["use_muon"]:
                for param in params:
                    self._update_matrix(param, param.grad, group)
            elif params:
                self._update_others(params, group)
        return loss

    def _update_matrix(self, param: torch.Tensor, grad: torch.Tensor, group: Mapping[str, Any]) -> None:
        state, momentum, lr = self.state[param], group["momentum"], float(group["lr"])
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(grad)
        buffer = state["momentum_buffer"]
        buffer.lerp_(grad, 1 - momentum)
        matrix = grad.lerp(buffer, momentum)
        if matrix.ndim not in (2, 3):
            matrix = matrix.reshape(len(matrix), -1)
        update = orthogonal(matrix, group["ns_method"]).reshape(param.shape)
        param.mul_(1 - lr * group["weight_decay"])
        rows, columns = param.shape[-2:] if param.ndim > 1 else (len(param), 1)
        param.add_(update, alpha=-lr * math.sqrt(max(1, rows / columns)))

    def _update_others(self, params: list[torch.Tensor], group: Mapping[str, Any]) -> None:
        for param in params:
            if not self.state[param]:
                step = torch.zeros((), dtype=torch.float32)  # a script's default dtype of 16 bit counts to 256
                self.state[param].update(step=step, exp_avg=torch.zeros_like(param), exp_avg_sq=torch.zeros_like(param))
        firsts, seconds, steps = ([self.state[param][name] for param in params] for name in ("exp_avg", "exp_avg_sq", "step"))
        beta1, beta2 = group["betas"]
        update = adamw if self.adam_w_mode else adam
        update(
            params,
            [param.grad for param in params if param.grad is not None],
            firsts,
            seconds,
            [],
            steps,
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=float(group["lr"]),
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )


def orthogonal(matrix: torch.Tensor, method: str) -> torch.Tensor:
    """Return an orthogonalised ``matrix``, whose singular values are about 1, by five Newton-Schulz iterations.

    Args:
        matrix: (rows, columns), or a stack of such matrices, (matrices, rows, columns), which are orthogonalised separately.
        method: "standard" iterates on the matrix in bf16, as published. "gram" iterates on the square of its shorter side, in fp32: the
            same polynomial, with products of the full matrix only at the start and the end.

    Returns:
        Shape of ``matrix``, bf16 or fp32.
    """
    tall = matrix.shape[-2] > matrix.shape[-1]
    wide = matrix.mT if tall else matrix
    found = _by_gram(wide.float()) if method == "gram" else _by_matrix(wide.bfloat16())
    return found.mT if tall else found


def _by_matrix(wide: torch.Tensor) -> torch.Tensor:
    a, b, c = _COEFFICIENTS
    wide = _scaled(wide)
    add_product = torch.addmm if wide.ndim == 2 else torch.baddbmm
    for _ in range(_ITERATIONS):
        gram = wide @ wide.mT
        wide = add_product(wide, add_product(gram, gram, gram, beta=b, alpha=c), wide, beta=a)
    return wide


def _by_gram(wide: torch.Tensor) -> torch.Tensor:
    a, b, c = _COEFFICIENTS
    wide = _scaled(wide)
    add_product = torch.addmm if wide.ndim == 2 else torch.baddbmm
    gram = wide @ wide.mT
    product = torch.eye(wide.shape[-2], dtype=wide.dtype, device=wide.device).expand_as(gram)
    for _ in range(_ITERATIONS):
        factor = add_product(gram, gram, gram, beta=b, alpha=c)
        factor.diagonal(dim1=-2, dim2=-1).add_(a)
        product = factor @ product
        gram = factor @ gram @ factor
    return product @ wide


def _scaled(wide: torch.Tensor) -> torch.Tensor:
    """Return each matrix divided by its Frobenius norm, which bounds its singular values by 1."""
    return wide / wide.norm(dim=(-2, -1), keepdim=True).clamp(min=_EPSILON)


# -- from the configuration -------------------------------------------------------------------------------------------


def muon_parameters(model: nn.Module) -> set[int]:
    """Return the ids of the parameters that Muon trains: those with ``use_muon`` true, and the hidden matrices among those without
    ``use_muon``.

    A hidden matrix has two dimensions or more, is no weight of an embedding, and has neither "embed" nor "lm_head" in its name.
    """
    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, (nn.Embedding, nn.EmbeddingBag))}
    found = set()
    for name, param in model.named_parameters():
        hidden = len(full_shape(param)) >= 2 and id(param) not in embeddings and not any(part in name.lower() for part in _NOT_HIDDEN)
        if getattr(param, "use_muon", hidden):
            found.add(id(param))
    return found


_DIVIDED = {"params", "param_names", "use_muon", "muon_lr", "adam_lr"}  # group keys that differ between the Muon and the AdamW half


def muon_from_config(values: Mapping[str, Any], groups: Sequence[Any], matrices: set[int]) -> MuonWithAuxAdam:
    """Return Muon from `optimizer.params`: each group is divided into its matrices and its other parameters.

    `muon_lr` and `adam_lr` take precedence over `lr`, and the keys of a group over both: its ``use_muon`` holds for all of its parameters.
    Keys that neither half knows are kept.

    Args:
        values: `optimizer.params`, with converted types.
        groups: Parameters, or groups as dicts.
        matrices: Ids of the parameters that Muon trains.

    Raises:
        ConfigError: ``values`` has a parameter that Muon does not take.
    """
    rates = {True: "muon_lr", False: "adam_lr"}
    allowed = {True: set(_MUON_DEFAULTS), False: set(_ADAM_DEFAULTS)}
    dicts = [group for group in groups if isinstance(group, dict)]
    loose = [item[1] if isinstance(item, tuple) else item for item in groups if not isinstance(item, dict)]
    made = []
    for group in [*dicts, {"params": loose}] if loose else dicts:
        inside = group["params"]
        params = [inside] if isinstance(inside, torch.Tensor) else [item[1] if isinstance(item, tuple) else item for item in inside]
        for uses in (True, False):
            half = [param for param in params if bool(group.get("use_muon", id(param) in matrices)) is uses]
            settings = {key: value for key, value in values.items() if key in allowed[uses]}
            if rates[uses] in values:
                settings["lr"] = values[rates[uses]]
            settings |= {key: value for key, value in group.items() if key not in (allowed[not uses] | _DIVIDED) - allowed[uses]}
            settings["lr"] = group.get(rates[uses], settings.get("lr", (_MUON_DEFAULTS if uses else _ADAM_DEFAULTS)["lr"]))
            if half:
                made.append({**settings, "params": half, "use_muon": uses})
    try:
        return MuonWithAuxAdam(made, bool(values.get("adam_w_mode", True)))
    except ValueError as error:
        raise ConfigError(f"optimizer.params {dict(values)!r} does not fit Muon: {error}") from error


CONFIG_KEYS = frozenset({*_MUON_DEFAULTS, *_ADAM_DEFAULTS, "muon_lr", "adam_lr", "adam_w_mode", "torch_adam"})
