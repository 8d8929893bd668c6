"""Find out how the losses of parts make up that of a batch: the first batch runs whole and in parts, and the losses are compared.

[Note: losses of parts] Some losses are means over tokens, others over samples, and some (a mixture's load balance) are no mean at all. So
the first batch runs whole and in parts, with some labels of the first part masked, and the way whose result agrees is taken. Losses of an
untrained model are alike, so every way nearly gives their mean; their gradients differ as the weights of the parts do. So the gradients
of the loss with respect to the results of the last stage's items are compared too. Where no way agrees, batches run whole: the result is
exact, and stages do not overlap.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hf_zero.pipeline import micro_batches
from hf_zero.pipeline.micro_batches import IGNORED

_POSITIONS = ("start_positions", "end_positions")  # of answers; transformers ignores those behind the sequence


@dataclass(frozen=True)
class Trial:
    """A forward without dropout on the last stage.

    Attributes:
        result: The result of the model.
        gradients: Gradients of the loss with respect to the floating-point results of the stage's items; None for those that it does not
            depend on. Empty without a loss.
    """

    result: Any
    gradients: Sequence[torch.Tensor | None] = ()

    @classmethod
    def of(cls, result: Any, probes: Sequence[torch.Tensor]) -> Trial:
        """Return the trial with ``result``, which was computed from ``probes``, the results of items."""
        loss = micro_batches.loss_of(result)
        if loss is None or not probes or not loss.requires_grad:
            return cls(result)
        return cls(result, torch.autograd.grad(loss, list(probes), allow_unused=True))


@dataclass(frozen=True)
class Closeness:
    """Largest relative differences that rounding may make.

    Attributes:
        loss: Of the loss.
        weight: Of the length of a part's gradient along the batch's.
        gradient: Of a part's gradient from the batch's, as vectors.
    """

    loss: float
    weight: float
    gradient: float


EXACT = Closeness(3e-5, 2e-3, 2e-2)
ROUNDED = Closeness(1e-3, 1e-2, 0.3)  # 16-bit or TF32 arithmetic


def closeness_for(model: nn.Module, autocast: bool) -> Closeness:
    """Return the differences that rounding makes in ``model``; the same on every rank."""
    narrow = any(param.is_floating_point() and param.dtype not in (torch.float32, torch.float64) for param in model.parameters())
    return ROUNDED if autocast or narrow or torch.get_float32_matmul_precision() != "highest" else EXACT


def matching_weights(
    whole: Trial, parts: Sequence[Trial], given: Sequence[Mapping[str, Any]], ways: Sequence[str], close: Closeness
) -> str | None:
    """Return the entry of ``micro_batches.WEIGHTS`` by which the losses of parts make up the batch's loss; None if no way is right.

    Args:
        whole: The batch's trial.
        parts: The trials of its parts.
        given: Arguments of each part.
        ways: The entries to compare.
        close: Differences that rounding may make.
    """
    expected = micro_batches.loss_of(whole.result)
    if expected is None:
        return "samples"
    errors: dict[str, tuple[float, float]] = {}
    for how in ways:  # several may agree: take the nearest
        weights = micro_batches.weights_of(given, how)
        loss = micro_batches.loss_of(micro_batches.merge([part.result for part in parts], weights))
        if loss is None or not bool((loss - expected).abs() <= close.loss * expected.abs()):
            continue
        error = max([0.0, *_errors(whole, parts, [float(weight) for weight in weights], close)])
        if error <= 1:
            errors[how] = error, float((loss - expected).abs())
    return min(errors, key=errors.__getitem__, default=None)


def _errors(whole: Trial, parts: Sequence[Trial], weights: Sequence[float], close: Closeness) -> Iterator[float]:
    """Yield the error of each gradient of each part, as a share of the tolerance of ``close``."""
    for place, gradient in enumerate(whole.gradients):
        found = [part.gradients[place] if place < len(part.gradients) else None for part in parts]
        shaped = next((one for one in (gradient, *found) if one is not None), None)
        if shaped is None or shaped.dim() == 0:
            continue
        rows = [one.shape[0] for one in found if one is not None]
        if gradient is not None and rows and sum(rows) != gradient.shape[0]:
            continue  # an item's result without a row per sample
        first = 0
        for one, weight in zip(found, weights, strict=True):
            count = rows[0] if rows else shaped.shape[0] // len(parts)
            yield _error(None if gradient is None else gradient[first : first + count], one if weight else None, weight, close)
            first += count


def _error(expected: torch.Tensor | None, found: torch.Tensor | None, weight: float, close: Closeness) -> float:
    of_whole = of_part = between = 0.0
    for row in range(next((one.shape[0] for one in (expected, found) if one is not None), 0)):  # a copy of one row at a time
        left = None if expected is None else expected[row].reshape(-1).float()
        right = None if found is None else found[row].reshape(-1).float() * weight
        of_whole += 0.0 if left is None else float(left.dot(left))
        of_part += 0.0 if right is None else float(right.dot(right))
        between += 0.0 if left is None or right is None else float(left.dot(right))
    if of_whole == 0:
        return 0.0 if of_part == 0 else math.inf
    apart = math.sqrt(max(0.0, of_part - 2 * between + of_whole) / of_whole)
    error = max(abs(between / of_whole - 1) / close.weight, apart / close.gradient)
    return error if error == error else math.inf


def with_uneven_weights(model: nn.Module, given: Mapping[str, Any], count: int) -> Mapping[str, Any]:
    """Return the arguments of the trial, whose parts have other weights in each way of adding up losses; ``given`` itself if nothing in it
    may change.

    Half of the first part's labels are masked where labels are tokens, and one answer is moved behind its sequence. If no part has padding,
    three quarters of the last part's tokens become padding: a loss may be a mean over the tokens that ``attention_mask`` keeps.

    A model of a script may not know ``IGNORED``. On an accelerator an unknown label would end the process, so labels of such a model change
    only if they have some already.
    """
    found: dict[str, torch.Tensor] = {}
    labels, tokens, kept = given.get("labels"), given.get("input_ids"), given.get("attention_mask")
    if isinstance(labels, torch.Tensor) and not labels.is_floating_point() and labels.dim() > 1 and given.get("num_items_in_batch") is None:
        found["labels"] = labels.clone()
        found["labels"][: labels.shape[0] // count, labels.shape[1] // 2 :] = IGNORED
    if isinstance(tokens, torch.Tensor) and tokens.dim() == 2:
        for name in _POSITIONS:
            if isinstance(positions := given.get(name), torch.Tensor):
                found[name] = positions.clone()
                found[name][0] = tokens.shape[1]
    known = type(model).__module__.startswith("transformers.") or (isinstance(labels, torch.Tensor) and bool((labels == IGNORED).any()))
    if not known and any(value.device.type != "cpu" for value in found.values()):
        found = {}
    if isinstance(kept, torch.Tensor) and kept.dim() == 2 and not kept.is_floating_point() and bool((kept == 1).all()):
        found["attention_mask"] = kept.clone()
        found["attention_mask"][-(kept.shape[0] // count) :, max(1, kept.shape[1] // 4) :] = 0
    return {**given, **found} if found else given


@contextmanager
def unchanged(model: nn.Module) -> Iterator[list[str]]:
    """Run a forward of training inside the context without an effect on buffers and random states; the list gets the names of persistent
    buffers that it changed.
    """
    changed: list[str] = []
    places = [(f"{path}.{name}", module, name) for path, module in model.named_modules() for name in persistent_names(module)]
    before = [(module._buffers[name], module._buffers[name]._version) for _, module, name in places]  # type: ignore[union-attr]
    values = [buffer.detach().clone() for buffer, _ in before]  # type: ignore[union-attr]
    devices = sorted({buffer.device.index for buffer in values if buffer.device.type == "cuda"})
    with torch.random.fork_rng(devices=devices):
        yield changed
    with torch.no_grad():
        for (path, module, name), (buffer, version), value in zip(places, before, values, strict=True):
            assert buffer is not None
            if module._buffers[name] is not buffer or buffer._version != version:
                changed.append(path)
                module._buffers[name] = buffer.copy_(value)


def persistent_names(module: nn.Module) -> list[str]:
    """Return the names of the persistent buffers that belong to ``module`` itself."""
    return [name for name, buffer in module._buffers.items() if buffer is not None and name not in module._non_persistent_buffers_set]


def uses_other_samples(model: nn.Module) -> bool:
    """Return whether a layer of ``model`` normalizes with statistics of the batch."""
    norms = (module for module in model.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm))
    return any(norm.training or norm.running_mean is None for norm in norms)
