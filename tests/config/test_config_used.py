"""A key that is called used is read by the code that builds engines, and one that is called accepted is not."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

import pytest

import hf_zero
from hf_zero import observe
from hf_zero.assembly.reports import announce
from hf_zero.config.keys import all_keys
from hf_zero.config.resolve import resolve
from tests.support.logged import messages_of_log
from tests.support.rows import each
from tests.support.sources import tree_of

pytestmark = pytest.mark.quick

PACKAGE = Path(hf_zero.__file__).parent
FILES = [path for path in sorted(PACKAGE.rglob("*.py")) if "config" not in path.relative_to(PACKAGE).parts]
FILES.append(PACKAGE / "config" / "elastic.py")  # the one consumer that the batch identity needs before there is an engine
WORDS = {word for path in FILES for word in re.findall(r"\w+", path.read_text(encoding="utf-8"))}
PLAIN = [key for key in all_keys().values() if not key.is_section and "*" not in key.path]


@functools.cache
def attributes_read() -> set[tuple[str, str]]:
    """(name before the dot, attribute) of every attribute in the code: `self.config.fp16.enabled` gives (fp16, enabled) and more."""
    found = set()
    for path in FILES:
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.Attribute):
                holder = node.value
                found.add((holder.attr if isinstance(holder, ast.Attribute) else getattr(holder, "id", ""), node.attr))
    return found


def test_used_keys_are_read() -> None:
    unread = [key.path for key in PLAIN if key.fate == "used" and key.path.rpartition(".")[2] not in WORDS]
    assert not unread, "nothing outside hf_zero/config reads them"


def test_accepted_keys_are_not_read() -> None:
    """As attributes of their section (`zero.reduce_bucket_size`); common names occur elsewhere with other meanings."""

    def check(path: str) -> None:
        section, _, name = path.rpartition(".")
        section = section.rpartition(".")[2]
        readers = {holder for holder, attribute in attributes_read() if attribute == name}
        assert not readers & {section, section.removesuffix("_optimization")}, f"{path} is read, so it is not without effect"

    each([key.path for key in PLAIN if key.fate == "accepted" and "." in key.path], check)


@pytest.mark.parametrize("config", [{}, {"train_micro_batch_size_per_gpu": "auto"}, {"gradient_accumulation_steps": 2}])
def test_a_micro_batch_that_nothing_says_is_1_and_told(config: dict[str, object], monkeypatch: pytest.MonkeyPatch) -> None:
    told: set[str] = set()
    monkeypatch.setattr(observe, "_warned", told)
    announce(resolve({**config, "train_batch_size": 4}, world_size=2))
    assert not told
    found = resolve(config, world_size=2)
    announce(found)
    assert found.batch.micro == 1 and [line for line in told if "train_micro_batch_size_per_gpu" in line and "using 1" in line]


def test_auto_that_nothing_fills_is_told_with_its_value(monkeypatch: pytest.MonkeyPatch) -> None:
    told: set[str] = set()
    monkeypatch.setattr(observe, "_warned", told)
    sections: dict[str, object] = {
        "gradient_clipping": "auto",
        "bf16": {"enabled": "auto"},
        "optimizer": {"type": "AdamW", "params": {"lr": "auto"}},
        "zero_optimization": {"stage": 2, "reduce_bucket_size": "auto"},
    }
    batch = {"train_batch_size": "auto", "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": "auto"}
    announce(resolve({**sections, **batch}, sources={"hidden_size": 8}))
    (line,) = told
    for part in ("gradient_accumulation_steps = 1", "gradient_clipping = 1.0", "bf16.enabled = false", "optimizer.params.lr = (default of"):
        assert part in line
    assert line.count(" = ") == 4, "values that a model or another key gives are no defaults"
    told.clear()
    filled = {"max_grad_norm": 1.0, "bf16": True, "learning_rate": 1e-3, "hidden_size": 8, "gradient_accumulation_steps": 2}
    announce(resolve({**sections, **batch}, sources={**filled, "per_device_train_batch_size": 2}))
    assert not told


def test_keys_that_have_no_effect_are_told() -> None:
    """Those that a file sets to another value than the default; a value that "auto" was filled with is nobody's wish."""
    zero = {"stage": 2, "contiguous_gradients": False, "reduce_scatter": True, "reduce_bucket_size": "auto", "sub_group_size": 100}
    config = {"train_batch_size": 4, "sparse_gradients": True, "zero_optimization": zero, "expert_parallel": {"top_k": 1}}
    with messages_of_log() as told:
        announce(resolve(config, world_size=2, sources={"hidden_size": 8}))
    (line,) = [line for line in told if line.startswith("keys of")]
    for key in ("sparse_gradients", "zero_optimization.contiguous_gradients", "expert_parallel.top_k"):
        assert key in line.split(";")[0]
    assert line.count(",") == 2 and "hf-zero explain" in line
    with messages_of_log() as told:
        announce(resolve({"train_batch_size": 4, "zero_optimization": {"stage": 2, "contiguous_gradients": True}}, world_size=2))
    assert told == []
