"""Run a script of the fuzzer in plain PyTorch: one process that trains on the data of all ranks, with fp32 masters for bf16."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from tests.parity.fuzzer import model as script_model
from tests.parity.fuzzer.grammar import Cell
from tests.parity.fuzzer.model import ScriptError, Seen, noise
from tests.parity.fuzzer.side import Side

SETTINGS: dict[str, Any] = {"lr": 0.02, "betas": (0.9, 0.99), "eps": 1e-3, "weight_decay": 0.5}


class MustRefuse(RuntimeError):
    """Error for an operation without a correct result: the package must refuse it, then or before anything reads the values."""


@dataclass
class State:
    """State of one side, as needed for checkpoints and comparisons.

    Attributes:
        weights: Parameters by name, as the forward reads them.
        masters: fp32 masters of the optimizer's parameters, by name.
        moments: The optimizer's state of each parameter, by name.
        groups: Names of each param group.
        rates: Learning rate of each group.
        buffers: Buffers of each rank, by name.
        steps: Number of optimizer steps so far.
        norm: Norm of all gradients at the last step, before clipping.
    """

    weights: dict[str, Tensor] = field(default_factory=dict)
    masters: dict[str, Tensor] = field(default_factory=dict)
    moments: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    groups: list[list[str]] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    buffers: list[dict[str, Tensor]] = field(default_factory=list)
    steps: int = 0
    norm: float | None = None


class Plain(Side):
    """One side of a comparison; each method except the helpers is an operation of ``script_grammar.KINDS`` and shows the values that it
    saw.

    Where PyTorch and the package's documents allow several results, ``candidates`` holds every permitted state after an operation, the
    literal one first; ``settle`` chooses the one that the other side has.
    """

    def __init__(self, cell: Cell, rank: int) -> None:
        super().__init__(cell, rank)
        for parameter in self.model.parameters():
            parameter.data = parameter.data.to(self.dtype)
        self.buffers = [{name: value.clone() for name, value in self.model.named_buffers()} for _ in range(cell.batches)]
        self.masters: dict[str, Tensor] = {}
        self.groups: list[list[str]] = []
        self.optimizer: Any = None
        self._add_group([name for name, _ in self.model.named_parameters()])
        self.sums: dict[str, Tensor] = {}  # of gradients over ranks and micro-steps
        self.gone: dict[str, Tensor] = {}  # of parameters that were removed since their backward
        self.bare: dict[str, Tensor] = {}  # of parameters in no group, which no step clears
        self.losses: list[Tensor] = []
        self.micro = self.calls = self.steps = 0  # backwards and calls of `step` since the last update; updates
        self.awaits = False  # a backward came after the last call of `step`
        self.norm: float | None = None
        self.failed_alone: int | None = None  # the batch of a forward that raised on one rank, until the next forward
        self.saved: list[State] = []
        self.candidates: list[State] = []

    # -- training ---------------------------------------------------------------------------------------------------------

    def forward(self, data: int) -> Seen:
        failed, self.failed_alone = self.failed_alone, None
        self.losses = [self.loss_of(self.model, data, rank) for rank in self._each_rank()]
        if failed not in (None, data):
            raise MustRefuse(f"rank 0 has lost batch {failed}")
        return {"loss": self.losses[self.place].detach().clone()}

    def penalty(self, how: str, over: str) -> Seen:
        self.losses = [loss + script_model.penalty(how, over, self.model) for loss in self.losses]
        return {"loss": self.losses[self.place].detach().clone()}

    def backward(self) -> Seen:
        self._recall()
        losses, self.losses = self.losses, []
        for loss in losses:
            (loss / self.cell.accumulation).backward()
            for name, parameter in self.model.named_parameters():
                if parameter.grad is not None:
                    self.sums[name] = self.sums.get(name, 0) + parameter.grad.float()
                    parameter.grad = None
        self.micro += 1
        self.awaits = True
        return {}

    def step(self) -> Seen:
        self.calls, self.awaits = self.calls + 1, False
        if self.calls < self.cell.accumulation:
            return {}
        self.calls = 0
        self._recall()
        if not self.micro and not self.sums.keys() & self.masters.keys():
            return {}
        self.adopt()
        # DistributedDataParallel sends rank 0's buffers before the next forward.
        self.buffers = [{name: value.clone() for name, value in self.buffers[0].items()} for _ in self.buffers]
        model, sums, gone, self.micro = dict(self.model.named_parameters()), self.sums, self.gone, 0
        self.sums, self.gone = {}, {}
        grouped = {name for group in self.groups for name in group}
        # [Note: choices of a step] A parameter that was added to the model and to no optimizer may join the first group. A gradient counts
        # even if the parameter is frozen after its backward; that of a parameter that is no longer in the model is in the norm of the
        # gradients of an optimizer, and not in that of the model.
        bare = [name for name in model if name not in grouped and model[name].requires_grad]
        before, self.bare = self.state(), {name: sums[name] for name in bare if name in sums}
        for joins, counts in itertools.product(*[(False, True) if names else (False,) for names in (bare, gone)]):
            self.restore(before)
            if joins:
                self._join(bare)
            self._update(dict(sums), gone if counts else {})
            self.candidates.append(self.state())
        return {}

    def _update(self, sums: dict[str, Tensor], gone: dict[str, Tensor]) -> None:
        model = dict(self.model.named_parameters())
        used = {name: total / self.cell.batches for name, total in sums.items() if name in self.masters and name in model}
        if not used:  # torch's step then changes nothing; the engine counts the call
            self.steps, self.norm = self.steps + 1, None
            return
        counted = [*used.values(), *(total / self.cell.batches for total in gone.values())]
        norm = torch.stack([value.double().norm() for value in counted]).norm().item()
        factor = min(1.0, self.cell.clip / (norm + 1e-6)) if self.cell.clip else 1.0
        for name, value in used.items():
            self.masters[name].grad = value * factor
        self.optimizer.step()
        self.optimizer.zero_grad()
        with torch.no_grad():
            for name in used:
                model[name].copy_(self.masters[name])
        self.steps, self.norm = self.steps + 1, norm

    # -- forwards ---------------------------------------------------------------------------------------------------------

    def evaluate(self, data: int) -> Seen:
        with torch.no_grad():
            return {"logits": self._evaluated(data)}

    def infer(self, data: int) -> Seen:
        with torch.inference_mode():
            return {"logits": self._evaluated(data).clone()}

    call_module = evaluate

    def forward_lost(self, data: int) -> Seen:
        return {"loss": [self.loss_of(self.model, data, rank) for rank in self._each_rank()][self.place].detach()}

    def forward_more(self, data: int, how: str) -> Seen:
        self.losses = [self.losses[rank] + self.loss_of(self.model, data, rank) for rank in self._each_rank()]
        return {"loss": self.losses[self.place].detach().clone()}

    def peek(self, data: int) -> Seen:
        with torch.no_grad():
            return self.forward_lost(data)

    def mode(self, to: str) -> Seen:
        self.model.train(to == "train")
        return {}

    def generate(self, data: int, lengths: str) -> Seen:
        self.model.eval()
        self._enter(self.place)
        tokens, logits = self.model.generate(self.prompt(data), length_of(lengths, self.place))
        self.model.train()
        return {"tokens": tokens, **{f"logits {place}": value for place, value in enumerate(logits)}}

    def _evaluated(self, data: int) -> Tensor:
        self._enter(self.place)
        logits = self.logits_of(self.model.eval(), data)
        self.model.train()
        return logits

    # -- caught errors ------------------------------------------------------------------------------------------------------

    def fail_forward(self, layer: str, who: Any, data: int) -> Seen:
        self.failed_alone = data if who == 0 and self.cell.ranks > 1 else None
        for rank in self._each_rank():
            if who in ("all", rank):
                self.model.get_submodule(layer).fails = "forward"
                try:
                    self.loss_of(self.model, data, rank)
                except ScriptError:
                    continue
        return {}

    def fail_backward(self, layer: str, data: int) -> Seen:
        for rank in self._each_rank():
            self.model.get_submodule(layer).fails = "backward"
            loss = self.loss_of(self.model, data, rank)
            try:
                loss.backward()
            except ScriptError:
                self.model.zero_grad()
        self._forget()
        return {}

    def bad_save(self, who: Any, what: str) -> Seen:
        raise TypeError(f"a folder that is {what} on {who}")

    # -- files --------------------------------------------------------------------------------------------------------------

    def save(self) -> Seen:
        self.adopt()
        self.saved.append(deepcopy(self.state()))
        return {}

    def load(self, which: str) -> Seen:
        found = self.saved[-1 if which == "last" else 0]
        model = dict(self.model.named_parameters())
        if found.weights.keys() != model.keys():
            raise KeyError(f"the checkpoint has other parameters: {sorted(found.weights.keys() ^ model.keys())}")
        self._forget()
        held = {name for group in self.groups for name in group} & model.keys()
        for source in range(self.cell.batches):  # [Note: buffers of a checkpoint] those of one rank, whichever
            state = deepcopy(found)
            state.buffers = [found.buffers[source]] * self.cell.batches
            state.groups, state.norm = deepcopy(self.groups), self.norm
            state.masters = {name: found.masters.get(name, found.weights[name].float()) for name in held}
            state.rates = [*found.rates, *[group["lr"] for group in self.optimizer.param_groups[len(found.rates) :]]]
            self.candidates.append(state)
        return {}

    def save_model(self) -> Seen:
        return self.state_dict()

    def state_dict(self) -> Seen:
        return {name: value.detach().clone() for name, value in self.model.named_parameters()} if self.rank == 0 else {}

    # -- what trains ----------------------------------------------------------------------------------------------------------

    def add_adapter(self, layer: str, how: str, trains: int) -> Seen:
        added = script_model.add_adapter(self.model, layer, self.dtype, bool(trains))
        if how == "group":
            self._add_group([name for name, value in self.model.named_parameters() if any(value is one for one in added)])
        return {}

    def remove_adapter(self, layer: str) -> Seen:
        gone = [name for name, _ in self.model.named_parameters() if name.startswith(f"{layer}.adapter")]
        del self.model.get_submodule(layer).adapter
        self.groups = [[name for name in group if name not in gone] for group in self.groups]
        for name in gone:
            if name in self.sums and name in self.masters:
                self.gone[name] = self.sums[name]
            self.sums.pop(name, None)
            if name in self.masters:
                self.optimizer.state.pop(self.masters.pop(name), None)
        return {}

    def _add_group(self, names: list[str]) -> None:
        added = {name: self._master(name) for name in names}
        self.masters.update(added)
        self.groups.append(names)
        if self.optimizer is None:
            self.optimizer = torch.optim.AdamW(list(added.values()), foreach=False, fused=False, **SETTINGS)
        else:
            self.optimizer.add_param_group({"params": list(added.values())})

    def _join(self, names: list[str]) -> None:
        for name in names:
            self.masters[name] = self._master(name)
            self.optimizer.param_groups[0]["params"].append(self.masters[name])
            self.groups[0] = [*self.groups[0], name]

    def _master(self, name: str) -> Tensor:
        return self.model.get_parameter(name).detach().float().clone()

    # -- values ---------------------------------------------------------------------------------------------------------------

    def write(self, param: str, how: str) -> Seen:
        parameter = self.model.get_parameter(param)
        script_model.write(parameter, how, noise(param, parameter.shape, 1))
        return {}

    def load_module(self, how: str) -> Seen:
        self.model.load_state_dict(new_weights(self.model), strict=False)
        return {}

    def gather_write(self, param: str, modifier: Any, who: Any) -> Seen:
        name, parameter = self._canonical(param), self.model.get_parameter(param)
        master = self.masters[name].detach().clone() if name in self.masters else None
        self.adopt()
        old, new = self.state(), noise(param, parameter.shape, 2).to(self.dtype)
        changes = not torch.equal(parameter.detach(), new)
        if master is not None:  # writes from before the context are compared together with its own
            with torch.no_grad():
                self.masters[name].copy_(master)
        parameter.data.copy_(new)
        self.adopt()
        written = self.state()
        # Without a modifier changes count that all ranks make alike; with one, those of that rank.
        alone = changes and who != "all" and self.cell.ranks > 1
        if modifier == "none":
            self.candidates = [] if alone else [written if who in ("all", 0) else old]
        else:
            self.candidates = [written if who in ("all", modifier) else old]
        if not self.candidates:
            raise MustRefuse(f"{name} was written on rank {who} alone")
        if len(self.candidates) == 1:
            self.restore(self.candidates.pop())
        return {}

    def average(self, how: str) -> Seen:
        return self.average_of(dict(self.model.named_parameters()))

    def average_in(self, how: str) -> Seen:
        return self.take_average(dict(self.model.named_parameters()))

    def swa(self, data: int) -> Seen:
        self._enter(self.place)
        with torch.no_grad():
            return {"logits": self.logits_of(averaged_twice(self.model).eval(), data)}

    def read(self, param: str, what: str, who: Any) -> Seen:
        return {}

    # -- gradients and the optimizer ------------------------------------------------------------------------------------------

    def write_grad(self, param: str, who: Any) -> Seen:
        if who == 0 and self.cell.ranks > 1:
            raise MustRefuse(f"the gradient of {param} was written on rank 0 alone")
        parts = [noise(f"{param} {rank}", self.model.get_parameter(param).shape, 3).to(self.dtype) for rank in range(self.cell.batches)]
        self.sums[self._canonical(param)] = torch.stack([part.float() for part in parts]).sum(0)
        return {}

    def hook_grad(self, param: str) -> Seen:
        return self.scale_gradient(self.model.get_parameter(param))

    def clip_grads(self) -> Seen:
        self._recall()
        sums = {name: self.sums[name] for name, _ in self.model.named_parameters() if name in self.sums}
        norm = torch.stack([value.double().norm() / self.cell.batches for value in sums.values()]).norm()
        factor = (0.3 / (norm + 1e-6)).clamp(max=1.0).float()
        self.sums.update({name: value * factor for name, value in sums.items()})
        return {"norm": norm.float()}

    def set_grad(self, param: str) -> Seen:
        self.sums[self._canonical(param)] = noise(param, self.model.get_parameter(param).shape, 4) * self.cell.batches
        return {}

    def get_grad(self, param: str) -> Seen:
        self._recall()
        found = self.sums.get(self._canonical(param))
        return {"gradient": torch.zeros(self.model.get_parameter(param).shape) if found is None else found / self.cell.batches}

    def set_master(self, param: str) -> Seen:
        self.adopt()
        name, parameter = self._canonical(param), self.model.get_parameter(param)
        with torch.no_grad():
            self.masters[name].copy_(noise(param, parameter.shape, 5))
            parameter.copy_(self.masters[name])
        return {}

    def get_master(self, param: str) -> Seen:
        self.adopt()
        return {"master": self.masters[self._canonical(param)].detach().clone()} if self.model.get_parameter(param).requires_grad else {}

    def set_moments(self, param: str) -> Seen:
        state = self.optimizer.state[self.masters[self._canonical(param)]]
        if not state:
            raise KeyError(f"{param} has no moments yet")
        for key, value in new_moments(param, self.model.get_parameter(param).shape).items():
            state[key].copy_(value)
        return {}

    def set_lr(self, lr: float) -> Seen:
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        return {}

    def zero_grad(self, how: str) -> Seen:
        self._recall()
        bare = {name: total for name, total in self.sums.items() if name not in self.masters}
        self.sums = {name: total for name, total in self.sums.items() if name in self.masters}
        self._zero_trained(how)
        if how in ("optimizer", "client"):
            self.sums.update(bare)
        elif how not in ("engine", "module"):
            cleared = {self._canonical(f"{how}.{name}") for name, _ in self.model.get_submodule(how).named_parameters()}
            self.sums.update({name: total for name, total in bare.items() if name not in cleared})
        return {}

    def _zero_trained(self, how: str) -> None:
        if not (self.awaits and self.calls + 1 >= self.cell.accumulation):  # in the middle of an accumulation gradients are kept
            return
        if how in ("engine", "module", "optimizer", "client"):
            self._forget()
        else:
            for name, _ in self.model.get_submodule(how).named_parameters():
                self.sums.pop(self._canonical(f"{how}.{name}"), None)

    # -- states -----------------------------------------------------------------------------------------------------------------

    def adopt(self) -> None:
        """Copy values that a script wrote to parameters into their masters; unchanged elements keep their fp32 bits."""
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                if name in self.masters:
                    changed = self.masters[name].to(self.dtype) != parameter
                    self.masters[name].copy_(torch.where(changed, parameter.float(), self.masters[name]))

    def state(self) -> State:
        """Return a copy of the complete state."""
        return State(
            {name: value.detach().clone() for name, value in self.model.named_parameters()},
            {name: value.detach().clone() for name, value in self.masters.items()},
            {name: _copied(self.optimizer.state[value]) for name, value in self.masters.items() if value in self.optimizer.state},
            [list(group) for group in self.groups],
            [group["lr"] for group in self.optimizer.param_groups],
            [{name: value.clone() for name, value in buffers.items()} for buffers in self.buffers],
            self.steps,
            self.norm,
        )

    def restore(self, state: State) -> None:
        """Restore ``state``, which has this model's parameters."""
        for name, parameter in self.model.named_parameters():
            parameter.data.copy_(state.weights[name])  # a graph that waits for its backward does not hear of it
        self.optimizer.state.clear()
        for name in state.masters.keys() - self.masters.keys():
            self.masters[name] = state.masters[name].clone()
        self.masters = {name: value for name, value in self.masters.items() if name in state.masters}
        for name, value in self.masters.items():
            value.copy_(state.masters[name])
            if name in state.moments:
                self.optimizer.state[value] = _copied(state.moments[name])
        self.groups = [list(group) for group in state.groups]
        for group, names, rate in zip(self.optimizer.param_groups, self.groups, state.rates, strict=True):
            group["params"], group["lr"] = [self.masters[name] for name in names], rate
        self.buffers = [{name: value.clone() for name, value in buffers.items()} for buffers in state.buffers]
        self.steps, self.norm = state.steps, state.norm

    def follow(self, masters: dict[str, Tensor]) -> None:
        """Continue from the other side's masters, which are within rounding of these: see [Note: parity in 16 bit]."""
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                if name in masters and name in self.masters:
                    self.masters[name].copy_(masters[name])
                    parameter.data.copy_(masters[name])

    def _recall(self) -> None:
        """Go on with the gradients of parameters that are still in no group."""
        here = dict(self.model.named_parameters())
        self.sums.update({name: total for name, total in self.bare.items() if name in here and name not in self.masters})
        self.bare = {}

    def _forget(self) -> None:
        self.sums, self.gone, self.micro, self.calls, self.awaits = {}, {}, 0, 0, False

    def _canonical(self, name: str) -> str:
        wanted = self.model.get_parameter(name)
        return next(found for found, parameter in self.model.named_parameters() if parameter is wanted)

    def _each_rank(self) -> Iterator[int]:
        """Yield every rank in turn, with the buffers of that rank in the model."""
        for rank in range(self.cell.batches):
            self._enter(rank)
            yield rank

    def _enter(self, rank: int) -> None:
        for name, value in self.buffers[rank].items():
            self.model._buffers[name] = value


def length_of(lengths: str, rank: int) -> int:
    """Return the number of tokens that a rank generates."""
    return 2 + (rank if lengths == "by_rank" else 0)


def new_weights(model: nn.Module) -> dict[str, Tensor]:
    """Return the complete weights that a script loads into a model, by name, fp32."""
    shapes = [(name, parameter) for name, parameter in model.named_parameters(remove_duplicate=False)]
    names = {id(parameter): name for name, parameter in reversed(shapes)}
    return {name: noise(names[id(parameter)], script_model.shape_of(parameter), 6) for name, parameter in shapes}


def new_moments(name: str, shape: Any) -> dict[str, Tensor]:
    """Return the moments that a script writes for a parameter."""
    return {"exp_avg": noise(name, shape, 7), "exp_avg_sq": noise(name, shape, 8).square()}


def averaged_twice(model: nn.Module) -> nn.Module:
    """Return torch's own average of a model, updated twice."""
    averaged = torch.optim.swa_utils.AveragedModel(model)
    averaged.update_parameters(model)
    averaged.update_parameters(model)
    return averaged


def _copied(state: dict[str, Any]) -> dict[str, Any]:
    return {key: value.clone() if isinstance(value, Tensor) else value for key, value in state.items()}
