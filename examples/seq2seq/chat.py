"""Talk in a terminal with a model that run_seq2seq_no_trainer.py or run_seq2seq.py trained.

    python examples/seq2seq/chat.py runs/chat
    echo "def read(self, size=-1)" | python examples/seq2seq/chat.py runs/chat

An empty line or the end of the input ends the conversation.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

CHAT_FILE = "chat.json"
SEPARATOR = "\n"  # between the turns of a conversation


class Bot:
    """A trained model and the conversation so far.

    Args:
        folder: Output folder of the training, or another folder or hub name for ``from_pretrained``.
        turns: Number of earlier lines in the model's input; 0 answers each line independently.
        options: Keyword arguments of ``generate`` that replace the training's.
    """

    def __init__(self, folder: str, turns: int, options: dict[str, Any]) -> None:
        path = Path(folder, CHAT_FILE)
        known = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.model = AutoModelForSeq2SeqLM.from_pretrained(folder).eval()
        self.prefix: str = known.get("source_prefix", "")
        self.max_source_length: int = known.get("max_source_length", 128)
        self.options = known.get("generation", {}) | options
        self.history: deque[str] = deque(maxlen=turns + 1)
        self.tokenizer.truncation_side = "left"  # keep the end of a long conversation

    @torch.no_grad()
    def answer(self, line: str) -> str:
        """Return the model's answer to ``line``, given the earlier turns."""
        self.history.append(line)
        source = self.prefix + SEPARATOR.join(self.history)
        inputs = self.tokenizer(
            source, max_length=self.max_source_length, truncation=True, return_tensors="pt", return_token_type_ids=False
        )
        output = self.model.generate(**inputs, **self.options)
        text = str(self.tokenizer.decode(output[0], skip_special_tokens=True)).strip()
        if self.history.maxlen != 1:
            self.history.append(text)
        return text


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line; None for ``argv`` reads ``sys.argv``."""
    parser = argparse.ArgumentParser(description="Talk in a terminal with a trained sequence-to-sequence model.")
    parser.add_argument("model", help="Output folder of the training, or a model on the hub.")
    parser.add_argument("--turns", type=int, default=0, help="Earlier lines that the model sees too (default 0).")
    parser.add_argument("--num_beams", type=int, help="Beams of the search (default: as in the training's evaluation).")
    parser.add_argument("--max_length", type=int, help="Largest number of tokens of an answer (default: as in the training's evaluation).")
    parser.add_argument("--min_length", type=int, help="Smallest number of tokens of an answer (default: as in the training's evaluation).")
    args = parser.parse_args(argv)
    if args.turns < 0:
        parser.error(f"--turns {args.turns}: must be at least 0.")
    return args


def lines() -> Iterator[str]:
    """Yield the user's lines until an empty line or the end of the input."""
    prompt = "you: " if sys.stdin.isatty() else ""
    while True:
        try:
            line = input(prompt).strip()
        except (EOFError, KeyboardInterrupt):
            print()
            return
        if not line:
            return
        yield line


def main() -> None:
    """Answer the user's lines until the conversation ends."""
    args = parse_arguments()
    wanted = {name: getattr(args, name) for name in ("num_beams", "max_length", "min_length")}
    try:
        bot = Bot(args.model, args.turns, {name: value for name, value in wanted.items() if value is not None})
    except (OSError, ValueError) as error:
        sys.exit(f"{args.model} holds no sequence-to-sequence model: {error}")
    for line in lines():
        print(f"bot: {bot.answer(line)}", flush=True)


if __name__ == "__main__":
    main()
