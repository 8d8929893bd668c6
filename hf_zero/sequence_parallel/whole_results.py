"""Results of a forward over parts of sequences that need whole ones: logits of chosen tokens, and losses that are no mean over labels."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hf_zero.sequence_parallel.batches import IGNORED, Batch

KEPT = ("logits_to_keep", "num_logits_to_keep")  # arguments of transformers that choose the tokens with logits; the second is older
_SHIFTED = ("labels", "shift_labels")
_OF_LIBRARY = "transformers.loss."


def tokens_to_keep(given: Batch, names: list[str]) -> int | torch.Tensor | None:
    """Remove the argument that selects tokens for logits from ``given``, and return it; None selects all tokens.

    Args:
        given: Arguments of a forward, by name; changed in place.
        names: Arguments that the forward has.
    """
    found = [given.pop(name) for name in KEPT if name in names and name in given]
    return next((kept for kept in found if isinstance(kept, torch.Tensor) or kept), None)


def keep_tokens(output: Any, kept: int | torch.Tensor) -> Any:
    """Return ``output``, whose logits are those of whole sequences, with the logits of some tokens: the last ones, or those of indices."""
    chosen = slice(-kept, None) if isinstance(kept, int) else kept
    if isinstance(output, tuple):
        return output[0][:, chosen], *output[1:]
    output["logits"] = output["logits"][:, chosen]
    return output


@dataclass(frozen=True)
class WholeLoss:
    """A loss that is no sum over parts of sequences: every rank computes it from the logits of whole sequences.

    Attributes:
        function: The model's ``loss_function``.
        vocab_size: Tokens of the vocabulary.
        arguments: Labels of whole sequences, and the script's arguments of the function.
    """

    function: Callable[..., torch.Tensor]
    vocab_size: int
    arguments: Mapping[str, Any]

    def add_to(self, output: Any) -> Any:
        """Return ``output``, which has the logits of whole sequences, with its loss added."""
        logits = output[0] if isinstance(output, tuple) else output["logits"]
        loss = self.function(logits=logits, vocab_size=self.vocab_size, **self.arguments)
        return (loss, *output) if isinstance(output, tuple) else type(output)(**{"loss": loss, **output})


def whole_loss_of(model: nn.Module, given: Batch) -> WholeLoss | None:
    """Return the loss of a forward if it is not the mean over labels that parts of sequences make up; else None.

    It is not where a script has put a ``loss_function`` of its own into a transformers model, or passes another ``ignore_index``.
    """
    inside: Any = getattr(model, "get_base_model", None)
    base: Any = model if inside is None else inside()
    code = getattr(inspect.unwrap(type(base).forward), "__code__", None)
    if given.get("labels") is None or code is None or "loss_function" not in code.co_names:
        return None
    function, own = base.loss_function, inspect.signature(base.forward).parameters
    is_shared = getattr(function, "__module__", "").startswith(_OF_LIBRARY)
    if is_shared and given.get("ignore_index", IGNORED) == IGNORED:
        return None
    arguments = {name: value for name, value in given.items() if name not in own or name in _SHIFTED}
    return WholeLoss(function, base.config.get_text_config().vocab_size, arguments)


def without_labels(given: Batch) -> Batch:
    """Return the arguments of a forward that computes logits alone."""
    return {name: value for name, value in given.items() if name not in _SHIFTED}
