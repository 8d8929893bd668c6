"""Models, tokenizer and data of drawn runs of TRL's trainers: tiny, made from configurations, the same on all ranks."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import torch

from tests.support import trainers, trl_runs

LLAMA = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
_TURN = "{{ '<s> ' + message['role'] + ' ' }}"
_ANSWER = "{% generation %}{{ message['content'] + ' </s> ' }}{% endgeneration %}"
TEMPLATE = (
    "{% for message in messages %}" + _TURN + "{% if message['role'] == 'assistant' %}" + _ANSWER
    + "{% else %}{{ message['content'] + ' </s> ' }}{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<s> assistant ' }}{% endif %}"
)  # fmt: skip
ROWS = {"train": 48, "held": 7}


def save_models(folder: Path) -> None:
    """Write ``llama``, ``mixtral``, ``tied``, the causal ``teacher`` and the ``reward`` model, each with the tokenizer."""
    from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification, MixtralConfig, MixtralForCausalLM

    common = {"vocab_size": trainers.VOCAB, "max_position_embeddings": 64, "bos_token_id": 5, "eos_token_id": 6, "pad_token_id": 0, **LLAMA}
    experts = {"num_local_experts": 2, "num_experts_per_tok": 1, "sliding_window": None}
    made = {
        "llama": (1, LlamaForCausalLM, LlamaConfig(**common)),
        "tied": (2, LlamaForCausalLM, LlamaConfig(**common, tie_word_embeddings=True)),
        "mixtral": (3, MixtralForCausalLM, MixtralConfig(**common, **experts)),
        "teacher": (4, LlamaForCausalLM, LlamaConfig(**common)),
        "reward": (5, LlamaForSequenceClassification, LlamaConfig(**common, num_labels=1)),
    }
    for name, (seed, kind, config) in made.items():
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            kind(config).save_pretrained(folder / name)
        tokenizer().save_pretrained(folder / name)


def tokenizer() -> Any:
    """Return the tokenizer of ``trl_runs`` with a chat template that marks the assistant's words."""
    made = trl_runs.tokenizer()
    made.chat_template = TEMPLATE
    return made


def load(folder: Path, name: str) -> Any:
    """Return a causal model or the reward model."""
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    auto = AutoModelForSequenceClassification if name == "reward" else AutoModelForCausalLM
    return auto.from_pretrained(folder / name)


def load_plain(folder: Path, name: str) -> Any:
    """Return a model that is not sharded, also inside a run at stage 3."""
    with trainers.loading_plainly():
        return load(folder, name)


def rows_of(form: str, split: str, chats: bool) -> Any:
    """Return a data set: ``form`` is one of a trainer's table, ``chats`` makes conversations of its texts."""
    from datasets import Dataset

    source = random.Random(f"{form} {split}")

    def text(words: int = 4) -> str:
        return " ".join(f"w{source.randrange(50)}" for _ in range(words + source.randrange(3)))

    def asked() -> Any:
        return [{"role": "user", "content": text()}] if chats else text()

    def told() -> Any:
        return [{"role": "assistant", "content": text()}] if chats else " " + text()

    def row(index: int) -> dict[str, Any]:
        if form == "text":
            turns = [{"role": role, "content": text(2)} for role in ("user", "assistant") * (1 + index % 2)]
            return {"messages": turns} if chats else {"text": text(7)}
        if form == "chats":
            return {"messages": [{"role": "user", "content": text()}, {"role": "assistant", "content": text()}]}
        first = {"prompt": asked()}
        if form == "completions":
            return first | {"completion": told()}
        if form == "labelled":
            return first | {"completion": told(), "label": index % 3 > 0}
        if form == "pairs":
            return first | {"chosen": told(), "rejected": told()}
        if form == "triples":
            return first | {"reference": told(), "chosen": told(), "rejected": told()}
        if form == "privileged":
            return first | {"privileged_context": text()}
        return first

    return Dataset.from_list([row(index) for index in range(ROWS[split])])


def distinct(completions: list[Any], **_: Any) -> list[float]:
    """Return the number of distinct words of each completion, and a little for its position, so that equal ones differ."""
    texts = [completion[0]["content"] if isinstance(completion, list) else completion for completion in completions]
    return [len(set(text.split())) + 0.1 * (index % 3) for index, text in enumerate(texts)]


def halves(completions: list[Any], **_: Any) -> list[float]:
    """Return 1.0 or 0.0 in turn: rewards of which some are right and some are wrong."""
    return [float(index % 2) for index in range(len(completions))]
