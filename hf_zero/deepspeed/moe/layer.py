"""Implement DeepSpeed's layer of experts, `deepspeed.moe.layer.MoE`, and find its parameters to make param groups of them.

[Note: experts of a MoE layer] The layer is made with all experts on every rank, named by their numbers in the complete layer, so names and
checkpoints are the same for every ``ep_size``. ``initialize`` divides them like experts in a list. DeepSpeed makes only a rank's own
experts, with names that count from 0 on each rank. For compatibility, iterating over the list yields a rank's own experts after they are
divided, and a state dict with as many experts as one rank has is read as this rank's.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from hf_zero.assembly.mesh import CLAIMS
from hf_zero.config.mesh import EXPERT, Claim
from hf_zero.core.units.marks import is_expert, tp_shard_of
from hf_zero.deepspeed.moe.gate import TopKGate
from hf_zero.errors import ConfigError, UnsupportedError
from hf_zero.expert_parallel.apply import OWN
from hf_zero.expert_parallel.dispatch import combine
from hf_zero.observe import log_rank0, warn_once

_LIST = "deepspeed_experts"
_EVERYWHERE = "ep_size_1"  # name of the expert group of layers whose experts every rank holds


class OwnExperts(nn.ModuleList):
    """The list of a layer's experts; it keeps the names of all experts, but iterates over this rank's experts once they are divided."""

    def __iter__(self) -> Iterator[nn.Module]:
        return iter([expert for expert in self._modules.values() if expert is not None and not _is_of_other_rank(expert)])

    def __len__(self) -> int:
        return len(list(iter(self)))

    def __getitem__(self, index: Any) -> Any:
        return list(iter(self))[index]


def _is_of_other_rank(expert: nn.Module) -> bool:
    parts = [part for part in map(tp_shard_of, expert.parameters()) if part is not None and part.expert]
    return bool(parts) and not any(part.ranges for part in parts)


class Experts(nn.Module):
    """The experts of a layer: copies of one module, each of which computes a part of the tokens.

    Args:
        expert: Module that maps tokens (n, width) to the same shape; if it returns a tuple, the first element counts.
        count: Number of experts of the complete layer.
        ranks: Number of ranks that together hold all experts.
        group_name: Name of the expert group, stored on the parameters as in DeepSpeed.
    """

    def __init__(self, expert: nn.Module, count: int, ranks: int, group_name: str) -> None:
        super().__init__()
        self.num_local_experts, self._ranks = count // ranks, ranks
        setattr(self, OWN, True)
        self.deepspeed_experts = OwnExperts(copy.deepcopy(expert) for _ in range(count))
        for param in self.deepspeed_experts.parameters():
            vars(param).update(allreduce=False, group_name=group_name)
        self.register_load_state_dict_pre_hook(_take_own)

    def forward(self, tokens: torch.Tensor, counts: list[int]) -> torch.Tensor:
        """Return the results of ``tokens`` (n, width), which are sorted by expert; ``counts`` has the number of tokens of each expert."""
        experts = self.deepspeed_experts._modules.values()
        made = [expert(part) for expert, part in zip(experts, tokens.split(counts), strict=True) if expert is not None]
        return torch.cat([found[0] if isinstance(found, tuple) else found for found in made])


def _take_own(module: Experts, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Rename the experts in a rank's state dict by their numbers in the layer ([Note: experts of a MoE layer])."""
    start = f"{prefix}{_LIST}."
    of_experts = {name: value for name, value in state.items() if name.startswith(start)}
    numbers = {int(name[len(start) :].split(".")[0]) for name in of_experts}
    if module._ranks == 1 or numbers != set(range(module.num_local_experts)):
        return
    first = (dist.get_rank() % module._ranks if dist.is_initialized() else 0) * module.num_local_experts
    for name in of_experts:
        del state[name]
    state.update((name, value.detach()) for name, value in module.named_parameters(prefix=prefix.rstrip(".")))
    for name, value in of_experts.items():
        number, rest = name[len(start) :].split(".", 1)
        state[f"{start}{first + int(number)}.{rest}"] = value


class MOELayer(nn.Module):
    """A layer that routes tokens through a gate to its experts.

    Args:
        gate: The gate, which chooses the experts of each token.
        experts: The experts.

    Attributes:
        l_aux: Auxiliary loss of the last forward, 0-dim; None before the first forward.
        exp_counts: (experts,) int64 number of tokens of the last forward that chose each expert; None before the first forward.
    """

    def __init__(self, gate: TopKGate, experts: Experts) -> None:
        super().__init__()
        self.gate, self.experts = gate, experts
        self.l_aux: torch.Tensor | None = None
        self.exp_counts: torch.Tensor | None = None

    def forward(self, hidden_states: torch.Tensor, used_token: torch.Tensor | None = None) -> torch.Tensor:
        """Return the results of tokens (..., width) in the same shape; a token that all its experts drop becomes zeros. Collective if the
        experts are divided.
        """
        rows = hidden_states.reshape(-1, hidden_states.shape[-1])
        routes = self.gate(rows, used_token)
        self.l_aux, self.exp_counts = routes.loss, routes.counts.detach()
        count, choices = len(routes.counts), routes.experts.shape[1]
        chosen = torch.where(routes.kept, routes.experts, count).reshape(-1)  # dropped tokens come last
        order = chosen.argsort(stable=True)
        counts = torch.bincount(chosen, minlength=count + 1)[:count].tolist()
        results = self.experts(rows[order[: sum(counts)] // choices], counts)
        return combine(results, order, routes.weights).to(results.dtype).view_as(hidden_states)


class MoE(nn.Module):
    """DeepSpeed's layer of experts with a gate; ``initialize`` divides the experts over ``ep_size`` adjacent ranks, at any stage.

    Args:
        hidden_size: Number of elements of a token.
        expert: Module that is copied ``num_experts`` times; maps (n, hidden_size) to the same shape, or to a tuple that begins with it.
        num_experts: Number of experts in the complete layer.
        ep_size: Number of ranks that together hold all experts; the same in all layers of a model that have more than 1.
        k: Number of experts per token.
        capacity_factor: Tokens that an expert takes in training, relative to its even share.
        eval_capacity_factor: ``capacity_factor`` in evaluation.
        min_capacity: Smallest number of tokens that an expert takes.
        use_residual: Whether a further expert processes all tokens, and is added with learned weights (Rajbhandari et al. 2022,
            arXiv 2201.05596).
        noisy_gate_policy: None, "Jitter" or "RSample", as in ``TopKGate``.
        drop_tokens: Whether an expert drops tokens above its capacity.
        use_rts: Whether an expert with too many tokens keeps random ones, if ``k`` is 1.
        use_tutel: Has no effect, except for a warning.
        enable_expert_tensor_parallelism: Not supported, because experts are not split.
        top2_2nd_expert_sampling: Whether the second expert is drawn at random, if ``k`` is 2.

    Raises:
        ConfigError: Sizes do not fit together.
        UnsupportedError: ``enable_expert_tensor_parallelism`` is true.
    """

    def __init__(
        self,
        hidden_size: int,
        expert: nn.Module,
        num_experts: int = 1,
        ep_size: int = 1,
        k: int = 1,
        capacity_factor: float = 1.0,
        eval_capacity_factor: float = 1.0,
        min_capacity: int = 4,
        use_residual: bool = False,
        noisy_gate_policy: str | None = None,
        drop_tokens: bool = True,
        use_rts: bool = True,
        use_tutel: bool = False,
        enable_expert_tensor_parallelism: bool = False,
        top2_2nd_expert_sampling: bool = True,
    ) -> None:
        super().__init__()
        if ep_size < 1 or num_experts % ep_size:
            fits = ", ".join(str(size) for size in range(1, num_experts + 1) if num_experts % size == 0)
            raise ConfigError(f"MoE(num_experts={num_experts}, ep_size={ep_size}): ep_size must divide num_experts; {fits} would fit")
        if enable_expert_tensor_parallelism:
            raise UnsupportedError(
                "MoE(enable_expert_tensor_parallelism=True): experts are not split over tensor-parallel ranks; leave it out; whole "
                "experts are then divided among these ranks"
            )
        if use_tutel:
            warn_once("MoE(use_tutel=True) has no effect: tokens are sent by one all-to-all each way, without padding")
        self.num_experts, self.ep_size, self.use_residual = num_experts, ep_size, use_residual
        self.num_local_experts, self.expert_group_name = num_experts // ep_size, f"ep_size_{ep_size}"
        gate = TopKGate(
            hidden_size, num_experts, k, capacity_factor, eval_capacity_factor, min_capacity, noisy_gate_policy, drop_tokens, use_rts,
            top2_2nd_expert_sampling,
        )  # fmt: skip
        self.deepspeed_moe = MOELayer(gate, Experts(expert, num_experts, ep_size, self.expert_group_name))
        if use_residual:
            self.mlp = expert
            self.coefficient = nn.Linear(hidden_size, 2)
        if ep_size > 1:
            self.__dict__[CLAIMS] = (Claim(EXPERT, ep_size, f"deepspeed.moe.layer.MoE(ep_size={ep_size})"),)
        log_rank0("a layer of %d experts, %d on each of %d ranks", num_experts, self.num_local_experts, ep_size)

    def forward(
        self, hidden_states: torch.Tensor, used_token: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """Return the layer's output, its auxiliary loss and the number of tokens per expert; collective if experts are divided.

        Args:
            hidden_states: Tokens (..., hidden_size).
            used_token: (tokens,) 1 for tokens that are routed, 0 for others, if ``k`` is 1; None routes all.

        Returns:
            The output, of the shape of ``hidden_states``; the auxiliary loss, 0-dim; (num_experts,) number of tokens that chose each
            expert.
        """
        output = self.deepspeed_moe(hidden_states, used_token)
        if self.use_residual:
            dense = self.mlp(hidden_states)
            dense = dense[0] if isinstance(dense, tuple) else dense
            share = torch.softmax(self.coefficient(hidden_states), dim=-1)
            output = output * share[..., 0:1] + dense * share[..., 1:]
        return output, self.deepspeed_moe.l_aux, self.deepspeed_moe.exp_counts


def is_moe_param(param: torch.Tensor) -> bool:
    """Return whether a parameter belongs to an expert of a ``MoE`` layer (marked ``param.allreduce = False``)."""
    return not getattr(param, "allreduce", True)


def has_moe_layers(m: nn.Module) -> tuple[bool, int]:
    """Return whether a model has a ``MoE`` layer, and the number of experts of the first one; experts of other classes, which
    ``expert_parallel`` finds, do not count.
    """
    count = next((module.num_experts for module in m.modules() if isinstance(module, MoE)), 0)
    return count > 0, count


def require_known_experts(model: nn.Module, ranks: int) -> None:
    """Refuse parameters that a script has marked as its own experts: DeepSpeed reduces them over the ranks of their group only.

    Args:
        model: The model, in which the experts of ``MoE`` layers are divided already.
        ranks: Number of data-parallel ranks.

    Raises:
        UnsupportedError: A parameter is marked ``allreduce = False`` and no layer of hf_zero holds it.
    """
    for name, param in model.named_parameters() if ranks > 1 else ():
        group = getattr(param, "group_name", None)
        if is_moe_param(param) and not is_expert(param) and group != _EVERYWHERE:
            raise UnsupportedError(
                f"parameter {name} is marked allreduce=False (group_name {group!r}): its values differ between ranks, "
                "but the engine would copy rank 0's to all ranks and average its gradient over them. Use deepspeed.moe.layer.MoE or "
                "expert_parallel (docs/experts.md); if every rank has the same values, remove the mark"
            )


def is_moe_param_group(param_group: dict[str, Any]) -> bool:
    """Return whether a param group was made for parameters of experts."""
    return bool(param_group.get("moe", False))


def split_params_into_shared_and_expert_params(
    params: Iterable[nn.Parameter],
) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Return the parameters outside of experts, and the parameters of experts."""
    listed = list(params)
    return [param for param in listed if not is_moe_param(param)], [param for param in listed if is_moe_param(param)]


def split_params_into_different_moe_groups_for_optimizer(
    param_groups: dict[str, Any] | Iterable[dict[str, Any]], max_group_size: int | float | None = 178956971
) -> list[dict[str, Any]]:
    """Return the param groups with separate groups for expert parameters at the end, named after the expert group and marked ``moe``.

    An engine of hf_zero does not need these groups; some scripts read them.

    Args:
        param_groups: One group or several.
        max_group_size: Has no effect, because groups need not be divided.
    """
    groups = [param_groups] if isinstance(param_groups, dict) else list(param_groups)
    dense, experts = [], []
    for group in groups:
        shared, own = split_params_into_shared_and_expert_params(group["params"])
        dense.append({**group, "params": shared})
        for name in dict.fromkeys(str(getattr(param, "group_name", "")) for param in own):
            members = [param for param in own if str(getattr(param, "group_name", "")) == name]
            experts.append({**group, "name": name, "moe": True, "params": members})
    return [*dense, *experts]


def configure_moe_param_groups(model_parameters: list[Any]) -> list[dict[str, Any]]:
    """Return param groups for parameters or groups, with separate groups for experts; unchanged if there are such groups already."""
    if model_parameters and isinstance(model_parameters[0], dict):
        apart = any("moe" in group for group in model_parameters)
        return model_parameters if apart else split_params_into_different_moe_groups_for_optimizer(model_parameters)
    return split_params_into_different_moe_groups_for_optimizer({"params": model_parameters, "name": "dense-params"})
