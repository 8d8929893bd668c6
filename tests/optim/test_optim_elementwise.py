"""Twin of ``hf_zero/optim/elementwise.py``. Run: ``pytest tests/optim/test_optim_elementwise.py``."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from hf_zero.core.optimizer.clones import random_states
from hf_zero.errors import ConfigError, UnsupportedError
from hf_zero.optim import elementwise
from hf_zero.optim.elementwise import needs_whole_tensors, require_tested
from hf_zero.optim.lion import Lion
from hf_zero.optim.uncorrected_adam import UncorrectedAdam
from tests import pretend
from tests.support import ranks


def params() -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.ones(3, 4)), torch.nn.Parameter(torch.ones(5))]


class Base(torch.optim.Optimizer):
    """A client's optimizer: plain gradient descent, scaled by ``factor``."""

    def __init__(self, params: Any, lr: float = 0.1, **options: Any) -> None:
        super().__init__(params, {"lr": lr} | options)

    def factor(self, param: torch.Tensor) -> torch.Tensor:
        return torch.ones(())

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                param -= group["lr"] * self.factor(param) * param.grad


class Cubic(Base):
    """Element-wise, though unusual."""

    def factor(self, param: torch.Tensor) -> torch.Tensor:
        return 1 + param.grad**2


class OwnNorm(Base):
    """Needs the norm of the parameter, as LARS does."""

    def factor(self, param: torch.Tensor) -> torch.Tensor:
        return param.norm() / param.grad.norm()


class AllNorm(Base):
    """Needs the norm of all gradients together, as D-adaptation does: equal on one rank, not on shards."""

    def factor(self, param: torch.Tensor) -> torch.Tensor:
        grads = [p.grad for group in self.param_groups for p in group["params"]]
        return 1 / torch.nn.utils.get_total_norm(grads)


class Rows(Base):
    """Needs two dimensions."""

    def factor(self, param: torch.Tensor) -> torch.Tensor:
        rows, _ = param.shape
        return torch.ones(rows, 1)


class ByGroup(OwnNorm):
    """Needs whole tensors only in groups that ask for it, as GaLore does."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                factor = self.factor(param) if "rank" in group else 1.0
                param.data -= group["lr"] * factor * param.grad


class LateNorm(Base):
    """Behaves for two steps, then looks at the whole tensor."""

    def factor(self, param: torch.Tensor) -> torch.Tensor:
        state = self.state[param]
        state["step"] = state.get("step", 0) + 1
        return param.grad.norm() if state["step"] > 2 else torch.ones(())


class Projected(Base):
    """Looks at whole rows in rare steps, as AdamP and SGDP do: where the gradient is orthogonal to them, it projects its momentum."""

    def factor(self, param: torch.Tensor) -> torch.Tensor:
        momentum = self.state[param].setdefault("momentum", torch.zeros_like(param)).lerp_(param.grad, 0.1)
        if param.ndim < 2 or torch.cosine_similarity(param, param.grad).abs().max() > 0.1 / param.shape[1] ** 0.5:
            return momentum
        rows = param / param.norm(dim=1, keepdim=True)
        return momentum - rows * (rows * momentum).sum(1, keepdim=True)


class Clipped(Base):
    """Clips an update by its norm, which only large gradients reach."""

    def factor(self, param: torch.Tensor) -> torch.Tensor:
        return (500.0 / param.grad.norm()).clamp(max=1.0)


class Factored(Base):
    """Looks at rows of large matrices alone, as big_vision's Adafactor does."""

    def factor(self, param: torch.Tensor) -> torch.Tensor:
        large = param.ndim == 2 and min(param.shape) >= 128
        return 1 / param.grad.square().mean(1, keepdim=True).sqrt() if large else torch.ones(())


class OfConvolutions(Base):
    """Looks along the rows of convolutions alone, as gradient centralization may."""

    def factor(self, param: torch.Tensor) -> torch.Tensor:
        return param.grad.mean((1, 2, 3), keepdim=True) if param.ndim == 4 else torch.ones(())


class Random(Base):
    """Adds noise."""

    def factor(self, param: torch.Tensor) -> torch.Tensor:
        return torch.rand(param.shape)


class ByPosition(Base):
    """Gives each parameter of a group another rate, as GrokAdamW gives it another momentum."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for position, param in enumerate(group["params"]):
                param.data -= group["lr"] * 0.5**position * param.grad


class NormByPosition(ByPosition):
    """Looks at a whole tensor and at the positions in a group: GrokAdamW clips each parameter by its norm."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                param.grad /= param.grad.norm()
        super().step()


class Clipping(Base):
    """Clips by the norm of all gradients, and then divides by a mean square, which hides a factor that is the same in all steps."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            norm = sum(float(param.grad.square().sum()) for param in group["params"]) ** 0.5
            for param in group["params"]:
                square = self.state[param].setdefault("square", torch.zeros_like(param))
                square.mul_(0.9).add_((param.grad / norm).square())
                param.data -= group["lr"] * param.grad / norm / square.mean().sqrt()


class Seeded(OwnNorm):
    """Its constructor gives each parameter a seed by its position, as APOLLO's does."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, lr)
        for seed, param in enumerate(self.param_groups[0]["params"]):
            self.state[param]["seed"] = seed

    def factor(self, param: torch.Tensor) -> torch.Tensor:
        return super().factor(param) * torch.rand(param.shape, generator=torch.Generator().manual_seed(self.state[param]["seed"]))


class Masked(Base):
    """Leaves out whole parameters at random, as Magma does."""

    def factor(self, param: torch.Tensor) -> torch.Tensor:
        return (torch.rand(()) < 0.5) * torch.ones(())


class Wrapper(torch.optim.Optimizer):
    """Shows groups and states of the optimizer that it holds, by properties that cannot be set."""

    param_groups = property(lambda self: self.held.param_groups)  # type: ignore[assignment]
    state = property(lambda self: self.held.state)  # type: ignore[assignment]

    def __init__(self, held: torch.optim.Optimizer) -> None:
        self.held, self.defaults = held, held.defaults

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.held.step()


class Lamb(AllNorm):
    """A known name; timm's class of this name clips by the norm of all gradients."""


class Decorated(torch.optim.AdamW):
    """A subclass that hands its keywords on."""

    def __init__(self, params: Any, note: str = "", **options: Any) -> None:
        super().__init__(params, **options)
        self.note = note


class Centralized(torch.optim.AdamW):
    """A subclass of a good class that looks along rows."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                if param.dim() > 1:
                    param.grad -= param.grad.mean(dim=1, keepdim=True)
        super().step()


class ScheduleFree(Base):
    """Must be told that training begins."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, lr)
        self.training = False

    def train(self) -> None:
        self.training = True

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if not self.training:
            raise RuntimeError("call train() first")
        super().step()


class NeedsMore(Base):
    """Its step needs a model that a trial does not have."""

    def __init__(self, params: Any, model: Any) -> None:
        super().__init__(params)

    def factor(self, param: torch.Tensor) -> torch.Tensor:
        raise TypeError("no model")


class Frozen(Base):
    """Never moves anything, so the probe proves nothing."""

    def factor(self, param: torch.Tensor) -> torch.Tensor:
        return torch.zeros(())


KNOWN = ["Adam", "AdamW", "SGD", "Adagrad", "Adadelta", "Adamax", "NAdam", "RAdam", "RMSprop", "ASGD", "Rprop"]


OWN = [Lion, UncorrectedAdam]


@pytest.mark.parametrize("kind", [getattr(torch.optim, name) for name in KNOWN] + OWN)
def test_known_classes_pass_unprobed_and_would_pass_the_probe(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    client = type("Client", (kind,), {})
    assert not needs_whole_tensors(client(params(), lr=0.01))
    monkeypatch.setattr(elementwise, "_probe", None)
    assert not needs_whole_tensors(kind(params(), lr=0.01))
    with pytest.raises(TypeError, match="NoneType"):  # a subclass is probed
        needs_whole_tensors(client(params(), lr=0.01))


@pytest.mark.parametrize("allow", [False, True])
@pytest.mark.parametrize("optimizer", [Base(params()), Cubic(params()), ScheduleFree(params()), Decorated(params(), fused=True)])
def test_unknown_elementwise_classes_run_on_shards(optimizer: torch.optim.Optimizer, allow: bool) -> None:
    assert not needs_whole_tensors(optimizer, allow)


@pytest.mark.parametrize("allow", [False, True])
@pytest.mark.parametrize("kind", [OwnNorm, LateNorm, Seeded, Random, Centralized, Rows, Projected, Clipped, Factored, OfConvolutions])
def test_probe_finds_what_looks_at_more_than_one_element(kind: Any, allow: bool) -> None:
    assert needs_whole_tensors(kind(params()), allow)


@pytest.mark.parametrize("allow", [False, True])  # accelerate and transformers set the key themselves
@pytest.mark.parametrize("kind", [AllNorm, ByPosition, NormByPosition, Clipping, Lamb])
def test_what_looks_at_all_parameters_together_is_refused(kind: Any, allow: bool) -> None:
    message = f"{kind.__name__} cannot run with ZeRO: .*all parameters together or on their positions.*zero_allow_untested_optimizer"
    with pytest.raises(UnsupportedError, match=message):
        needs_whole_tensors(kind(params()), allow)
    assert needs_whole_tensors(kind(params()), allow, all_here=True)


def test_known_names_that_look_at_all_parameters_are_refused() -> None:
    prodigy = type("Prodigy", (Base,), {})(params())
    assert needs_whole_tensors(prodigy, all_here=True)
    with pytest.raises(UnsupportedError, match="Prodigy cannot run with ZeRO: .*Or use stage 0"):
        needs_whole_tensors(prodigy)


@pytest.mark.parametrize("kind", [Random, Masked])
def test_random_numbers_are_warned_of(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank draws for its own parameters; whole tensors, because a few steps do not show what a mask over a parameter does."""
    warned: list[str] = []
    monkeypatch.setattr(elementwise, "warn_once", warned.append)
    assert needs_whole_tensors(kind(params()))
    assert [text for text in warned if f"step() of optimizer {kind.__name__} draws random numbers" in text], warned
    warned.clear()
    assert needs_whole_tensors(kind(params()), all_here=True) and not warned


class RandomOnDevice(Base):
    """Adds noise that the device draws."""

    def factor(self, param: torch.Tensor) -> torch.Tensor:
        return 1 + torch.rand_like(param)


def _random_on_device() -> tuple[list[str], bool]:
    device, warned = ranks.device(), list[str]()
    own = [torch.nn.Parameter(param.detach().to(device)) for param in params()]
    before = random_states(device)
    with mock.patch.object(elementwise, "warn_once", warned.append):
        assert needs_whole_tensors(RandomOnDevice(own))
    return warned, all(map(torch.equal, before, random_states(device)))


@pytest.mark.skipif(bool(pretend.missing()), reason=pretend.missing())
def test_random_numbers_of_a_device_are_warned_of_and_kept() -> None:
    (warned, kept), *_ = ranks.run_ranks(_random_on_device, 1, env={"HF_ZERO_TEST_DEVICE": pretend.NAME}, group=False)
    assert kept and len(warned) == 1 and "draws random numbers" in warned[0]


@pytest.mark.parametrize(("kind", "whole"), [(Base, False), (OwnNorm, True)])
def test_a_wrapper_with_properties_is_tried(kind: Any, whole: bool) -> None:
    assert needs_whole_tensors(Wrapper(kind(params()))) is whole


def test_probe_sees_every_groups_options() -> None:
    first, second = params()
    assert not needs_whole_tensors(ByGroup([{"params": [first]}, {"params": [second], "lr": 0.5}]))
    assert needs_whole_tensors(ByGroup([{"params": [first]}, {"params": [second], "rank": 4}]))


def test_rate_of_zero_does_not_hide_a_norm() -> None:
    optimizer = OwnNorm(params())
    optimizer.param_groups[0]["lr"] = 0.0  # as a warm-up leaves it
    assert needs_whole_tensors(optimizer)


@pytest.mark.parametrize(("kind", "message"), [(NeedsMore, "TypeError.*model"), (Frozen, "did not move")])
def test_what_cannot_be_probed_names_the_switch(kind: Any, message: str) -> None:
    optimizer = kind(params(), model=None) if kind is NeedsMore else kind(params())
    with pytest.raises(UnsupportedError, match=rf"{message}(.|\n)*zero_allow_untested_optimizer"):
        needs_whole_tensors(optimizer)
    assert needs_whole_tensors(optimizer, allow_untested=True)  # right for every class that treats parameters one by one
    assert needs_whole_tensors(optimizer, all_here=True)  # right for every class


class Chosen(Base):
    """A rule that an argument of the constructor chooses, which is an attribute and no option."""

    def __init__(self, params: Any, rule: str, **options: Any) -> None:
        super().__init__(params, **options)
        self.rule = rule

    def factor(self, param: torch.Tensor) -> torch.Tensor:
        return {"element": lambda: 1 + param.grad.abs(), "norm": lambda: 1 / param.grad.norm()}[self.rule]()


def test_arguments_that_are_attributes_are_those_of_the_trial() -> None:
    assert not needs_whole_tensors(Chosen(params(), "element"))
    assert needs_whole_tensors(Chosen(params(), "norm"))


class Helper:
    """Counts steps for an optimizer."""

    def __init__(self) -> None:
        self.count, self.source = 0, torch.Generator().manual_seed(1)


class Helped(Base):
    """Counts and draws numbers in an object of the script."""

    def __init__(self, params: Any, helper: Helper) -> None:
        super().__init__(params)
        self.helper = helper

    def factor(self, param: torch.Tensor) -> torch.Tensor:
        self.helper.count += 1
        torch.rand((), generator=self.helper.source)
        return 1 + param.grad.abs()


def test_a_trial_leaves_objects_of_the_script_as_they_were() -> None:
    optimizer = Helped(params(), Helper())
    first = Helper()
    needs_whole_tensors(optimizer)
    assert optimizer.helper.count == 0
    assert torch.equal(optimizer.helper.source.get_state(), first.source.get_state())


class Single(Base):
    """A fused kernel: element-wise, for one type."""

    def factor(self, param: torch.Tensor) -> torch.Tensor:
        if param.dtype != torch.float32:
            raise RuntimeError("expected float32")
        return 1 / param.grad.abs().sqrt()


class SingleNorm(Single):
    """Looks at whole tensors, of one type."""

    def factor(self, param: torch.Tensor) -> torch.Tensor:
        return super().factor(param) * param.norm()


@pytest.mark.parametrize("lr", [0.1, 1e-5])
def test_what_wants_float32_is_tried_there(lr: float) -> None:
    assert not needs_whole_tensors(Single(params(), lr))
    assert needs_whole_tensors(SingleNorm(params(), lr))


def test_what_cannot_be_told_runs_on_shards_where_there_is_nothing_else() -> None:
    assert not needs_whole_tensors(NeedsMore(params(), model=None), allow_untested=True, shards_only=True)
    assert needs_whole_tensors(OwnNorm(params()), allow_untested=True, shards_only=True)  # told, and refused by the engine


class Late(OwnNorm):
    """Fails, or talks, only when it has two parameters, or one without a second dimension."""

    def __init__(self, params: Any, lr: float = 0.1, error: Any = ValueError, many: bool = True) -> None:
        super().__init__(params, lr, error=error, many=many)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        group = self.param_groups[0]
        if len(group["params"]) > 1 if group["many"] else group["params"][0].ndim == 1:
            if group["error"] is not None:
                raise group["error"]("late")
            torch.ops._c10d_functional.all_reduce(torch.ones(1), "sum", "0")
        super().step()


def test_failures_of_later_runs_are_named() -> None:
    with pytest.raises(UnsupportedError, match="two small matrices: ValueError: late"):
        needs_whole_tensors(Late(params()))
    assert needs_whole_tensors(Late(params(), many=False))
    for many in (False, True):
        with pytest.raises(UnsupportedError, match="exchanges tensors"):
            needs_whole_tensors(Late(params(), error=None, many=many))


def test_known_classes_are_told_by_name() -> None:
    for optimizer in (
        torch.optim.Adafactor(params()),
        type("Lars", (Base,), {})(params()),
        type("SGDP", (Base,), {})(params()),
        type("MyCame", (type("CAME", (Base,), {}),), {})(params()),
        type("PagedAdamW8bit", (Base,), {})(params()),
    ):
        assert needs_whole_tensors(optimizer)
    cases: list[tuple[torch.optim.Optimizer, str]] = [
        (torch.optim.LBFGS(params()), "LBFGS cannot run.*inner products"),
        (torch.optim.SparseAdam(params()), "SparseAdam cannot run.*sparse"),
        (type("MyProdigy", (type("Prodigy", (Base,), {}),), {})(params()), "MyProdigy cannot run.*step size"),
    ]
    for optimizer, message in cases:
        for allow in (False, True):
            with pytest.raises(UnsupportedError, match=message):
                needs_whole_tensors(optimizer, allow, all_here="Prodigy" not in message)


def test_optimizer_that_says_it_quantizes_needs_whole_tensors() -> None:
    optimizer = Base(params())
    optimizer.args = SimpleNamespace(optim_bits=8)  # type: ignore[attr-defined]
    assert needs_whole_tensors(optimizer)


class Marking(torch.optim.SGD):
    """Element-wise, but the rate depends on a mark that the constructor has given each parameter by its shape."""

    def __init__(self, params: Any, **settings: Any) -> None:
        super().__init__(params, **settings)
        for group in self.param_groups:
            for param in group["params"]:
                self.state[param]["matrix"] = param.ndim > 1


def test_optimizer_that_marks_parameters_needs_whole_tensors() -> None:
    assert needs_whole_tensors(Marking(params(), lr=0.1))
    assert not needs_whole_tensors(Marking(params(), lr=0.1), shards_only=True)


class Distributed(OwnNorm):
    """Divides the work over ranks itself, as the Muon for several devices does."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        torch.distributed.all_reduce(torch.ones(1))
        super().step()


def _refuses_collectives(name: str) -> str:
    torch.distributed.barrier()  # a rank that is done must not leave before the others have connected
    try:
        needs_whole_tensors(type(name, (Distributed,), {})(params()))
    except UnsupportedError as error:
        return str(error)
    return "accepted"


@pytest.mark.parametrize("name", ["Muon", "Unknown"])
def test_step_with_collectives_is_refused_and_issues_none(name: str) -> None:
    for answer in ranks.run_ranks(_refuses_collectives, 2, name):
        assert "exchanges tensors between ranks" in answer and "SingleDevice" in answer


def test_probe_leaves_optimizer_and_random_state_alone() -> None:
    optimizer = Decorated(params(), lr=0.01)
    before = [param.detach().clone() for param in optimizer.param_groups[0]["params"]]
    random_state = torch.get_rng_state()
    needs_whole_tensors(optimizer)
    needs_whole_tensors(Random(params()))
    assert torch.equal(torch.get_rng_state(), random_state)
    assert all(torch.equal(old, new) for old, new in zip(before, optimizer.param_groups[0]["params"], strict=True))
    assert len(optimizer.state) == 0


def test_parameters_on_the_meta_device_are_probed_on_the_host() -> None:
    assert not needs_whole_tensors(Cubic([torch.nn.Parameter(torch.empty(3, device="meta"))]))


def test_named_parameters_are_probed() -> None:
    assert not needs_whole_tensors(Decorated([("weight", params()[0]), ("bias", params()[1])], lr=0.01))


def test_false_written_down_refuses_unknown_classes() -> None:
    class Unknown(torch.optim.SGD):
        pass

    for known in (torch.optim.SGD(params(), lr=0.1), torch.optim.Adafactor(params())):
        require_tested(known, False)
    require_tested(Unknown(params(), lr=0.1), True)
    with pytest.raises(ConfigError, match="optimizer Unknown is not known to run with ZeRO, and zero_allow_untested_optimizer is false"):
        require_tested(Unknown(params(), lr=0.1), False)
