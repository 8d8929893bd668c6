"""Twin of ``hf_zero/optim/factory.py``, with Lion and the uncorrected Adam. Run: ``pytest tests/optim/test_optim_factory.py``."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from hf_zero.errors import ConfigError, UnsupportedError
from hf_zero.native.library import library
from hf_zero.ops import HostAdam, HostLion
from hf_zero.optim import factory
from hf_zero.optim.factory import build_optimizer
from hf_zero.optim.lion import Lion
from hf_zero.optim.uncorrected_adam import UncorrectedAdam

pytestmark = pytest.mark.quick

SHAPES = ((3, 4), (5,), ())


def make_params(dtype: torch.dtype = torch.float32) -> list[torch.nn.Parameter]:
    """The same parameters at every call."""
    generator = torch.Generator().manual_seed(1)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in SHAPES]


def train(optimizer: torch.optim.Optimizer, params: list[torch.nn.Parameter], steps: int = 4) -> list[torch.Tensor]:
    """Steps with the same gradients at every call; returns the parameters."""
    generator = torch.Generator().manual_seed(2)
    for _ in range(steps):
        for param in params:
            param.grad = torch.randn(param.shape, generator=generator).to(param.dtype)
        optimizer.step()
    return [param.detach() for param in params]


def built(kind: str, config: dict[str, Any]) -> list[torch.Tensor]:
    """Parameters after training with an optimizer from the config."""
    params = make_params()
    return train(build_optimizer(kind, config, params), params)


def plain(kind: Any, **options: Any) -> list[torch.Tensor]:
    """Parameters after training with a class called by hand."""
    params = make_params()
    return train(kind(params, **options), params)


def assert_same(actual: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)


def differ(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return any(not torch.allclose(a, b, rtol=1e-4, atol=1e-6) for a, b in zip(one, other, strict=True))


# --- DeepSpeed's meaning of the parameters ---

DECAY = {"lr": 0.01, "weight_decay": 0.5}


@pytest.mark.parametrize("name", ["Adam", "adam", "AdamW", "ADAMW"])
def test_adam_is_adamw_by_default(name: str) -> None:
    assert_same(built(name, DECAY), plain(torch.optim.AdamW, **DECAY))
    assert differ(built(name, DECAY), plain(torch.optim.Adam, **DECAY))


def test_adam_w_mode_false_is_adam_and_means_nothing_to_adamw(monkeypatch: pytest.MonkeyPatch) -> None:
    warnings: list[str] = []
    monkeypatch.setattr(factory, "warn_once", warnings.append)
    assert_same(built("Adam", DECAY | {"adam_w_mode": False}), plain(torch.optim.Adam, **DECAY))
    assert warnings == []
    assert_same(built("AdamW", DECAY | {"adam_w_mode": "false"}), plain(torch.optim.AdamW, **DECAY))
    assert ["adam_w_mode" in text for text in warnings] == [True]


def test_defaults_are_deepspeeds_unless_torch_adam() -> None:
    assert_same(built("AdamW", {}), plain(torch.optim.AdamW, lr=1e-3, weight_decay=0.0))
    defaults = build_optimizer("AdamW", {"torch_adam": True}, make_params()).defaults
    assert defaults["weight_decay"] == 0.01
    assert build_optimizer("Adagrad", {}, make_params()).defaults["lr"] == 0.01
    assert build_optimizer("Lion", {}, make_params()).defaults["betas"] == (0.9, 0.999)


def test_none_and_missing_keep_the_class_default() -> None:
    assert build_optimizer("SGD", {"lr": None, "momentum": 0.5}, make_params()).defaults["lr"] == 1e-3
    assert build_optimizer("Adam", None, make_params()).defaults["lr"] == 1e-3


def test_text_of_numbers_and_lists() -> None:
    defaults = build_optimizer("AdamW", {"lr": "3e-5", "betas": ["0.8", 0.9], "eps": "1e-6", "amsgrad": "true"}, make_params()).defaults
    assert (defaults["lr"], defaults["betas"], defaults["eps"], defaults["amsgrad"]) == (3e-5, (0.8, 0.9), 1e-6, True)


@pytest.mark.parametrize(
    ("name", "config", "kind", "options"),
    [
        ("AdamW", {"amsgrad": True, "betas": [0.8, 0.9], "eps": 1e-3}, torch.optim.AdamW, {"weight_decay": 0.0}),
        ("Adagrad", {"lr": 0.1, "eps": 1e-3, "weight_decay": 0.1}, torch.optim.Adagrad, {}),
        ("SGD", {"lr": 0.1, "momentum": 0.9, "nesterov": True}, torch.optim.SGD, {}),
        ("RMSprop", {"lr": 0.1, "centered": True}, torch.optim.RMSprop, {}),
        ("nadam", {"lr": 0.1, "weight_decay": 0.1, "decoupled_weight_decay": True}, torch.optim.NAdam, {}),
    ],
)
def test_options_reach_torch_class(name: str, config: dict[str, Any], kind: Any, options: dict[str, Any]) -> None:
    assert_same(built(name, config), plain(kind, **config, **options))


@pytest.mark.parametrize("name", ["Adam", "AdamW", "Lion", "Adagrad"])
def test_keys_without_effect_are_accepted(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    warnings: list[str] = []
    monkeypatch.setattr(factory, "warn_once", warnings.append)
    assert_same(built(name, {"set_grad_none": True, "fp32_optimizer_states": True}), built(name, {}))
    assert warnings == []
    build_optimizer(name, {"fp32_optimizer_states": False}, make_params())
    assert ["fp32_optimizer_states" in text for text in warnings] == [True]


def test_groups_keep_their_own_options() -> None:
    first, second, third = make_params()
    groups = [
        {"params": [first], "weight_decay": 0.1, "lr": 0.5},
        {"params": [second, third], "weight_decay": 0.0, "name": "no_decay"},
    ]
    optimizer = build_optimizer("AdamW", {"lr": 0.01, "weight_decay": 0.3}, groups)
    assert [(group["lr"], group["weight_decay"], len(group["params"])) for group in optimizer.param_groups] == [
        (0.5, 0.1, 1),
        (0.01, 0.0, 2),
    ]
    assert optimizer.param_groups[1]["name"] == "no_decay"


# --- kernels ---


@pytest.mark.parametrize(("name", "host", "plain"), [("AdamW", HostAdam, torch.optim.AdamW), ("Lion", HostLion, Lion)])
def test_moments_of_another_type_than_the_masters_need_no_kernels(
    monkeypatch: pytest.MonkeyPatch, name: str, host: type, plain: type
) -> None:
    monkeypatch.setenv("HF_ZERO_NATIVE", "0")
    mixed: Any = build_optimizer(name, {}, make_params(), offloaded=True, moment_dtype=torch.float32)
    assert isinstance(mixed, host) and mixed.moment_dtype == torch.float32
    assert type(build_optimizer(name, {}, make_params(), offloaded=True, moment_dtype=torch.bfloat16)) is plain
    monkeypatch.delenv("HF_ZERO_NATIVE")
    if library() is not None:
        low: Any = build_optimizer(name, {}, make_params(), offloaded=True, moment_dtype=torch.bfloat16)
        assert isinstance(low, host) and low.moment_dtype == torch.bfloat16


@pytest.mark.parametrize(("name", "kind"), [("AdamW", HostAdam), ("Adam", HostAdam), ("Lion", HostLion)])
def test_native_kernels_are_used_where_they_are_there(name: str, kind: type, monkeypatch: pytest.MonkeyPatch) -> None:
    native_here = library() is not None
    assert isinstance(build_optimizer(name, {}, make_params()), kind) is native_here
    assert not isinstance(build_optimizer(name, {"foreach": False}, make_params()), kind)
    assert not isinstance(build_optimizer(name, {}, make_params(), device_type="cuda"), kind)
    assert isinstance(build_optimizer(name, {}, make_params(), device_type="cuda", offloaded=True), kind) is native_here
    monkeypatch.setenv("HF_ZERO_NATIVE", "0")
    assert not isinstance(build_optimizer(name, {}, make_params()), kind)


@pytest.mark.parametrize("config", [{"torch_adam": True}, {"amsgrad": True}, {"maximize": True}])
def test_torch_does_what_it_alone_can(config: dict[str, bool]) -> None:
    assert type(build_optimizer("AdamW", config, make_params())) is torch.optim.AdamW


@pytest.mark.parametrize(("name", "fused"), [("AdamW", True), ("Adam", True), ("SGD", True), ("Adagrad", True), ("RMSprop", False)])
def test_fused_where_torch_has_it_else_foreach(name: str, fused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ZERO_NATIVE", "0")
    group = build_optimizer(name, {}, make_params(), device_type="cpu").param_groups[0]
    assert bool(group.get("fused")) is fused
    assert bool(group.get("foreach")) is not fused


def test_cuda_fuses_adam_but_not_adagrad() -> None:
    assert build_optimizer("AdamW", {}, make_params(), device_type="cuda").defaults["fused"] is True
    adagrad = build_optimizer("Adagrad", {}, make_params(), device_type="cuda").defaults
    assert (adagrad["fused"], adagrad["foreach"]) == (None, True)


@pytest.mark.parametrize("choice", [{"fused": False}, {"foreach": False}, {"foreach": True}])
def test_users_choice_of_kernels_is_kept(choice: dict[str, bool]) -> None:
    defaults = build_optimizer("AdamW", choice, make_params()).defaults
    assert {key: defaults[key] for key in choice} == choice
    assert not defaults["fused"]


def test_parameters_that_fused_refuses_get_foreach() -> None:
    meta = [torch.nn.Parameter(torch.empty(4, device="meta"))]
    assert build_optimizer("AdamW", {}, meta).defaults["foreach"] is True


# --- our own two optimizers ---


def test_lion_against_the_papers_algorithm() -> None:
    lr, beta1, beta2, decay = 0.01, 0.9, 0.99, 0.1
    params = make_params()
    expected, momenta = [p.detach().clone() for p in params], [torch.zeros_like(p) for p in params]
    generator = torch.Generator().manual_seed(2)
    for _ in range(4):
        for i, param in enumerate(expected):
            grad = torch.randn(param.shape, generator=generator)
            update = torch.sign(beta1 * momenta[i] + (1 - beta1) * grad)
            expected[i] = param - lr * (update + decay * param)
            momenta[i] = beta2 * momenta[i] + (1 - beta2) * grad
    config = {"lr": lr, "betas": [beta1, beta2], "weight_decay": decay}
    assert_same(built("Lion", config), expected)


@pytest.mark.parametrize("adam_w_mode", [True, False])
def test_bias_correction_false_against_written_out_adam(adam_w_mode: bool) -> None:
    lr, beta1, beta2, eps, decay = 0.01, 0.8, 0.95, 1e-6, 0.2
    expected = [p.detach().clone() for p in make_params()]
    firsts, seconds = [torch.zeros_like(p) for p in expected], [torch.zeros_like(p) for p in expected]
    generator = torch.Generator().manual_seed(2)
    for _ in range(4):
        for i, param in enumerate(expected):
            grad = torch.randn(param.shape, generator=generator)
            if not adam_w_mode:
                grad = grad + decay * param
            firsts[i] = beta1 * firsts[i] + (1 - beta1) * grad
            seconds[i] = beta2 * seconds[i] + (1 - beta2) * grad**2
            update = firsts[i] / (seconds[i].sqrt() + eps)
            expected[i] = param - lr * (update + (decay * param if adam_w_mode else 0))
    config = {"lr": lr, "betas": [beta1, beta2], "eps": eps, "weight_decay": decay, "adam_w_mode": adam_w_mode}
    actual = built("Adam", config | {"bias_correction": False, "fused": True})
    assert_same(actual, expected)
    assert differ(actual, built("Adam", config))


@pytest.mark.parametrize("kind", [Lion, UncorrectedAdam])
def test_foreach_equals_one_by_one_bitwise(kind: Any) -> None:
    together, single = plain(kind, weight_decay=0.1), plain(kind, weight_decay=0.1, foreach=False)
    assert all(torch.equal(one, other) for one, other in zip(together, single, strict=True))


@pytest.mark.parametrize("kind", [Lion, UncorrectedAdam])
def test_own_optimizers_fit_the_torch_protocol(kind: Any) -> None:
    params = make_params()
    optimizer = kind(params, lr=0.1)
    train(optimizer, params, 2)
    other_params = [torch.nn.Parameter(param.detach().clone()) for param in params]
    other = kind(other_params, lr=0.3)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))  # torch shares the tensors otherwise
    assert_same(train(other, other_params), train(optimizer, params))
    # mixed dtypes in one group, a parameter without gradient, a closure, maximisation
    mixed = [torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16)), torch.nn.Parameter(torch.ones(1))]
    up = kind(mixed, lr=0.1, maximize=True)

    def closure() -> float:
        loss = mixed[0].sum() + mixed[1].float().sum()
        loss.backward()
        return loss.item()

    assert up.step(closure) == 6.0
    assert mixed[0].min() > 1
    assert mixed[1].min() > 1
    assert mixed[2].item() == 1.0
    assert mixed[1].dtype == up.state[mixed[1]]["exp_avg"].dtype == torch.bfloat16
    mixed[2].grad = torch.ones(1).to_sparse()
    with pytest.raises(UnsupportedError, match="sparse gradient"):
        up.step()


# --- refusals ---


@pytest.mark.parametrize(
    ("name", "config", "message"),
    [
        ("AdmaW", {}, r"optimizer\.type is 'AdmaW'.*Did you mean 'AdamW'\?.*Lion.*SGD"),
        ("AdamW", {"learning_rate": 1}, r"optimizer\.params\.learning_rate is not a parameter of AdamW.*Allowed:.*adam_w_mode"),
        ("AdamW", {"beta": [0.9, 0.9]}, r"Did you mean optimizer\.params\.betas"),
        ("Lion", {"eps": 1e-8}, r"optimizer\.params\.eps is not a parameter of Lion"),
        ("SGD", {"momentun": 0.9}, r"Did you mean optimizer\.params\.momentum"),
        ("Adam", {"max_grad_norm": 0.5}, r'optimizer\.params\.max_grad_norm.*"gradient_clipping": 0\.5'),
        ("Adam", {"lr": "auto"}, r'optimizer\.params\.lr is still "auto"'),
        ("Adam", {"lr": "fast"}, r"\{'lr': 'fast'.* does not fit (AdamW|HostAdam)"),
        ("Adam", {"betas": [0.9, 1.5]}, r"does not fit (AdamW|HostAdam): .*1\.5"),
        ("Adam", {"bias_correction": "no"}, r"optimizer\.params\.bias_correction is 'no'; true or false"),
        ("Lion", {"lr": -1}, r"does not fit (Host)?Lion: lr is -1; it must be at least 0"),
        ("Lion", {"betas": [0.9]}, r"does not fit (Host)?Lion: betas is \(0\.9,\)"),
        ("Adam", {"bias_correction": False, "eps": -1}, r"does not fit (UncorrectedAdam|HostAdam): eps is -1"),
    ],
)
def test_mistakes_name_key_value_and_remedy(name: str, config: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_optimizer(name, config, make_params())


@pytest.mark.parametrize(
    ("name", "config", "message"),
    [
        ("ZeroOneAdam", {}, 'ZeroOneAdam.*use "OneBitAdam"'),
        ("OneBitLamb", {}, 'OneBitLamb.*use "Lamb", or "OneBitAdam"'),
        ("MuAdamW", {}, "mup"),
        ("LBFGS", {}, "inner products"),
        ("SparseAdam", {}, "sparse"),
        ("Adam", {"bias_correction": False, "amsgrad": True}, "bias_correction false and amsgrad true"),
        ("Adagrad", {"amsgrad": True}, "amsgrad is true, which Adagrad does not have"),
    ],
)
def test_what_is_not_provided_names_the_alternative(name: str, config: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        build_optimizer(name, config, make_params())


def test_no_parameters() -> None:
    with pytest.raises(ConfigError, match="got no parameters"):
        build_optimizer("AdamW", {}, [])


def test_user_config_is_not_changed() -> None:
    config = {"lr": "1e-3", "torch_adam": True, "betas": [0.9, 0.99]}
    build_optimizer("AdamW", config, make_params())
    assert config == {"lr": "1e-3", "torch_adam": True, "betas": [0.9, 0.99]}
