"""Inputs of fine-tuning scripts at toy size: a chat model with its tokenizer, a reward model, and data sets under the scripts' names."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

WORDS = 53
_SPECIAL = ["<pad>", "<unk>", "<|im_start|>", "<|im_end|>", "<s>", "</s>", "system", "user", "assistant", "<think>", "</think>"]
_TURN = "{{ '<|im_start|> ' + message['role'] + ' ' + message['content'] + ' <|im_end|> ' }}"
_TEMPLATE = "{% for message in messages %}" + _TURN + "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|> assistant ' }}{% endif %}"
Row = Callable[[random.Random], dict[str, Any]]


def tokenizer() -> Any:
    """Return a tokenizer with the words ``w0`` to ``w52``, the special tokens of ChatML, and a chat template."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {word: index for index, word in enumerate(_SPECIAL + [f"w{index}" for index in range(WORDS)])}
    inner = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made = PreTrainedTokenizerFast(
        tokenizer_object=inner,
        pad_token="<pad>",
        unk_token="<unk>",
        bos_token="<s>",
        eos_token="<|im_end|>",
        additional_special_tokens=["<|im_start|>"],
    )
    made.chat_template = _TEMPLATE
    return made


def _text(source: random.Random, words: int) -> str:
    return " ".join(f"w{source.randrange(WORDS)}" for _ in range(words + source.randrange(4)))


def _turn(role: str, source: random.Random) -> dict[str, str]:
    return {"role": role, "content": _text(source, 4)}


def _conversation(source: random.Random) -> dict[str, Any]:
    return {"messages": [_turn(role, source) for role in ("user", "assistant") * 2]}


def _pair(source: random.Random) -> dict[str, Any]:
    return {"prompt": [_turn("user", source)], **{name: [_turn("assistant", source)] for name in ("chosen", "rejected")}}


def _labelled(source: random.Random) -> dict[str, Any]:
    return {"prompt": [_turn("user", source)], "completion": [_turn("assistant", source)], "label": source.random() < 0.5}


DATA: dict[str, Row] = {
    "chats": _conversation,
    "texts": lambda source: {"text": _text(source, 12)},
    "pairs": _pair,
    "twins": lambda source: {"anchor": _text(source, 6), "positive": _text(source, 6)},
    "prompts": lambda source: {"prompt": [_turn("user", source)]},
    "labelled": _labelled,
}


def save(folder: Path) -> None:
    """Write the folders ``model``, ``reward`` and those of ``DATA``, each with a split ``train`` and a split ``test``."""
    from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM, Qwen3ForSequenceClassification

    made = tokenizer()
    size = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
    }
    ids = {"bos_token_id": made.bos_token_id, "eos_token_id": made.eos_token_id, "pad_token_id": made.pad_token_id}
    config = Qwen3Config(vocab_size=len(made), max_position_embeddings=256, tie_word_embeddings=True, num_labels=1, **size, **ids)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        Qwen3ForCausalLM(config).save_pretrained(folder / "model")
        Qwen3ForSequenceClassification(config).save_pretrained(folder / "reward")
    for name in ("model", "reward"):
        made.save_pretrained(folder / name)
        # For some model types (qwen2) AutoTokenizer takes the model's own class, which reads none of these words.
        assert AutoTokenizer.from_pretrained(folder / name)("w0 w1")["input_ids"] == made("w0 w1")["input_ids"]
    for name, row in DATA.items():
        (folder / name).mkdir()
        for split, count in (("train", 40), ("test", 8)):
            source = random.Random(f"{name} {split}")
            (folder / name / f"{split}.jsonl").write_text("".join(json.dumps(row(source)) + "\n" for _ in range(count)))


def distinct_words(completions: list[Any], **_: Any) -> list[float]:
    """Return rewards for GRPO: the number of distinct words, plus a little for a later position, so that equal completions differ."""
    texts = [completion[0]["content"] if isinstance(completion, list) else completion for completion in completions]
    return [len(set(text.split())) + 0.1 * index for index, text in enumerate(texts)]
