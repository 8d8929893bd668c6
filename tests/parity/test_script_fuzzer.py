"""Test random scripts: each gives plain PyTorch's result, or one error on all ranks that names the cause."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from tests.parity.fuzzer.engine import UNDER
from tests.parity.fuzzer.grammar import WAYS, Script, keep_valid, parse, valid
from tests.parity.fuzzer.known import KNOWN_OPEN, Known, known, mended, without_known
from tests.parity.fuzzer.report import among_experts, draw, over_sequences, shrink, split_over, under
from tests.parity.fuzzer.verdict import Verdict, verdicts_of
from tests.support.versions import TRANSFORMERS_5, needs

SHOWN = 5  # failures that are made small
MIXTURES = ("listed", "stacked") if TRANSFORMERS_5 else ("listed",)


def _check(scripts: Sequence[Script]) -> None:
    failed = [(script, verdict) for script, verdict in zip(scripts, verdicts_of(scripts), strict=True) if not verdict.good]
    if failed:
        small = [shrink(script, verdict, _quickly) for script, verdict in failed[:SHOWN]]
        shown = "\n".join(f"--- {verdict.word} at operation {verdict.place}: {verdict.text}\n{script}" for script, verdict in small)
        pytest.fail(f"{len(failed)} of {len(scripts)} scripts failed; python -m tests.parity.fuzzer.report run tries one by hand\n{shown}")


def _quickly(scripts: Sequence[Script]) -> list[Verdict]:
    return verdicts_of(scripts, timeout=15)


def test_drawn_scripts_are_exact_or_refused_by_name() -> None:
    _check([without_known(script) for script in draw(25)])


def test_a_penalty_keeps_its_values_over_another_forward() -> None:
    """Autograd saves the parameters themselves: a forward without gradients between penalty and backward must not free their values."""
    begin = "cell stage=3 dtype=fp32 ranks=2 accumulation=1; forward data=0; penalty how=iterated over=blocks.0"
    texts = [f"{begin}; {then} data=20; backward; step" for then in ("peek", "evaluate")]
    assert [verdict.word for verdict in verdicts_of([parse(text) for text in texts])] == ["equal"] * 2


def test_drawn_scripts_over_split_layers() -> None:
    _check([split_over(without_known(script), 2) for script in draw(14)])


def test_scripts_that_failed_once_over_split_layers() -> None:
    texts = (
        "cell stage=0 ranks=2 split=2; load_module how=module; forward data=0; backward; step",
        "cell stage=3 ranks=4 split=2; load_module how=engine; forward data=0; backward; step",
        "cell stage=0 ranks=4 split=2; gather_write param=blocks.1.gain modifier=0 who=0; forward data=0; backward; step",
        "cell stage=3 ranks=4 split=2; gather_write param=blocks.1.gain modifier=1 who=1; forward data=0; backward; step",
        "cell stage=1 ranks=4 split=2 frozen=embed; gather_write param=embed.weight modifier=0 who=0; forward data=0; backward; step",
        "cell stage=2 ranks=4 split=2; gather_write param=blocks.0.up.weight modifier=1 who=1; forward data=0; backward; step",
        "cell stage=3 ranks=4 split=2; gather_write param=blocks.1.gain modifier=none who=0; forward data=0; backward; step",
    )
    assert [verdict.word for verdict in verdicts_of([parse(text) for text in texts])] == ["equal"] * 5 + ["refused"] * 2


def test_scripts_that_failed_once_over_stages() -> None:
    """A state dict of the whole model has values for all stages, and each stage loads its own."""
    texts = (
        "cell stage=0 ranks=2 stages=2 tied=1; load_module how=engine; forward data=0; backward; step; save_model",
        "cell stage=1 ranks=4 stages=2; forward data=0; backward; step; load_module how=module; forward data=1; backward; step",
    )
    assert [verdict.word for verdict in verdicts_of([parse(text) for text in texts])] == ["equal"] * 2


def test_a_norm_with_gradients_of_another_stage_that_no_engine_trains_is_refused() -> None:
    text = "cell stage=1 ranks=4 stages=2; add_adapter layer=blocks.0 how=bare trains=1; forward data=0; backward; clip_grads; step"
    assert [verdict.word for verdict in verdicts_of([parse(text)])] == ["refused"]


def test_drawn_scripts_over_experts() -> None:
    _check([among_experts(without_known(script), 2, MIXTURES[place % len(MIXTURES)]) for place, script in enumerate(draw(8))])


def test_scripts_that_failed_once_over_experts() -> None:
    """A module of a list of experts is whole on the ranks that hold it; the other ranks must learn of an error there too."""
    param = "blocks.1.mixture.experts.2.weight"
    text = f"cell stage=1 ranks=4 experts=2 mixture=listed; gather_write param={param} modifier=0 who=0; forward data=0; backward; step"
    assert [verdict.word for verdict in verdicts_of([parse(text)])] == ["refused"]


def test_drawn_scripts_over_sequences() -> None:
    _check([over_sequences(without_known(script), 2, WAYS[place % 3]) for place, script in enumerate(draw(8))])


@needs("transformers", "5.0", "the mask functions of the scripts take other arguments")
def test_scripts_that_failed_once_over_sequences() -> None:
    """Layers that are recomputed are over parts of sequences if their own forward was, whatever has come since."""
    texts = (
        "cell stage=1 ranks=2 sequences=2 way=allgather recompute=pieces; mode to=eval; forward data=0; mode to=train; backward; step",
        "cell stage=3 ranks=2 sequences=2 recompute=pieces; forward data=0; evaluate data=21; mode to=eval; backward; step",
    )
    assert [verdict.word for verdict in verdicts_of([parse(text) for text in texts])] == ["equal"] * 2


def test_scripts_that_failed_once_with_settings_that_change_no_result() -> None:
    """A node's copies were read after a write that the ranks had not told each other of."""
    writes = (
        "accumulation=2; forward data=20; write param=blocks.1.down.weight how=data_copy; backward; step; forward data=9; backward; step"
    )
    texts = [f"cell stage=3 ranks=4 under={name} {writes}" for name in ("node_copies", "node_parameters")]
    assert [verdict.word for verdict in verdicts_of([parse(text) for text in texts])] == ["equal"] * 2


def test_drawn_scripts_with_settings_that_change_no_result() -> None:
    names = [name for name in UNDER if name != "none"]
    _check([under(without_known(script), names[place % len(names)]) for place, script in enumerate(draw(12))])


@pytest.mark.slow
@pytest.mark.timeout(4000)
@pytest.mark.parametrize("name", [name for name in UNDER if name != "none"])
def test_many_drawn_scripts_with_settings_that_change_no_result(name: str) -> None:
    _check([under(without_known(script), name) for script in draw(100)])


@pytest.mark.slow
@pytest.mark.timeout(4000)
def test_many_drawn_scripts_over_sequences() -> None:
    for size, way in ((2, "ulysses"), (2, "allgather"), (2, "alltoall"), (4, "both")):
        _check([over_sequences(without_known(script), size, way) for script in draw(150)])


@pytest.mark.slow
@pytest.mark.timeout(4000)
def test_many_drawn_scripts_over_experts() -> None:
    for mixture in MIXTURES:
        _check([among_experts(without_known(script), 2, mixture) for script in draw(300)])


@pytest.mark.slow
@pytest.mark.timeout(4000)
def test_many_drawn_scripts_over_split_layers() -> None:
    for _ in range(2):
        _check([split_over(without_known(script), 2) for script in draw(300)])


@pytest.mark.slow
@pytest.mark.timeout(4000)
def test_many_drawn_scripts_are_exact_or_refused_by_name() -> None:
    for _ in range(10):
        _check([without_known(script) for script in draw(500)])


@pytest.mark.parametrize("every_stage", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_scripts_that_failed_once(every_stage: bool) -> None:
    """The fast run takes the operations of each script in one of the cells that they failed in, of each stage in turn."""
    scripts = [script for script in mended() if known(script) is None]
    cells: dict[Any, list[Script]] = {}
    for script in scripts:
        cells.setdefault(script.operations, []).append(script)
    _check(scripts if every_stage else [alike[place % len(alike)] for place, alike in enumerate(cells.values())])


def test_an_open_fault_is_left_out_of_the_scripts_that_show_it() -> None:
    closed = Known(
        "",
        "stage=3 dtype=bf16 | write how=mul/clamp at=c | freeze",
        "",
        ("cell stage=3 dtype=bf16; forward data=0; backward; write param=head.weight how=clamp; step; freeze layer=head",),
    )  # the patterns work also where nothing is open
    for one in (*KNOWN_OPEN, closed):
        assert one.scripts, one
        for text in one.scripts:
            script = parse(text)
            assert known(script, [one]) is not None, f"{one.pattern} does not match {text}"
            assert known(without_known(script, [one]), [one]) is None, text
            assert known(parse(text.replace("stage=3", "stage=2")), [closed]) is None


def test_a_rank_that_loses_a_batch_alone_is_refused_and_one_that_runs_it_again_is_served() -> None:
    lost, again, served = (
        parse(f"cell stage=0 ranks=2; fail_forward layer=blocks.0 who={who} data={data}; forward data=0; backward; step")
        for who, data in ((0, 1), (0, 0), ("all", 1))
    )
    assert [verdict.word for verdict in verdicts_of([lost, again, served])] == ["refused", "equal", "equal"]
    # A forward of one rank alone meets no other rank's: at stage 3 these would wait for each other.
    alone = "cell stage=3 ranks=2; fail_forward layer=blocks.0 who=0 data=1; evaluate data=20; fail_forward layer=blocks.0 who=0 data=1"
    assert [operation.name for operation in keep_valid(parse(alone))] == ["evaluate"]
    assert valid(lost) and not valid(parse(alone)) and valid(parse(alone.replace("ranks=2", "ranks=1")))


def test_what_must_be_refused_goes_on_to_a_step_and_a_save() -> None:
    """Continue to a step and a save, because a script may end before anything reads what one rank has written."""
    texts = (
        "cell stage=1 ranks=2; forward data=0; backward; write_grad param=head.weight who=0",
        "cell stage=0 ranks=2; gather_write param=blocks.1.gain modifier=none who=0",
    )
    assert [verdict.word for verdict in verdicts_of([parse(text) for text in texts])] == ["refused", "refused"]
