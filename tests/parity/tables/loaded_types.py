"""Trains a tiny model of every architecture in 16 bit, and compares the types and values of what shall stay with what was loaded.

python -m tests.parity.tables.loaded_types                    # every architecture over 2 ranks; prints the rows that differ, and counts
python -m tests.parity.tables.loaded_types text               # those that read text; senses: images or sound
python -m tests.parity.tables.loaded_types T5ForConditionalGeneration
"""

from __future__ import annotations

import sys
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from tests.support import ranks, senses, zoo
from tests.support.parity import DTYPES, Run, initialize
from tests.support.zero3 import transformers_zero3, whole_parameters

STAGES = (0, 1, 2, 3)
CHECKPOINTED = (0, 3)  # stages that write in different ways
WRITTEN, READ = (2, 3), (2, 3)  # stages whose whole model is written to one file, or was read from one
HALF = ("bf16", "fp16")
CELLS = tuple((dtype, stage) for dtype in HALF for stage in STAGES)
SENSES_CELLS = (("bf16", 1), ("bf16", 3), ("fp16", 2))
SHOWN = 3
WRITES = {"zero_optimization": {"stage3_gather_16bit_weights_on_model_save": True}}
Types = dict[str, torch.dtype]


@dataclass
class Row:
    """Result of one architecture.

    Attributes:
        name: Class name of the model.
        engines: Number of engines that were checked.
        kept: Parameters that stayed in fp32, summed over one engine for each 16-bit dtype.
        buffers: Number of floating-point buffers of one engine.
        forwards: Number of engines whose logits were compared.
        differences: Tensors that differ from the loaded ones, each with its place.
        notes: Checks that were impossible, each with the reason.
    """

    name: str
    engines: int = 0
    kept: int = 0
    buffers: int = 0
    forwards: int = 0
    differences: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def build(name: str) -> nn.Module:
    """Return a tiny model in fp32: of a text architecture, or of one that reads images or sound."""
    return zoo.build(name) if name in text_names() else senses.build(name)


def text_names() -> list[str]:
    """Return the names of the classes that read only text."""
    return [item.name for item in zoo.architectures()]


def types_of(model: nn.Module) -> Types:
    """Return the dtypes of floating-point parameters and buffers, by name."""
    return {name: tensor.dtype for name, tensor in [*model.named_parameters(), *model.named_buffers()] if tensor.is_floating_point()}


def buffers_of(model: nn.Module) -> dict[str, Tensor]:
    """Return copies of the floating-point buffers."""
    return {name: buffer.detach().clone() for name, buffer in model.named_buffers() if buffer.is_floating_point()}


def expected_types(model: nn.Module, dtype: torch.dtype, named: set[str]) -> Types:
    """Return the dtypes expected after training ``model`` in ``dtype``: buffers and ``named`` parameters unchanged, others ``dtype``."""
    before, params = types_of(model), dict(model.named_parameters())
    norms = {
        f"{name}.{own}" if name else own
        for name, module in model.named_modules()
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.running_mean is not None and module.running_mean.dtype != dtype
        for own in module._parameters
    }
    return {name: dtype if name in params and name not in named | norms else before[name] for name in before}


def named_by_library(loaded: Any, dtype: torch.dtype) -> set[str]:
    """Return the parameters that transformers itself loads in fp32 when a model is loaded in ``dtype``, by its own plan and expression."""
    from transformers.core_model_loading import build_glob_alternation

    plan = loaded._get_dtype_plan(dtype)
    if not plan:
        return set()
    expression, _, _ = build_glob_alternation(list(plan))
    named = {name for name, param in loaded.named_parameters() if param.is_floating_point() and expression.search(name)}
    assert all(loaded.get_parameter(name).dtype == torch.float32 for name in named), "transformers has not loaded these in fp32"
    return named


def measure(name: str, folder: str, cells: Sequence[tuple[str, int]] = CELLS) -> Row:
    """Check one architecture, built here in fp32 and read from a file in 16 bit, in each of ``cells`` (dtype, stage). Collective."""
    row = Row(name)
    model = build(name)
    cls: Any = type(model)
    path = f"{folder}/{name}"
    torch.manual_seed(1)
    with torch.no_grad():  # buffers of values that 16 bit would round
        for buffer in model.buffers():
            if buffer.dtype == torch.float32 and buffer.numel() and bool((buffer == 0).all()):
                buffer.normal_()
    try:
        if ranks.rank() == 0:
            model.save_pretrained(path)
        torch.distributed.barrier()
        loads = {dtype: cls.from_pretrained(path, dtype=DTYPES[dtype]) for dtype, _ in cells}
    except Exception as error:  # noqa: BLE001 - plain transformers does not read its own file
        row.notes.append(f"not read: {type(error).__name__}: {str(error).splitlines()[0][:90]}")
        loads = {}
    named = {dtype: named_by_library(loads[dtype], DTYPES[dtype]) if dtype in loads else set() for dtype, _ in cells}
    row.kept = sum(map(len, named.values()))
    for dtype, stage in cells:
        run, place = Run(stage=stage, dtype=dtype, extra=WRITES), f"{dtype}, stage {stage}"
        _check_built(row, deepcopy(model), run, named[dtype], f"{path}-checkpoint", f"built, {place}")
        if dtype in loads and stage in READ:
            _check_loaded(row, cls, path, loads[dtype], run, named[dtype], f"read, {place}")
    return row


def _check_built(row: Row, model: nn.Module, run: Run, named: set[str], folder: str, place: str) -> None:
    dtype = DTYPES[run.dtype]
    expected, buffers = expected_types(model, dtype, named), buffers_of(model)
    row.buffers = len(buffers)
    plain = deepcopy(model).to(ranks.device())
    for name, param in plain.named_parameters():
        param.data = param.data.to(expected.get(name, param.dtype))
    engine = initialize(model, run)
    row.engines += 1
    _compare(row, types_of(engine.module), expected, f"{place}: type of")
    _compare(row, buffers_of(engine.module), buffers, f"{place}: values of")
    logits = _logits(row.name, plain), _logits(row.name, engine)
    if logits != (None, None):
        row.forwards += 1
        if not _same(*logits):
            row.differences.append(f"{place}: logits are {_shown(logits[1])}, without the engine {_shown(logits[0])}")
    expected, buffers = expected | types_of(plain), buffers_of(plain)  # a forward may change its buffers
    values = whole_parameters(engine.module)
    _compare(row, values, dict(plain.named_parameters()), f"{place}: values of parameter")
    if run.stage in CHECKPOINTED:
        _check_checkpoint(row, engine, folder, expected, buffers, place)
    if run.stage in WRITTEN:
        _check_file(row, engine, folder, expected, buffers, place)
    engine.destroy()


def _check_checkpoint(row: Row, engine: Any, folder: str, expected: Types, buffers: dict[str, Tensor], place: str) -> None:
    """Save, overwrite the buffers, and load again."""
    engine.save_checkpoint(folder, "t")
    with torch.no_grad():
        for buffer in engine.module.buffers():
            if buffer.is_floating_point():
                buffer.zero_()
    engine.load_checkpoint(folder, "t")
    saved = {name for name in engine.module.state_dict() if name in buffers}
    _compare(row, types_of(engine.module), expected, f"{place}: type after loading of")
    after = buffers_of(engine.module)
    _compare(row, {name: after[name] for name in saved}, {name: buffers[name] for name in saved}, f"{place}: values after loading of")


def _check_file(row: Row, engine: Any, folder: str, expected: Types, buffers: dict[str, Tensor], place: str) -> None:
    """Check the complete model in one file: dtypes as trained, buffers unrounded."""
    assert engine.save_16bit_model(folder, "model.safetensors")
    if ranks.rank() != 0:
        return
    from safetensors.torch import load_file

    values = load_file(f"{folder}/model.safetensors")
    known = {name: value for name, value in values.items() if name in expected}
    _compare(
        row, {name: value.dtype for name, value in known.items()}, {name: expected[name] for name in known}, f"{place}: written type of"
    )
    written = {name: value for name, value in known.items() if name in buffers}
    _compare(row, written, {name: buffers[name] for name in written}, f"{place}: written values of")


def _check_loaded(row: Row, cls: Any, path: str, plain: nn.Module, run: Run, named: set[str], place: str) -> None:
    """Check a model that ``from_pretrained`` has read in 16 bit, sharded while it is read at stage 3."""
    dtype = DTYPES[run.dtype]
    expected, buffers = expected_types(plain, dtype, named), buffers_of(plain)
    with transformers_zero3(run) if run.stage == 3 else nullcontext():
        try:
            model = cls.from_pretrained(path, dtype=dtype) if run.stage == 3 else deepcopy(plain)
        except IndexError as error:  # an initialisation that looks at the shape of a sharded parameter
            row.notes.append(f"{place}: not read: {error}")
            return
        engine = initialize(model.train(), run)
    row.engines += 1
    _compare(row, types_of(engine.module), expected, f"{place}: type of")
    _compare(row, buffers_of(engine.module), buffers, f"{place}: values of")
    values = whole_parameters(engine.module)
    _compare(
        row, {name: values[name] for name in named}, {name: plain.get_parameter(name) for name in named}, f"{place}: values of parameter"
    )
    engine.destroy()


def _logits(name: str, model: Any) -> Tensor | str | None:
    """Return the logits of a model, or the first tensor of its outputs, or the error that its dtypes cause; None if no input is
    available.
    """
    batch = _batch(name, model)
    if batch is None:
        return None
    model.eval()
    try:
        torch.manual_seed(3)
        with torch.no_grad():
            found = zoo.forward(model, batch)
        return _first_tensor(found)
    except Exception as error:  # noqa: BLE001 - an error without an engine must be the same with one
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"
    finally:
        model.train()


def _batch(name: str, model: Any) -> dict[str, Tensor] | None:
    """Return inputs of a model on its device, images and sound in the dtype of its parameters; None where ``senses`` has none."""
    module = getattr(model, "module", model)
    if name not in text_names():
        dtypes = [param.dtype for param in module.parameters()]
        values = senses.inputs(module)
        return values and {key: value.to(ranks.device(), max(set(dtypes), key=dtypes.count)) for key, value in values.items()}
    values = {key: value.to(ranks.device()) for key, value in zoo.batch(name, torch.Generator().manual_seed(0)).items() if key != "labels"}
    if zoo.architecture(name).task == "seq2seq":
        values["decoder_input_ids"] = values["input_ids"]
    return values


def _first_tensor(found: Any) -> Tensor | None:
    if isinstance(getattr(found, "logits", None), Tensor):
        return found.logits  # type: ignore[no-any-return]
    tensors = [leaf for leaf in tree_leaves(dict(found)) if isinstance(leaf, Tensor)]
    return tensors[0] if tensors else None


def _shown(value: Any) -> str:
    return f"of {value.dtype}, {value.flatten()[:SHOWN].tolist()}" if isinstance(value, Tensor) else str(value)


def _same(mine: Any, theirs: Any) -> bool:
    if isinstance(mine, Tensor) and isinstance(theirs, Tensor):
        return mine.dtype == theirs.dtype and mine.shape == theirs.shape and torch.equal(mine.cpu().nan_to_num(), theirs.cpu().nan_to_num())
    return bool(mine == theirs)


def _compare(row: Row, found: dict[str, Any], expected: dict[str, Any], what: str) -> None:
    for name in [name for name in expected if name not in found or not _same(found[name], expected[name])][:SHOWN]:
        row.differences.append(f"{what} {name}: {_shown(found.get(name))}, not {_shown(expected[name])}")


def measure_each(names: list[str], thinned: bool = False) -> list[Row]:
    """Return rows of ``names``, one after the other; with ``thinned`` each in one cell, which takes all cells in turn. Collective."""
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as mine:
        shared = [mine]
        torch.distributed.broadcast_object_list(shared, 0)
        rows = []
        for index, name in enumerate(names):
            cells = CELLS if name in text_names() else SENSES_CELLS
            rows.append(measure(name, shared[0], [cells[index % len(cells)]] if thinned else cells))
            torch.distributed.barrier()
    return rows


def measure_all(names: list[str], at_once: int = 12, thinned: bool = False) -> Iterator[Row]:
    """Return rows of ``names`` over 2 ranks, ``thinned`` as in ``measure_each``; the names of a group that fails are tried one by one."""
    for start in range(0, len(names), at_once):
        part = names[start : start + at_once]
        try:
            yield from ranks.run_ranks(measure_each, 2, part, thinned, timeout=900.0)[0]
        except ranks.RankError:
            for name in part:
                try:
                    yield from ranks.run_ranks(measure_each, 2, [name], thinned, timeout=300.0)[0]
                except ranks.RankError as error:
                    yield Row(name, differences=[str(error)[-2000:]])


def main() -> None:
    kinds = {"text": text_names, "senses": senses.architectures}
    names = [name for word in sys.argv[1:] or kinds for name in (kinds[word]() if word in kinds else [word])]
    total = Row("all")
    rows = 0
    for row in measure_all(names):
        rows += 1
        for number in ("engines", "kept", "buffers", "forwards"):
            setattr(total, number, getattr(total, number) + getattr(row, number))
        total.differences += row.differences
        if row.differences or row.notes or len(names) < 20:
            print(row.name, row.engines, row.kept, row.buffers, row.forwards, *row.notes, *row.differences, sep="\n    ", flush=True)
    print(
        f"{rows} architectures, {total.engines} engines, {total.kept} kept parameters, {total.buffers} buffers, {total.forwards} forwards, "
        f"{len(total.differences)} differences"
    )
    if not {*sys.argv[1:]} or "senses" in sys.argv[1:]:
        for name, why in senses.refusals().items():
            print(f"not built: {name}: {why}")


if __name__ == "__main__":
    assert Path.cwd().joinpath("tests").is_dir()
    main()
