"""Inputs of a forward whose layers are cut: whole sequences for the modules before the layers, slices or whole sequences for the loss."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn

from hf_zero.errors import StateError, UnsupportedError
from hf_zero.observe import warn_once
from hf_zero.sequence_parallel.attention import SlicedAttention
from hf_zero.sequence_parallel.batches import cache_in, counted_by_adapter, is_medium, labels_behind
from hf_zero.sequence_parallel.cut_layers import CutLayers
from hf_zero.sequence_parallel.joining import cut, join
from hf_zero.sequence_parallel.token_flow import TokenFlow, without_cache
from hf_zero.system.trees import argument_names

_TOKENS = ("input_ids", "inputs_embeds")
_LOSS = ("labels", "shift_labels")
_SHARED_LOSS = "ForCausalLMLoss"  # transformers' own, which takes labels that were shifted before


class WholeInputs:
    """Conversion of the arguments and the result of a model's forward whose layers run on slices.

    Attributes:
        layers: The hooks inside.
    """

    def __init__(self, model: nn.Module, attention: SlicedAttention, flow: TokenFlow) -> None:
        self._model = model
        self._collectives = attention.collectives
        self._names = argument_names(model)
        self._no_cache = without_cache(model)
        self._attention = attention
        base: Any = model
        if hasattr(model, "get_base_model"):
            base = base.get_base_model()
        self._own_loss = _own_loss(base)
        self._why_whole = flow.tail or self._own_loss
        self._takes_positions = "position_ids" in inspect.signature(base.forward).parameters
        if self._why_whole and flow.last_calls > 1:
            raise UnsupportedError(
                f"sequence parallelism: after its layers {type(base).__name__} needs whole sequences ({self._why_whole}), which are joined "
                f"after the last layer, {flow.last}; but one forward calls this layer {flow.last_calls} times, and one call is allowed. "
                "Remove sequence_parallel_size for this model"
            )
        self.layers = CutLayers(model, attention, flow, bool(self._why_whole))
        _tell_cost(type(base).__name__, flow, self._why_whole)

    def remove(self) -> None:
        """Take the hooks off."""
        self.layers.remove()

    def enter(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments of a forward with whole sequences; collective.

        Raises:
            StateError: Labels or positions of slices cannot be made whole.
            UnsupportedError: An argument is not provided for.
        """
        given = {**dict(zip(self._names, args, strict=False)), **kwargs}
        first = next((given[name] for name in _TOKENS if given.get(name) is not None), None)
        if not isinstance(first, torch.Tensor):
            raise StateError("sequence parallelism: the forward got neither input_ids nor inputs_embeds")
        if given.get("encoder_hidden_states") is not None:
            raise UnsupportedError("sequence parallelism: attention over an encoder's states is not supported")
        if cache_in(given) is not None:
            raise UnsupportedError(
                "sequence parallelism: a forward over slices cannot continue from a cache (past_key_values); leave it out"
            )
        length = first.shape[1]
        self._attention.inside_whole = 0
        self._attention.length = length * self._collectives.world
        for name, value in given.items():
            if name in _LOSS or name == "position_ids" or is_medium(name) or not isinstance(value, torch.Tensor) or value.dim() < 2:
                continue
            if value.shape[1] != length:
                raise UnsupportedError(
                    f"sequence parallelism: {name} has shape {tuple(value.shape)}, and this rank's slices have {length} tokens: give each "
                    "rank its slice (batch, tokens, ...) of it; masks of four dimensions are not supported"
                )
            given[name] = join(self._collectives, value, 1)
        given.update(self._no_cache)  # of slices it would be of no use
        self._set_positions(given)
        self._set_labels(given)
        return (), given

    def leave(self, output: Any) -> Any:
        """Return the result of the forward, with logits of the slice."""
        logits = getattr(output, "logits", None)
        if isinstance(logits, torch.Tensor) and logits.dim() == 3 and logits.shape[1] == self.layers.length:
            output["logits"] = cut(self._collectives, logits, 1)
        return output

    def _set_positions(self, given: dict[str, Any]) -> None:
        """Leave positions to the model where an adapter has counted them, or where it counts for itself."""
        positions = given.pop("position_ids", None)
        if positions is None or counted_by_adapter(positions):
            return
        whole = join(self._collectives, positions, positions.dim() - 1)
        if self._takes_positions:
            given["position_ids"] = whole
        elif not torch.equal(whole, torch.arange(whole.shape[-1], device=whole.device).expand_as(whole)):
            raise StateError(
                f"sequence parallelism: {type(self._model).__name__} takes no position_ids, and those of this batch are not 0, 1, 2, ...: "
                "attention would mix packed samples. Pass one sample per row"
            )

    def _set_labels(self, given: dict[str, Any]) -> None:
        """Set the labels that the loss can use: shifted labels of the slice, or the labels of whole sequences."""
        if not self._why_whole:
            return
        if not self._own_loss:  # the loss that all share takes labels that were shifted before
            given.update({name: join(self._collectives, given[name], 1) for name in _LOSS if given.get(name) is not None})
            return
        shifted, labels = given.pop("shift_labels", None), given.pop("labels", None)
        if labels is None:
            return
        behind = next((found for found in map(labels_behind, (shifted, labels)) if found is not None), None)
        if behind is None:
            raise StateError(
                f"sequence parallelism: {type(self._model).__name__} computes its loss from whole sequences ({self._why_whole}), and the "
                "labels of this slice, which were shifted before, do not tell those. Pass shift_labels of UlyssesSPDataLoaderAdapter "
                "(accelerate uses it in prepare) as they are, or compute the loss from the logits"
            )
        given["labels"] = join(self._collectives, behind, 1)


def _own_loss(model: nn.Module) -> str:
    """Return why the loss cannot be computed from slices; "" where it is the one that all causal models share."""
    signature = inspect.signature(model.forward)
    passes = any(parameter.kind is parameter.VAR_KEYWORD for parameter in signature.parameters.values())
    code = getattr(inspect.unwrap(type(model).forward), "__code__", None)
    names = code.co_names if code is not None else ()
    shared = getattr(getattr(model, "loss_function", None), "__name__", "") == _SHARED_LOSS
    return "" if passes and "loss_function" in names and shared else "it has a loss of its own"


def _tell_cost(name: str, flow: TokenFlow, tail: str) -> None:
    """Say once which modules compute with whole sequences on every rank."""
    kinds = sorted({path.rpartition(".")[2] for path in flow.mixers})
    parts = [f"{', '.join(kinds)} ({next(iter(flow.reasons.values()))})"] if kinds else []
    parts += [f"the head and the loss ({tail})"] if tail else []
    if parts:
        warn_once(
            f"sequence parallelism: every rank computes {' and '.join(parts)} of {name} for whole sequences: exact, but memory and time "
            "of these parts are not divided"
        )
