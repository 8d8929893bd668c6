"""Parts that drawn programs with Lightning share: a small network, its rows, optimizers, schedules and configurations."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from tests.lightning.drawn_options import Drawn

WIDTH, CLASSES, BATCH = 8, 4, 2


class Network(nn.Module):
    """A small network, one of whose parameters belongs to no layer."""

    def __init__(self, dropout: bool = False, seed: int = 11) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first = nn.Linear(6, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.hidden = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(2)])
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.dropout = nn.Dropout(0.2 if dropout else 0.0)
        self.head = nn.Linear(WIDTH, CLASSES, bias=False)

    def forward(self, rows: Tensor) -> Tensor:
        found = self.norm(self.first(rows))
        for layer in self.hidden:
            found = found + self.dropout(torch.tanh(layer(found))) * self.scale
        return self.head(found)  # type: ignore[no-any-return]

    def loss(self, rows: Tensor, labels: Tensor) -> Tensor:
        """Return the loss of a batch, from a method that is not ``forward``."""
        return loss_of(self(rows), labels)


def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.float(), labels)


def network_of(run: Drawn, seed: int = 11) -> Network:
    return Network(run["dropout"], seed)


def freeze(run: Drawn, model: Network, sharded: bool, wrapped: bool) -> None:
    """Freeze what a script freezes at first. DDP sees only parameters that train when it wraps the model (``wrapped``: it has)."""
    if run["frozen"] == "first" and not wrapped or run["frozen"] == "unfreezes" and wrapped != sharded:
        model.first.requires_grad_(False)


def freeze_between(run: Drawn, model: Network, steps: int) -> None:
    """Freeze or unfreeze after the second update."""
    if steps == 2 and run["frozen"] == "freezes":
        model.head.requires_grad_(False)
    if steps == 2 and run["frozen"] == "unfreezes":
        model.first.requires_grad_(True)


def optimizers_of(run: Drawn, model: nn.Module) -> list[torch.optim.Optimizer]:
    """Return the optimizers of a script; it gives them all parameters, or the trained ones."""
    params: Any = list(model.parameters()) if run["frozen"] != "first" else [p for p in model.parameters() if p.requires_grad]
    kind = run["optimizer"]
    if kind == "sgd":
        return [torch.optim.SGD(params, lr=0.05, momentum=0.9)]
    if kind == "adagrad":
        return [torch.optim.Adagrad(params, lr=0.02)]
    if kind == "two":
        return [torch.optim.AdamW(params[:4], lr=5e-3), torch.optim.SGD(params[4:], lr=0.05)]
    if kind == "groups":
        params = [
            {"params": [param for param in params if param.ndim > 1], "weight_decay": 0.1},
            {"params": [param for param in params if param.ndim <= 1], "weight_decay": 0.0, "lr": 1e-2},
        ]
    return [torch.optim.AdamW(params, lr=5e-3)]


def scheduler_of(run: Drawn, optimizer: torch.optim.Optimizer) -> Any:
    if run["scheduler"] == "plateau":
        return torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.5)
    if run["scheduler"] == "epoch":
        return torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: max(0.1, 1.0 - 0.07 * step)) if run["scheduler"] else None


class Rows(IterableDataset):  # type: ignore[type-arg]
    """Rows of this rank, one after the other, without a length."""

    def __init__(self, rows: TensorDataset, rank: int) -> None:
        self.rows, self.rank = rows, rank

    def __iter__(self) -> Iterator[Any]:
        return (self.rows[index] for index in range(self.rank, len(self.rows) - len(self.rows) % 2, 2))


def rows_of(count: int, seed: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    return TensorDataset(torch.randn(count, 6, generator=generator), torch.randint(CLASSES, (count,), generator=generator))


def loader_of(count: int, seed: int, train: bool = True, iterable: bool = False, rank: int = 0) -> DataLoader[Any]:
    rows: Any = rows_of(count, seed)
    return DataLoader(Rows(rows, rank) if iterable else rows, batch_size=BATCH, shuffle=train and not iterable, drop_last=train)


def zero_config(run: Drawn) -> dict[str, Any]:
    """Return a DeepSpeed configuration as users give it to Lightning; the small network is really sharded at stage 3."""
    section: dict[str, Any] = {"stage": run["stage"]}
    if run["stage"] == 3:
        section |= {"stage3_param_persistence_threshold": 0, "stage3_max_reuse_distance": 0}
    if run["offload"]:
        section["offload_optimizer"] = {"device": "cpu"}
    if run["offload"] == "both":
        section["offload_param"] = {"device": "cpu"}
    config: dict[str, Any] = {"zero_optimization": section, "zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False}
    if run["kind"] == "fabric" and run["pattern"] == "config":
        config["gradient_accumulation_steps"] = run["accumulation"]
    if run["kind"] == "fabric" and run["clip"] == "config":
        config["gradient_clipping"] = 0.1
    if run["kind"] == "trainer" and run["json"]:
        config["optimizer"] = {"type": "AdamW", "params": {"lr": 5e-3, "weight_decay": 0.01}}
    return config


def zero_arguments(run: Drawn) -> dict[str, Any]:
    """Return the arguments of a strategy of hf_zero."""
    options: dict[str, Any] = {"initial_scale_power": 4}  # no step is skipped
    by_config = run["strategy"] != "arguments" or run["kind"] == "fabric" and (run["pattern"] == "config" or run["clip"] == "config")
    if by_config:
        return {"config": zero_config(run), **options}
    return {"stage": run["stage"], "offload_optimizer": bool(run["offload"]), "offload_parameters": run["offload"] == "both", **options}


def strategy_of(run: Drawn) -> Any:
    """Return a strategy of hf_zero, or Lightning's own, without its check for a GPU."""
    from hf_zero.integrations import FabricZeroStrategy, ZeroStrategy

    served: Any = FabricZeroStrategy if run["kind"] == "fabric" else ZeroStrategy
    if run["strategy"] != "stock":
        return served(**zero_arguments(run))
    distributed = "_setup_distributed" if run["kind"] == "fabric" else "setup_distributed"
    stock = next(kind for kind in served.__mro__ if kind.__module__.endswith("strategies.deepspeed"))
    on_cpu = {name: vars(served)[name] for name in ("setup_environment", distributed)}
    return type(stock.__name__, (stock,), on_cpu)(config=zero_config(run), initial_scale_power=4)


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    """Return the whole weights of a model, sharded or not; collective."""
    from hf_zero.zero import GatheredParameters

    with GatheredParameters(list(model.parameters())):
        return {name: value.detach().float().cpu().clone() for name, value in model.named_parameters()}


@torch.no_grad()
def shrink(model: nn.Module) -> None:
    """Write weights between two updates."""
    from hf_zero.zero import GatheredParameters

    params = list(model.parameters())
    with GatheredParameters(params, modifier_rank=0):
        for param in params:
            param.mul_(0.99)


def gradient_norms(model: nn.Module, sharded: bool) -> dict[str, float]:
    """Return the norm of each gradient that waits for the step; collective where they are sharded."""
    from hf_zero.deepspeed.safe_values import safe_get_full_grad

    found = {name: safe_get_full_grad(param) if sharded else param.grad for name, param in model.named_parameters()}
    return {name: 0.0 if grad is None else float(grad.float().norm()) for name, grad in found.items()}
