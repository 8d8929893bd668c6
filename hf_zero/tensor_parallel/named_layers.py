"""Layers that are split because the user names them, in a model that cannot be traced: each by itself, between whole tensors.

Without a trace nothing is known of what lies between layers, so nothing is split along the data flow. A linear layer between a whole input
and a whole output needs no such knowledge.
"""

from __future__ import annotations

from torch import nn

from hf_zero.errors import ConfigError
from hf_zero.tensor_parallel.local_split import LocalSplit
from hf_zero.tensor_parallel.overrides import Overrides
from hf_zero.tensor_parallel.plan import COLUMN, GATHERED, ROW, SCATTERED, VOCABULARY, WHOLE, ModulePlan, TpPlan
from hf_zero.tensor_parallel.plan_writer import add_local_split
from hf_zero.tensor_parallel.solve import is_linear

_HOW = {COLUMN: GATHERED, ROW: SCATTERED, VOCABULARY: VOCABULARY}


def plan_named_layers(model: nn.Module, ranks: int, overrides: Overrides, untraceable: str) -> TpPlan:
    """Splits the layers that ``overrides`` names, over ``ranks``.

    Args:
        model: Any model; only shapes are read.
        ranks: Size of a tensor-parallel group.
        overrides: Which layers, and whether over outputs or inputs.
        untraceable: Why the model could not be traced.

    Raises:
        ConfigError: A layer does not divide, shares its weight with another module, or is no plain linear layer.
    """
    plan = TpPlan(ranks, overrides.source, notes=[f"split layer by layer: {untraceable}"])
    modules = dict(model.named_modules())
    names = {id(param): name for name, param in model.named_parameters()}
    owners: dict[int, list[str]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        owners.setdefault(id(param), []).append(name.rpartition(".")[0])
    for path, module in modules.items():
        if not is_linear(type(module)):
            continue
        family = overrides.families.get(path)
        if family is None:
            reason = "kept whole by the plan" if path in overrides.whole else "not named, and the model cannot be traced"
            plan.modules[path] = ModulePlan(WHOLE, reason, overrides.source if path in overrides.whole else "inferred")
            continue
        _require_plain(path, module, owners[id(module.weight)])
        outputs, inputs = module.weight.shape if isinstance(module, nn.Linear) else reversed(module.weight.shape)  # type: ignore[arg-type]
        size = inputs if family == ROW else outputs
        if size % ranks:
            usable = [number for number in range(2, 65) if size % number == 0]
            side = "inputs" if family == ROW else "outputs"
            raise ConfigError(
                f"{path} cannot be split by {family} over {ranks} ranks: it has {size} {side}; usable numbers of ranks are {usable}"
            )
        layer = LocalSplit(path, _HOW[family], int(size))
        add_local_split(plan, module, layer, names, ranks)
        plan.modules[path] = ModulePlan(layer.how, "named, and the model cannot be traced", overrides.source)
    return plan


def _require_plain(path: str, module: nn.Module, owners: list[str]) -> None:
    if len(owners) > 1:
        others = ", ".join(owner for owner in owners if owner != path)
        raise ConfigError(f"{path} cannot be split by its name: it shares its weight with {others}; leave it whole (partition_type skip)")
    if isinstance(module, nn.Linear) and type(module).forward is not nn.Linear.forward:
        raise ConfigError(
            f"{path} cannot be split by its name: {type(module).__name__} computes more than a linear layer; leave it whole "
            "(partition_type skip)"
        )
