"""Twin of ``hf_zero/optim/elementwise.py``. Run: ``pytest tests/test_optim_elementwise.py``."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hf_zero.errors import UnsupportedError
from hf_zero.optim import elementwise
from hf_zero.optim.elementwise import require_elementwise
from hf_zero.optim.lion import Lion
from hf_zero.optim.uncorrected_adam import UncorrectedAdam


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


class Random(Base):
    """Adds noise."""

    def factor(self, param: torch.Tensor) -> torch.Tensor:
        return torch.rand(param.shape)


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
    """Cannot be built from its defaults."""

    def __init__(self, params: Any, model: Any) -> None:
        super().__init__(params)


class Frozen(Base):
    """Never moves anything, so the probe proves nothing."""

    def factor(self, param: torch.Tensor) -> torch.Tensor:
        return torch.zeros(())


KNOWN = ["Adam", "AdamW", "SGD", "Adagrad", "Adadelta", "Adamax", "NAdam", "RAdam", "RMSprop", "ASGD", "Rprop"]


OWN = [Lion, UncorrectedAdam]


@pytest.mark.parametrize("kind", [getattr(torch.optim, name) for name in KNOWN] + OWN)
def test_known_classes_pass_unprobed_and_would_pass_the_probe(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    client = type("Client", (kind,), {})
    require_elementwise(client(params(), lr=0.01))
    monkeypatch.setattr(elementwise, "_probe", None)
    require_elementwise(kind(params(), lr=0.01))
    with pytest.raises(TypeError, match="NoneType"):  # a subclass is probed
        require_elementwise(client(params(), lr=0.01))


@pytest.mark.parametrize("optimizer", [Base(params()), Cubic(params()), ScheduleFree(params()), Decorated(params(), fused=True)])
def test_unknown_elementwise_classes_pass(optimizer: torch.optim.Optimizer) -> None:
    require_elementwise(optimizer)


@pytest.mark.parametrize("kind", [OwnNorm, AllNorm, LateNorm, Random, Centralized])
def test_probe_finds_what_looks_at_more_than_one_element(kind: Any) -> None:
    with pytest.raises(
        UnsupportedError, match=rf"{kind.__name__} cannot run on ZeRO shards: .*differ.*AdamW.*zero_allow_untested_optimizer"
    ):
        require_elementwise(kind(params()))


def test_probe_finds_what_needs_a_matrix() -> None:
    with pytest.raises(UnsupportedError, match="Rows cannot run on ZeRO shards: it fails on a flat part of a matrix"):
        require_elementwise(Rows(params()))


def test_probe_sees_every_groups_options() -> None:
    first, second = params()
    require_elementwise(ByGroup([{"params": [first]}, {"params": [second], "lr": 0.5}]))
    with pytest.raises(UnsupportedError, match="ByGroup cannot run"):
        require_elementwise(ByGroup([{"params": [first]}, {"params": [second], "rank": 4}]))


def test_rate_of_zero_does_not_hide_a_norm() -> None:
    optimizer = OwnNorm(params())
    optimizer.param_groups[0]["lr"] = 0.0  # as a warm-up leaves it
    with pytest.raises(UnsupportedError, match="OwnNorm cannot run"):
        require_elementwise(optimizer)


@pytest.mark.parametrize(("kind", "message"), [(NeedsMore, "TypeError.*model"), (Frozen, "did not move")])
def test_what_cannot_be_probed_names_the_switch(kind: Any, message: str) -> None:
    optimizer = kind(params(), model=None) if kind is NeedsMore else kind(params())
    with pytest.raises(UnsupportedError, match=rf"{message}(.|\n)*zero_allow_untested_optimizer"):
        require_elementwise(optimizer)


def test_known_whole_tensor_classes_are_refused_by_name() -> None:
    cases: list[tuple[torch.optim.Optimizer, str]] = [
        (torch.optim.Adafactor(params()), "Adafactor cannot run.*rows and columns"),
        (torch.optim.LBFGS(params()), "LBFGS cannot run.*inner products"),
        (torch.optim.SparseAdam(params()), "SparseAdam cannot run.*sparse"),
        (type("Lamb", (Base,), {})(params()), "Lamb cannot run.*norms of the whole parameter"),
        (type("MyProdigy", (type("Prodigy", (Base,), {}),), {})(params()), "MyProdigy cannot run.*step size"),
        (type("PagedAdamW8bit", (Base,), {})(params()), "PagedAdamW8bit cannot run.*quantizes"),
    ]
    for optimizer, message in cases:
        with pytest.raises(UnsupportedError, match=message):
            require_elementwise(optimizer)


def test_optimizer_that_says_it_quantizes_is_refused() -> None:
    optimizer = Base(params())
    optimizer.args = SimpleNamespace(optim_bits=8)  # type: ignore[attr-defined]
    with pytest.raises(UnsupportedError, match="quantizes"):
        require_elementwise(optimizer)


def test_probe_leaves_optimizer_and_random_state_alone() -> None:
    optimizer = Decorated(params(), lr=0.01)
    before = [param.detach().clone() for param in optimizer.param_groups[0]["params"]]
    random_state = torch.get_rng_state()
    require_elementwise(optimizer)
    assert torch.equal(torch.get_rng_state(), random_state)
    assert all(torch.equal(old, new) for old, new in zip(before, optimizer.param_groups[0]["params"], strict=True))
    assert len(optimizer.state) == 0


def test_parameters_on_the_meta_device_are_probed_on_the_host() -> None:
    require_elementwise(Cubic([torch.nn.Parameter(torch.empty(3, device="meta"))]))


def test_named_parameters_are_probed() -> None:
    require_elementwise(Decorated([("weight", params()[0]), ("bias", params()[1])], lr=0.01))
