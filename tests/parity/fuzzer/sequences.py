"""Define the model that scripts train over ranks that divide sequences, its batches, and the loss that each side computes.

The class has a name of transformers, by which hf_zero knows that its loss shifts labels by one token.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed.nn.functional
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.masking_utils import create_causal_mask
from transformers.modeling_outputs import CausalLMOutput
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hf_zero.integrations.ulysses import UlyssesSPAttentionHF
from hf_zero.sequence_parallel.batches import UlyssesSPDataLoaderAdapter
from hf_zero.sequence_parallel.state import SequenceParallel
from tests.parity.fuzzer.grammar import Cell
from tests.parity.fuzzer.model import ROWS, VOCABULARY, WIDTH, Layer, ScriptModel

HEADS = 2
IGNORED = -100


class Attention(nn.Module):
    """Causal attention of two heads that read one key head, as models of transformers call it."""

    def __init__(self) -> None:
        super().__init__()
        width = WIDTH // HEADS
        self.is_causal, self.num_key_value_groups = True, HEADS
        # Without a bias of keys: softmax takes no notice of it, so its gradient is rounding errors, of which Adam makes steps.
        self.query, self.key, self.value = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, width, bias=False), nn.Linear(WIDTH, width)
        self.output = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: Tensor, mask: Tensor | None) -> Tensor:
        parts = [part(hidden).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for part in (self.query, self.key, self.value)]
        attended: Tensor = ALL_ATTENTION_FUNCTIONS["sdpa"](self, *parts, mask)[0]
        return self.output(attended.flatten(2))


class AttendingLayer(Layer):
    """A layer of the fuzzer behind attention."""

    def __init__(self, cell: Cell) -> None:
        super().__init__(cell)
        self.attention = Attention()

    def _first(self, hidden: Tensor, rest: Tensor, mask: Tensor | None = None) -> Tensor:
        hidden = hidden + self.attention(hidden, mask)
        return super()._first(hidden, rest)


class LlamaForCausalLM(ScriptModel):
    """The fuzzer's model with attention and positions."""

    layer = AttendingLayer

    def __init__(self, cell: Cell) -> None:
        super().__init__(cell)
        self.config = LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=WIDTH,
            num_hidden_layers=2,
            num_attention_heads=HEADS,
            num_key_value_heads=1,
            attn_implementation="sdpa",
        )

    def forward(  # type: ignore[override]
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        labels: Tensor | None = None,
        shift_labels: Tensor | None = None,
        pieces: int = 1,
        inputs_embeds: Tensor | None = None,
    ) -> CausalLMOutput:
        hidden = self.embed(input_ids) if inputs_embeds is None else inputs_embeds
        if position_ids is None:
            position_ids = torch.arange(hidden.shape[1]).expand(len(hidden), -1)
        hidden = hidden + (position_ids[..., None] * torch.linspace(0.3, 2, WIDTH)).sin().to(hidden.dtype)
        mask = create_causal_mask(self.config, hidden, attention_mask, past_key_values=None, position_ids=position_ids)
        for block in self.blocks:
            hidden = block(hidden, pieces, mask)
        logits = self.head(hidden).float()
        return CausalLMOutput(None if labels is None else loss_of_logits(logits, labels, shift_labels), logits)

    def generate(self, tokens: Tensor, length: int) -> tuple[Tensor, list[Tensor]]:
        return self.continued(tokens, length, lambda given: self(given).logits)


def loss_of_logits(logits: Tensor, labels: Tensor, shift_labels: Tensor | None = None) -> Tensor:
    """Return the mean loss of all tokens that have a label, each against the label of the next token."""
    if shift_labels is None:
        shift_labels = nn.functional.pad(labels[:, 1:], (0, 1), value=IGNORED)
    return nn.functional.cross_entropy(logits.flatten(0, 1), shift_labels.flatten(), ignore_index=IGNORED)


def batch(data: int, place: int) -> dict[str, Tensor]:
    """Return a batch of whole sequences, the first of which may have padding on the left; no number of ranks divides all lengths."""
    source = torch.Generator().manual_seed(1000 * (place + 1) + data)
    tokens, labels = torch.randint(0, VOCABULARY, (2, ROWS, 6 + data % 4), generator=source)
    mask = torch.ones_like(tokens)
    mask[0, : data % 3] = 0
    labels[:, : 1 + data % 3 * 2] = IGNORED  # of some batches all tokens of the first slice
    return {"input_ids": tokens, "attention_mask": mask, "labels": labels}


def loss_of(model: Any, embed: nn.Module, data: int, place: int) -> Tensor:
    """Return the loss of whole sequences: the model's, or, for odd ``data``, one that the script computes from logits. Of some batches the
    script calls ``embed``, the model's embedding, itself.
    """
    given = batch(data, place)
    pieces = 1 + int(given["input_ids"][0, 0]) % 2
    if data % 5 > 2:
        given["inputs_embeds"] = embed(given.pop("input_ids"))
    if not data % 2:
        loss: Tensor = model(**given, pieces=pieces).loss
        return loss
    labels = given.pop("labels")
    return loss_of_logits(model(**given, pieces=pieces).logits, labels)


def logits_of(model: Any, data: int, place: int) -> Tensor:
    """Return the logits of whole sequences."""
    given = batch(data, place)
    del given["labels"]
    found: Tensor = model(**given).logits
    return found


def register(model: nn.Module, size: int) -> SequenceParallel:
    """Make training forwards of ``model`` forwards over slices; collective."""
    found = UlyssesSPAttentionHF.register_with_transformers(
        model, core_attn_implementation="sdpa", sequence_parallel_size=size, micro_batch_size=ROWS, disable_in_eval=True
    )
    assert found is not None
    return found


def loss_over_slices(model: Any, data: int, place: int, groups: SequenceParallel) -> Tensor:
    """Return the loss of whole sequences, of which each rank of a group has a slice, as the page on sequence parallelism has it."""
    group = groups.get_sequence_parallel_group()
    whole = batch(data, place)
    rank, size = groups.get_sequence_parallel_rank(), groups.get_sequence_parallel_world_size()
    given = next(iter(UlyssesSPDataLoaderAdapter([whole], rank, group, size, torch.device("cpu"))))
    labels = given["shift_labels"]
    loss = model(**given, labels=labels, pieces=1 + int(whole["input_ids"][0, 0]) % 2).loss
    tokens = (labels != IGNORED).sum()
    losses = torch.stack(torch.distributed.nn.functional.all_gather(loss, group=group))
    counts = torch.stack(torch.distributed.nn.functional.all_gather(tokens, group=group))
    return (torch.where(counts > 0, losses, 0.0) * counts).sum() / counts.sum().clamp(min=1)
