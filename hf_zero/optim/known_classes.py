"""Tables of optimizer classes: element-wise ones, those that need whole tensors or all of them, and those that cannot run."""

from __future__ import annotations

import torch

from hf_zero.ops import HostAdagrad, HostAdam, HostLion, HostSGD
from hf_zero.optim.lion import Lion
from hf_zero.optim.onebit_adam import OneBitAdam
from hf_zero.optim.uncorrected_adam import UncorrectedAdam

ELEMENTWISE: frozenset[type] = frozenset(
    {
        torch.optim.Adadelta,
        torch.optim.Adagrad,
        torch.optim.Adam,
        torch.optim.AdamW,
        torch.optim.Adamax,
        torch.optim.ASGD,
        torch.optim.NAdam,
        torch.optim.RAdam,
        torch.optim.RMSprop,
        torch.optim.Rprop,
        torch.optim.SGD,
        HostAdagrad,
        HostAdam,
        HostLion,
        HostSGD,
        Lion,
        OneBitAdam,
        UncorrectedAdam,
    }
)

# Lower-case class name -> why. Names rather than classes, so that no third-party library is imported to recognise a class.
WHOLE_TENSOR: dict[str, str] = {
    "adafactor": "it factors the second moment into rows and columns of whole matrices",
    "came": "it factors the second moment into rows and columns of whole matrices",
    "distributedshampoo": "it preconditions whole matrices",
    "shampoo": "it preconditions whole matrices",
    "soap": "it preconditions whole matrices",
    "muon": "it orthogonalises whole matrices",
    "muonwithauxadam": "it orthogonalises whole matrices",
    "lamb": "it scales each update by the norms of the whole parameter",
    "fusedlamb": "it scales each update by the norms of the whole parameter",
    "lars": "it scales each update by the norms of the whole parameter",
    "fusednovograd": "it keeps one second moment per whole parameter",
    "novograd": "it keeps one second moment per whole parameter",
    "adamp": "it projects updates by the directions of whole rows and parameters",
    "sgdp": "it projects updates by the directions of whole rows and parameters",
    "adam_mini": "it keeps one second moment per block of a whole parameter",
    "adammini": "it keeps one second moment per block of a whole parameter",
    "galoreadamw": "it projects whole gradient matrices",
    "galoreadafactor": "it projects whole gradient matrices",
    "apolloadamw": "it projects whole gradient matrices",
}
ALL_TENSORS: dict[str, str] = {
    "prodigy": "it estimates its step size from norms over all parameters",
    "dadaptadam": "it estimates its step size from norms over all parameters",
    "dadaptadanip": "it estimates its step size from norms over all parameters",
    "dadaptlion": "it estimates its step size from norms over all parameters",
    "dadaptsgd": "it estimates its step size from norms over all parameters",
}
REFUSED: dict[str, str] = {
    "lbfgs": "it takes inner products over all parameters and evaluates the loss several times a step",
    "sparseadam": "it needs sparse gradients, and flat units have dense ones",
    "lomo": "it updates parameters inside backward, before gradients are reduced",
    "lorafaoptimizer": "it pairs each lora_B with the frozen lora_A before it in a param group, and the engine's groups have no frozen "
    "parameters (LoRA+, which is peft.optimizers.create_loraplus_optimizer, trains here)",
    "adalomo": "it updates parameters inside backward, before gradients are reduced",
}
_QUANTIZED = "it quantizes its state in blocks of a whole parameter"
_QUANTIZED_SUFFIXES = ("8bit", "4bit", "fp8")
_SETTINGS = "it looks for settings of single parameters in each step (bitsandbytes' GlobalOptimManager), also with states in 32 bits"


def whole_tensor_reason(kind: type, bits: int = 8) -> str | None:
    """Return the reason why a class is known to need whole tensors; None for other classes.

    Args:
        kind: The class.
        bits: Bits of each number in its states, for classes that quantize: bitsandbytes derives those with 32 bits from ``Optimizer8bit``.
    """
    quantizes = any(ancestor.__name__.lower().endswith(_QUANTIZED_SUFFIXES) for ancestor in kind.__mro__)
    return named(kind, WHOLE_TENSOR) or ((_QUANTIZED if bits < 32 else _SETTINGS) if quantizes else None)


def refused_reason(kind: type) -> str | None:
    """Return the reason why a class cannot run at any stage; None for other classes."""
    return named(kind, REFUSED)


def named(kind: type, reasons: dict[str, str]) -> str | None:
    """Return the entry of a table for the class or a base of it, by name; None if there is none."""
    names = (ancestor.__name__.lower() for ancestor in kind.__mro__)
    return next((reasons[name] for name in names if name in reasons), None)
