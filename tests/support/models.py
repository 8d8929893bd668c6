"""Tiny models with batches: every architecture of the parity matrix, and plain modules for single cases.

A ``ModelCase`` promises that the mean of the ranks' losses is the loss on their concatenated batch: rows have equal
length, no label is ignored, and dropout is 0.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests import pretend
from tests.support import ranks

VOCAB = 64
LENGTH = 8
CLASSES = 4
PIXELS = 8
SIZE = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
Batch = dict[str, Tensor]


@dataclass(frozen=True)
class ModelCase:
    """A model, its builder and its batches. ``batch(seed, rows)`` is the same on every rank and machine."""

    name: str
    make: Callable[[], nn.Module]
    batch: Callable[[torch.Generator, int], Batch]
    forward: Callable[[nn.Module, Batch], Tensor] = lambda model, batch: model(**batch).loss

    def build(self, seed: int = 0) -> nn.Module:
        """Return the model with weights that depend on ``seed`` only, in training mode."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return self.make().train()

    def rows(self, *seed: int, rows: int = 2) -> Batch:
        """Return the batch of ``rows`` rows for a seed such as (step, micro-step, rank), on the ranks' device."""
        generator = torch.Generator().manual_seed(hash(tuple(seed)) % (2**31))
        return {name: value.to(ranks.device()) for name, value in self.batch(generator, rows).items()}


def concatenate(batches: list[Batch]) -> Batch:
    """Join batches row-wise."""
    return {name: torch.cat([batch[name] for batch in batches]) for name in batches[0]}


def cast_floats(batch: Batch, dtype: torch.dtype) -> Batch:
    """Cast floating inputs (pixels) to ``dtype``; token ids and labels stay."""
    return {name: value.to(dtype) if value.is_floating_point() else value for name, value in batch.items()}


# ------------------------------------------------------------------------------------------------ batches


def _tokens(generator: torch.Generator, rows: int) -> Tensor:
    return torch.randint(3, VOCAB, (rows, LENGTH), generator=generator)  # 0-2: padding and other special tokens


def _causal(generator: torch.Generator, rows: int) -> Batch:
    tokens = _tokens(generator, rows)
    return {"input_ids": tokens, "labels": tokens.clone()}


def _sequence_to_sequence(generator: torch.Generator, rows: int) -> Batch:
    return {"input_ids": _tokens(generator, rows), "labels": _tokens(generator, rows)}


def _text_classes(generator: torch.Generator, rows: int) -> Batch:
    return {"input_ids": _tokens(generator, rows), "labels": torch.randint(0, CLASSES, (rows,), generator=generator)}


def _images(generator: torch.Generator, rows: int) -> Batch:
    pixels = torch.randn(rows, 3, PIXELS, PIXELS, generator=generator)
    return {"pixel_values": pixels, "labels": torch.randint(0, CLASSES, (rows,), generator=generator)}


def _vectors(generator: torch.Generator, rows: int) -> Batch:
    return {
        "inputs": torch.randn(rows, LENGTH, generator=generator),
        "labels": torch.randint(0, CLASSES, (rows,), generator=generator),
    }


# ------------------------------------------------------------------------------------------------ transformers


def _gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=VOCAB, n_positions=32, n_embd=16, n_layer=2, n_head=2, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    return GPT2LMHeadModel(config)


def _llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCAB, num_key_value_heads=1, tie_word_embeddings=False, **SIZE))


def _t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(vocab_size=VOCAB, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2, dropout_rate=0.0, decoder_start_token_id=0)
    return T5ForConditionalGeneration(config)


def _bart() -> nn.Module:
    from transformers import BartConfig, BartForConditionalGeneration

    return BartForConditionalGeneration(_bart_like(BartConfig))


def _blenderbot() -> nn.Module:
    from transformers import BlenderbotConfig, BlenderbotForConditionalGeneration

    return BlenderbotForConditionalGeneration(_bart_like(BlenderbotConfig))


def _bart_like(config: Any) -> Any:
    sides = {
        f"{side}_{key}": value for side in ("encoder", "decoder") for key, value in (("layers", 2), ("ffn_dim", 32), ("attention_heads", 2))
    }
    return config(vocab_size=VOCAB, max_position_embeddings=32, d_model=16, dropout=0.0, **sides)


def _albert() -> nn.Module:
    from transformers import AlbertConfig, AlbertForSequenceClassification

    config = AlbertConfig(
        vocab_size=VOCAB, embedding_size=8, max_position_embeddings=32, num_labels=CLASSES, classifier_dropout_prob=0.0,
        **{**SIZE, "num_hidden_layers": 3}, **NO_DROPOUT,
    )  # fmt: skip
    return AlbertForSequenceClassification(config)


def _mixtral() -> nn.Module:
    from transformers import MixtralConfig, MixtralForCausalLM

    # transformers' default counts integers by a histogram on a device; the pretended device computes on the CPU, which counts floats only.
    experts = {"experts_implementation": "batched_mm"} if pretend.loaded() else {}
    return MixtralForCausalLM(MixtralConfig(vocab_size=VOCAB, num_key_value_heads=1, num_local_experts=4, **SIZE, **experts))


def _deberta_v2() -> nn.Module:
    from transformers import DebertaV2Config, DebertaV2ForSequenceClassification

    config = DebertaV2Config(
        vocab_size=VOCAB, max_position_embeddings=32, num_labels=CLASSES, relative_attention=True, pos_att_type=["p2c", "c2p"],
        position_biased_input=False, **SIZE, **NO_DROPOUT,
    )  # fmt: skip
    return DebertaV2ForSequenceClassification(config)


def _vit() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    return ViTForImageClassification(ViTConfig(image_size=PIXELS, patch_size=4, num_labels=CLASSES, **SIZE, **NO_DROPOUT))


# ------------------------------------------------------------------------------------------------ plain modules


class Block(nn.Module):
    """Residual two-layer block: the repeated unit of the plain models."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.down(torch.tanh(self.up(hidden)))


class Mlp(nn.Module):
    """Linear in, a list of blocks, linear out. ``odd`` adds parameters of no element and of one element."""

    def __init__(self, width: int = 16, blocks: int = 3, odd: bool = False) -> None:
        super().__init__()
        self.entry = nn.Linear(LENGTH, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.head = nn.Linear(width, CLASSES)
        if odd:
            self.scale = nn.Parameter(torch.ones(1))
            self.nothing = nn.Parameter(torch.empty(0))

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.entry(inputs)
        for block in self.blocks:
            hidden = block(hidden)
        logits = self.head(hidden)
        return logits * self.scale + self.nothing.sum() if hasattr(self, "scale") else logits


class TiedCoder(nn.Module):
    """Encoder and decoder blocks around one embedding, which serves both sides and the output."""

    def __init__(self, width: int = 16, blocks: int = 2) -> None:
        super().__init__()
        self.encoder = nn.ModuleDict({"embed": nn.Embedding(VOCAB, width), "blocks": nn.ModuleList(Block(width) for _ in range(blocks))})
        self.decoder = nn.ModuleDict({"embed": nn.Embedding(VOCAB, width), "blocks": nn.ModuleList(Block(width) for _ in range(blocks))})
        self.head = nn.Linear(width, VOCAB, bias=False)
        self.decoder["embed"].weight = self.encoder["embed"].weight
        self.head.weight = self.encoder["embed"].weight

    def forward(self, input_ids: Tensor) -> Tensor:
        memory = self.encoder["embed"](input_ids)
        for block in self.encoder["blocks"]:
            memory = block(memory)
        hidden = self.decoder["embed"](input_ids) + memory.mean(dim=1, keepdim=True)
        for block in self.decoder["blocks"]:
            hidden = block(hidden)
        return self.head(hidden)


class ConvNet(nn.Module):
    """Convolutions without batch statistics, which would depend on each rank's part of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.stages = nn.Sequential(*(nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.ReLU()) for _ in range(2)))
        self.head = nn.Linear(8, CLASSES)

    def forward(self, pixel_values: Tensor) -> Tensor:
        return self.head(self.stages(self.stem(pixel_values)).mean(dim=(2, 3)))


def class_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Return the cross-entropy of a plain model's logits, in fp32 for a model of any dtype."""
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    logits = model(*inputs.values()).float()
    return functional.cross_entropy(logits.reshape(-1, logits.shape[-1]), batch["labels"].reshape(-1))


MATRIX = ("gpt2", "llama", "t5", "bart", "albert", "mixtral", "deberta_v2", "blenderbot", "vit")
CASES: dict[str, ModelCase] = {
    case.name: case
    for case in (
        ModelCase("gpt2", _gpt2, _causal),
        ModelCase("llama", _llama, _causal),
        ModelCase("t5", _t5, _sequence_to_sequence),
        ModelCase("bart", _bart, _sequence_to_sequence),
        ModelCase("albert", _albert, _text_classes),
        ModelCase("mixtral", _mixtral, _causal),
        ModelCase("deberta_v2", _deberta_v2, _text_classes),
        ModelCase("blenderbot", _blenderbot, _sequence_to_sequence),
        ModelCase("vit", _vit, _images),
        ModelCase("mlp", Mlp, _vectors, class_loss),
        ModelCase("odd_mlp", lambda: Mlp(odd=True), _vectors, class_loss),
        ModelCase("tied_coder", TiedCoder, _sequence_to_sequence, class_loss),
        ModelCase("conv", ConvNet, _images, class_loss),
    )
}


# Messages of the vote before each update, 4 each: a digest of equal values, twice, whether gradients were written, a signal, waiting
# gradients, whether buffers were written, and whether parameters were.
STEP_VOTE_BYTES = 28


class TwoBlocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])
        self.head = nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return self.head(x).mean()
