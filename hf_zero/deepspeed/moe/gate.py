"""Implement the gate of DeepSpeed's layer of experts: choose the experts of each token, and drop tokens of experts with too many.

Sources: Fedus et al. 2021, "Switch Transformers", arXiv 2101.03961, section 2.2 (one expert, capacity, loss); Lepikhin et al. 2020,
"GShard", arXiv 2006.16668, algorithm 1 (two experts); Kim et al. 2021, "Scalable and Efficient MoE Training", arXiv 2109.10465, section 3.2
(random token selection); DeepSpeed's documentation of `deepspeed.moe`. The results equal DeepSpeed's, random numbers included.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from hf_zero.comm.back_end import build_collectives
from hf_zero.comm.topology import axis_over
from hf_zero.errors import ConfigError

POLICIES = (None, "None", "Jitter", "RSample")
_JITTER = 1e-2

Gated = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
"""Auxiliary loss (0-dim), weights (tokens, experts, capacity) fp32, mask of non-zero weights (bool, same shape), and number of tokens that
chose each expert (experts,) int64."""


class Routes(NamedTuple):
    """The assignment of tokens to experts.

    Attributes:
        loss: Auxiliary loss that balances experts, 0-dim.
        experts: Indices of the chosen experts, (tokens, choices) int64.
        kept: Whether the expert has room for a choice, (tokens, choices) bool.
        weights: Weights of the choices, (tokens, choices) fp32; 0 for choices that are not kept.
        places: Position of the token among the tokens that its expert takes, (tokens, choices) int64; undefined if not kept.
        counts: Number of tokens that chose each expert before any is dropped, (experts,) int64.
    """

    loss: torch.Tensor
    experts: torch.Tensor
    kept: torch.Tensor
    weights: torch.Tensor
    places: torch.Tensor
    counts: torch.Tensor


def gumbel_noise(like: torch.Tensor) -> torch.Tensor:
    """Return samples of the standard Gumbel distribution with shape and device of ``like``; the argmax of logits plus these samples is a
    draw.
    """
    zero, one = torch.tensor(0.0, device=like.device), torch.tensor(1.0, device=like.device)
    noise: torch.Tensor = torch.distributions.Gumbel(zero, one).rsample(like.shape)
    return noise


def one_choice(
    logits: torch.Tensor, capacity: int | None, used: torch.Tensor | None = None, noisy: bool = False, random_tokens: bool = True
) -> Routes:
    """Route each token to its best expert, weighted by the expert's probability.

    Args:
        logits: (tokens, experts) fp32.
        capacity: Tokens that an expert takes; None is all.
        used: (tokens,) 1 for tokens that are routed, 0 for padding; None is all.
        noisy: Whether the expert is drawn at random instead of the best one.
        random_tokens: If an expert has too many tokens, keep random ones instead of the first that torch.topk finds.
    """
    gates = F.softmax(logits, dim=1)
    chosen = torch.argmax(logits + gumbel_noise(logits) if noisy else gates, dim=1)
    mask = F.one_hot(chosen, gates.shape[1])
    if used is not None:
        mask = mask * used.reshape(-1, 1).to(mask.dtype)
    counts = mask.sum(dim=0)
    loss = (gates.mean(dim=0) * mask.float().mean(dim=0)).sum() * gates.shape[1]
    drawn = mask * torch.rand(mask.shape, device=mask.device) if random_tokens else mask
    if capacity is not None:
        mask = mask * _largest(drawn, capacity)
    chosen = chosen.unsqueeze(1)
    kept = mask.gather(1, chosen).bool()
    return Routes(loss, chosen, kept, gates.gather(1, chosen) * kept, (mask.cumsum(dim=0) - 1).gather(1, chosen), counts)


def two_choices(logits: torch.Tensor, capacity: int | None, sampled: bool = True) -> Routes:
    """Route each token to its best expert and a second one, weighted by their shares; second choices come after all first ones.

    Args:
        logits: (tokens, experts) fp32.
        capacity: First and second choices that an expert takes; None is all.
        sampled: Whether the second expert is drawn at random instead of the second best one.
    """
    gates = F.softmax(logits, dim=1)
    first = torch.argmax(gates, dim=1)
    masks = [F.one_hot(first, gates.shape[1])]
    others = logits + gumbel_noise(logits) if sampled else logits
    second = torch.argmax(others.masked_fill(masks[0].bool(), float("-inf")), dim=1)
    masks.append(F.one_hot(second, gates.shape[1]))
    counts = masks[0].sum(dim=0) + masks[1].sum(dim=0)
    loss = (gates.mean(dim=0) * masks[0].float().mean(dim=0)).mean() * gates.shape[1] ** 2
    places = [masks[0].cumsum(dim=0) - 1, masks[1].cumsum(dim=0) - 1 + masks[0].sum(dim=0, keepdim=True)]
    chosen = torch.stack([first, second], dim=1)
    place = torch.stack([found.gather(1, chosen[:, n : n + 1]).squeeze(1) for n, found in enumerate(places)], dim=1)
    kept = torch.ones_like(chosen, dtype=torch.bool) if capacity is None else place < capacity
    return Routes(loss, chosen, kept, _shares(gates.gather(1, chosen) * kept), place, counts)


def several_choices(logits: torch.Tensor, choices: int, capacity: int | None, keep: str = "probs") -> Routes:
    """Route each token to its ``choices`` best experts, weighted by their shares.

    Args:
        logits: (tokens, experts) fp32.
        choices: Number of experts per token.
        capacity: Tokens that an expert takes; None is all.
        keep: Tokens that an expert with too many keeps: "probs" for those with the largest probability, "position" for the first.

    Raises:
        ConfigError: ``keep`` is neither.
    """
    if keep not in ("probs", "position"):
        raise ConfigError(f'drop_policy is {keep!r}; "probs" and "position" are allowed')
    gates = F.softmax(logits, dim=1)
    top, chosen = torch.topk(gates, k=choices, dim=1)
    mask = torch.zeros_like(gates, dtype=torch.bool).scatter_(1, chosen, True)
    counts = mask.sum(dim=0)
    loss = (gates.mean(dim=0) * mask.float().mean(dim=0)).mean() * gates.shape[1] ** 2 / choices
    if capacity is not None and keep == "probs":
        mask = mask & _largest(torch.zeros_like(gates).scatter(1, chosen, top), capacity).bool()
    places = mask.cumsum(dim=0) - 1
    if capacity is not None and keep == "position":
        mask = mask & (places < capacity)
    kept = mask.gather(1, chosen)
    return Routes(loss, chosen, kept, _shares(top * kept), places.gather(1, chosen), counts)


def _largest(values: torch.Tensor, limit: int) -> torch.Tensor:
    """Return an int64 mask: 1 for the ``limit`` largest entries of each column, 0 for the others."""
    indices = torch.topk(values, k=min(limit, len(values)), dim=0).indices
    return torch.zeros(values.shape, dtype=torch.int64, device=values.device).scatter_(0, indices, 1)


def _shares(weights: torch.Tensor) -> torch.Tensor:
    """Return each token's weights divided by their sum; zeros where all weights are 0."""
    return weights / weights.sum(dim=1, keepdim=True).clamp(min=torch.finfo(weights.dtype).eps)


def capacity_of(logits: torch.Tensor, factor: float, least: int) -> int:
    """Return the capacity of an expert: ``factor`` * tokens / experts of ``logits`` (tokens, experts), rounded up, at least ``least``."""
    tokens, experts = logits.shape
    return max(int(torch.ceil((tokens / experts) * torch.tensor(factor))), int(least))


def top1gating(
    logits: torch.Tensor,
    capacity_factor: float,
    min_capacity: int,
    used_token: torch.Tensor | None = None,
    noisy_gate_policy: str | None = None,
    drop_tokens: bool = True,
    use_rts: bool = True,
    ep_group: dist.ProcessGroup | None = None,
    use_tutel: bool = False,
) -> Gated:
    """Route each token to one expert.

    Args:
        logits: (tokens, experts) fp32.
        capacity_factor: Tokens that an expert takes, relative to its even share.
        min_capacity: Smallest number of tokens that an expert takes.
        used_token: (tokens,) 1 for tokens that are routed, 0 for others; None is all.
        noisy_gate_policy: "RSample" draws the expert.
        drop_tokens: Whether experts drop tokens above their capacity; False sets the capacity to the largest count of any expert, over
            the ranks of ``ep_group``.
        use_rts: If an expert has too many tokens, keep random ones instead of the first that torch.topk finds.
        ep_group: Ranks that need the same capacity; collective over these ranks if no token is dropped.
        use_tutel: Has no effect.
    """
    capacity = capacity_of(logits, capacity_factor, min_capacity) if drop_tokens else None
    return _tables(one_choice(logits, capacity, used_token, noisy_gate_policy == "RSample", use_rts), capacity, ep_group)


def top2gating(
    logits: torch.Tensor,
    capacity_factor: float,
    min_capacity: int,
    drop_tokens: bool = True,
    ep_group: dist.ProcessGroup | None = None,
    top2_2nd_expert_sampling: bool = True,
) -> Gated:
    """Route each token to two experts, otherwise like ``top1gating``; an expert takes twice the capacity.

    Args:
        logits: (tokens, experts) fp32.
        capacity_factor: Tokens that an expert takes, relative to its even share.
        min_capacity: Smallest number of tokens that an expert takes.
        drop_tokens: Whether experts drop tokens above their capacity; False sets the capacity to the largest count of any expert, over
            the ranks of ``ep_group``.
        ep_group: Ranks that need the same capacity.
        top2_2nd_expert_sampling: Whether the second expert is drawn at random.
    """
    capacity = capacity_of(logits, capacity_factor * 2, min_capacity) if drop_tokens else None
    return _tables(two_choices(logits, capacity, top2_2nd_expert_sampling), capacity, ep_group)


def topkgating(
    logits: torch.Tensor,
    k: int,
    capacity_factor: float,
    min_capacity: int,
    drop_tokens: bool = True,
    ep_group: dist.ProcessGroup | None = None,
    drop_policy: str = "probs",
) -> Gated:
    """Route each token to ``k`` experts, otherwise like ``top1gating``; an expert takes ``k`` times the capacity.

    Args:
        logits: (tokens, experts) fp32.
        k: Number of experts per token.
        capacity_factor: Tokens that an expert takes, relative to its even share.
        min_capacity: Smallest number of tokens that an expert takes.
        drop_tokens: Whether experts drop tokens above their capacity; False sets the capacity to the largest count of any expert, over
            the ranks of ``ep_group``.
        ep_group: Ranks that need the same capacity.
        drop_policy: "probs" or "position".

    Raises:
        ConfigError: ``drop_policy`` is neither.
    """
    capacity = capacity_of(logits, capacity_factor * k, min_capacity) if drop_tokens else None
    return _tables(several_choices(logits, k, capacity, drop_policy), capacity, ep_group)


def _tables(routes: Routes, capacity: int | None, group: dist.ProcessGroup | None) -> Gated:
    """Return the routes as tables (tokens, experts, capacity); capacity None is that of the fullest expert of any rank of ``group``."""
    if capacity is None:
        capacity = int(routes.counts.max())
        if group is not None and group.size() > 1:
            capacity = int(build_collectives(axis_over(group)).largest_of([capacity], "capacity of experts")[0])
    tokens = torch.arange(len(routes.experts), device=routes.experts.device).unsqueeze(1).expand_as(routes.experts)
    places = torch.where(routes.kept, routes.places, 0)
    table = routes.weights.new_zeros(len(tokens), len(routes.counts), capacity)
    if capacity:
        table = table.index_put((tokens, routes.experts, places), routes.weights, accumulate=True)
    return routes.loss, table, table.bool(), routes.counts


class TopKGate(nn.Module):
    """The gate of a layer of experts: it chooses the experts of each token, in fp32 whatever the type of the tokens.

    Args:
        model_dim: Number of elements of a token.
        num_experts: Number of experts.
        k: Number of experts per token.
        capacity_factor: Tokens that an expert takes in training, relative to its even share.
        eval_capacity_factor: ``capacity_factor`` in evaluation.
        min_capacity: Smallest number of tokens that an expert takes.
        noisy_gate_policy: In training, "Jitter" multiplies tokens by 1 +- 0.01 at random, "RSample" draws the expert where ``k`` is 1.
        drop_tokens: Whether an expert drops tokens above its capacity.
        use_rts: Whether an expert with too many tokens keeps random ones, if ``k`` is 1 (random token selection).
        top2_2nd_expert_sampling: Whether the second expert is drawn at random, if ``k`` is 2.

    Attributes:
        wg: Linear layer without bias, with a weight (num_experts, model_dim).

    Raises:
        ConfigError: The noise policy is unknown, or ``k`` is greater than the number of experts.
    """

    def __init__(
        self,
        model_dim: int,
        num_experts: int,
        k: int = 1,
        capacity_factor: float = 1.0,
        eval_capacity_factor: float = 1.0,
        min_capacity: int = 8,
        noisy_gate_policy: str | None = None,
        drop_tokens: bool = True,
        use_rts: bool = True,
        top2_2nd_expert_sampling: bool = True,
    ) -> None:
        super().__init__()
        if noisy_gate_policy not in POLICIES:
            raise ConfigError(f"noisy_gate_policy is {noisy_gate_policy!r}; None, 'Jitter' and 'RSample' are allowed")
        if not 1 <= k <= num_experts:
            raise ConfigError(f"k is {k} and num_experts {num_experts}: a token has 1 to {num_experts} experts")
        self.wg = nn.Linear(model_dim, num_experts, bias=False)
        self.k, self.capacity_factor, self.eval_capacity_factor = k, capacity_factor, eval_capacity_factor
        self.min_capacity, self.noisy_gate_policy = min_capacity, noisy_gate_policy
        self.drop_tokens, self.use_rts, self.top2_2nd_expert_sampling = drop_tokens, use_rts, top2_2nd_expert_sampling

    def forward(self, tokens: torch.Tensor, used_token: torch.Tensor | None = None) -> Routes:
        """Return the routes of ``tokens`` (n, model_dim); ``used_token`` is that of ``top1gating``, and used if ``k`` is 1."""
        policy = self.noisy_gate_policy if self.training else None
        given = tokens.float()
        if policy == "Jitter":
            given = given * torch.empty_like(given).uniform_(1.0 - _JITTER, 1.0 + _JITTER)
        logits = nn.functional.linear(given, self.wg.weight.float())
        factor = self.capacity_factor if self.training else self.eval_capacity_factor
        capacity = capacity_of(logits, factor * self.k, self.min_capacity) if self.drop_tokens else None
        if self.k == 1:
            return one_choice(logits, capacity, used_token, policy == "RSample", self.use_rts)
        if self.k == 2:
            return two_choices(logits, capacity, self.top2_2nd_expert_sampling)
        return several_choices(logits, self.k, capacity)
