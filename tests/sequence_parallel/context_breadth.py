"""Trains a tiny model of every causal language model under context parallelism and compares it with one rank.

python -m tests.sequence_parallel.context_breadth                   # over 2 ranks; writes the table of docs/sequence-parallel.md
python -m tests.sequence_parallel.context_breadth LlamaForCausalLM  # prints its row
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tests.sequence_parallel.breadth import Row, causal, measured, reasons_of, row_of
from tests.sequence_parallel.compared import measure_all, publish, published
from tests.support import ranks

RESULTS = Path(__file__).resolve().parents[1] / "data" / "context_breadth.json"
START, STOP = "<!-- breadth: made by python -m tests.sequence_parallel.context_breadth -->", "<!-- end of context breadth -->"


def measure(name: str) -> Row:
    """One architecture, on this rank of the group, with a batch as a tokenizer gives it."""
    from hf_zero.comm.topology import build_topology, context_topology
    from hf_zero.sequence_parallel.attention import attention_replaced, exchange_heads_in_attention
    from hf_zero.sequence_parallel.forward import SliceSettings
    from hf_zero.sequence_parallel.state import ContextParallel

    def bind(model: nn.Module) -> None:
        groups = context_topology(build_topology(), ranks.world())
        ContextParallel(*groups, SliceSettings(None, True, None, exchange_heads_in_attention, attention_replaced)).bind(model)

    def loss_of(model: nn.Module, batch: dict[str, Any], _: Any) -> torch.Tensor:
        loss: torch.Tensor = model(**batch).loss
        return loss

    return measured(name, bind, loss_of)


def saved() -> list[Row]:
    """The published results."""
    return published(Row, RESULTS)


def table(rows: list[Row]) -> str:
    """The generated part of the page."""
    import transformers

    exact = [row for row in rows if row.exact]
    rest = [row for row in rows if not (row.exact or row.refused)]
    lines = [
        START,
        f"Of {len(rows)} causal language models of transformers {transformers.__version__}, tiny, on 2 gloo ranks, fp32, against one rank,",
        f"one row padded on the left (loss and every gradient): **{len(exact)} exact**, {len(rows) - len(exact) - len(rest)} refused by "
        "name, none that",
        f"trains with other numbers ({', '.join(f'{row.name}: {row.error}' for row in rest)}).",
        "",
        "| refused because | models |",
        "|---|---|",
        *(f"| {reason} | {', '.join(sorted(names))} |" for reason, names in sorted(reasons_of(rows).items())),
    ]
    return "\n".join([*lines, STOP])


def main() -> None:
    """Measures, prints, and publishes if all were measured."""
    found = measure_all(measure, sys.argv[1:] or causal(), row_of)
    print(f"{sum(row.exact for row in found)} of {len(found)} exact")
    if not sys.argv[1:]:
        publish(found, RESULTS, table(found))


if __name__ == "__main__":
    main()
