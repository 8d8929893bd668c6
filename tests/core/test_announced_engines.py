"""Test the line that each engine writes on rank 0, at any level of the log, with the settings that a user asks about first."""

from __future__ import annotations

import io
import logging
import re
from pathlib import Path
from typing import Any

import torch
from torch import nn

import hf_zero
from hf_zero import observe
from tests.support import ranks
from tests.support.processes import REPO, run_forked

_LINE = (
    r"DeepSpeed info: ZeRO stage {stage} of hf_zero {version} \([^)]*`import deepspeed`[^)]*\) on 2 rank\(s\), {rest} "
    "MiB of shards and masters"
)


def _lines(make: Any) -> list[str]:
    """Return the lines that ``make`` writes to a handler that passes only warnings, as a script may have set it, and to one that passes
    all.
    """
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    observe.logger.addHandler(handler)
    level = observe.logger.level
    observe.logger.setLevel(logging.ERROR)  # as Trainer does
    try:
        make()
    finally:
        observe.logger.setLevel(level)
        observe.logger.removeHandler(handler)
    return [line for line in stream.getvalue().splitlines() if "DeepSpeed info" in line]


def _announced() -> None:
    def make(config: dict[str, Any], trains: bool = True) -> None:
        model = nn.Linear(4, 4).to(ranks.device())
        hf_zero.initialize(model=model, config=config, optimizer=torch.optim.SGD(model.parameters(), lr=0.1) if trains else None)[
            0
        ].destroy()

    batch = {"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 3}
    offload = {"stage": 3, "offload_optimizer": {"device": "cpu"}}
    tried = (
        (
            {**batch, "zero_optimization": {"stage": 2}},
            True,
            r"clipping at 1 \(DeepSpeed's default\), SGD, float32, no offload, 20 parameters in 1 units.*",
        ),
        (
            {**batch, "zero_optimization": offload, "gradient_clipping": 0.5, "bf16": {"enabled": True}},
            True,
            r"clipping at 0.5, SGD, bfloat16, optimizer states on cpu.*",
        ),
        ({**batch, "zero_optimization": {"stage": 1}, "gradient_clipping": 0}, True, "no clipping, SGD.*"),
    )
    for config, trains, rest in tried:
        lines = _lines(lambda config=config, trains=trains: make(config, trains))
        rest = rf"global batch 24 = 4 per rank x 3 micro-steps x 2 data-parallel ranks, {rest}, [\d.]+"
        pattern = _LINE.format(stage=config["zero_optimization"]["stage"], version=re.escape(hf_zero.__version__), rest=rest)
        assert len(lines) == (ranks.rank() == 0), lines
        assert all(re.search(pattern, line) for line in lines), (pattern, lines)
    lines = _lines(lambda: make({**batch, "zero_optimization": {"stage": 3}}, False))
    assert len(lines) == (ranks.rank() == 0) and all("on 2 rank(s), no optimizer, float32" in line for line in lines), lines
    with observe.messages_suppressed():
        assert not _lines(lambda: make({**batch, "zero_optimization": {"stage": 2}}))


def test_each_engine_says_once_that_it_is_on() -> None:
    ranks.run_ranks(_announced, 2)


def test_the_variable_alone_leaves_the_line_out(tmp_path: Path) -> None:
    """hf_zero reads the level when it is imported, here in forks of a process that has torch."""
    code = (
        "import os; os.environ |= {{'HF_ZERO_LOG_LEVEL': {level!r}, 'RANK': '0'}}; from hf_zero import observe; "
        "observe.logger.setLevel('CRITICAL'); observe.logger.handlers[0].setLevel('ERROR'); observe.announce('on')"
    )
    levels = {"": True, "INFO": True, "DEBUG": True, "WARNING": False}
    imports = "import torch; assert 'hf_zero.observe' not in sys.modules"
    ended = run_forked({level or "none": code.format(level=level) for level in levels}, tmp_path, imports, whole_end=False)
    for level, expected in levels.items():
        done = ended[level or "none"]
        assert done.status == 0 and ("[hf_zero] on" in done.err) == expected, (level, done)


def test_the_page_has_every_variable() -> None:
    page = (REPO / "docs/environment.md").read_text(encoding="utf-8")
    sources = [*Path(REPO, "hf_zero").rglob("*.py")]
    names = {name for path in sources for name in re.findall(r"\"(HF_ZERO(?:_[A-Z]+)*)\"", path.read_text(encoding="utf-8"))}
    names -= {"HF_ZERO_LAUNCHER", "HF_ZERO_OUTPUTS", "HF_ZERO_REPORT"}  # the launcher sets these for its own processes
    assert len(names) >= 7 and not [name for name in names if f"`{name}`" not in page]
