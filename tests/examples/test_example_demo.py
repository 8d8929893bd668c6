"""The demo: its text and drawing, and whole runs of it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack, redirect_stdout
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from tests.support import ranks
from tests.support.examples import EXAMPLES, RUN_SECONDS, TEST_SECONDS, modules, run

SCRIPT = EXAMPLES / "demo" / "demo.py"


@pytest.fixture(scope="module")
def demo() -> Iterator[SimpleNamespace]:
    with modules("demo", "demo") as found:
        yield found.demo


def test_text_is_the_zen_and_batches_depend_on_the_step_alone(demo: SimpleNamespace, capsys: pytest.CaptureFixture[str]) -> None:
    text = " ".join(demo.words())
    assert text.startswith("The Zen of Python, by Tim Peters") and "Beautiful is better than ugly." in text
    assert capsys.readouterr().out == ""
    assert demo.batch_of(3).shape == (demo.BATCH, demo.LENGTH)
    assert demo.batch_of(3).equal(demo.batch_of(3)) and not demo.batch_of(3).equal(demo.batch_of(4))


def test_picture_is_drawn_and_difference_is_the_largest(demo: SimpleNamespace, tmp_path: Path) -> None:
    plain = demo.Curve({1: 4.0, 2: 3.0, 3: 2.0}, 16 * 2**20)
    curves = {"PyTorch DDP": plain, "ZeRO stage 2": demo.Curve({1: 4.0, 2: 3.5, 3: 2.25}, 10 * 2**20), demo.RESUMED: demo.Curve({3: 2.0})}
    assert [demo.largest_difference(curve, plain) for curve in curves.values()] == [0.0, 0.5, 0.0]
    demo.draw(tmp_path / "demo.png", curves)
    assert (tmp_path / "demo.png").read_bytes().startswith(b"\x89PNG")


def test_odd_number_of_steps_is_refused(demo: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", ["demo.py", "--steps", "3"])
    with pytest.raises(SystemExit):
        demo.main()
    assert "--steps 3: give an even number" in capsys.readouterr().err


def check(folder: Path, printed: str, steps: int, demo: SimpleNamespace) -> dict[str, dict[str, float]]:
    """The promises of the demo, by its numbers; what it wrote."""
    found = json.loads((folder / "demo.json").read_text())
    plain = found["PyTorch DDP"]
    assert list(map(int, plain["losses"])) == list(range(1, steps + 1))
    assert list(map(int, found[demo.RESUMED]["losses"])) == list(range(steps // 2 + 1, steps + 1))
    for name in ("ZeRO stage 2", "ZeRO stage 3", demo.RESUMED):
        assert max(abs(loss - plain["losses"][step]) for step, loss in found[name]["losses"].items()) < 1e-4
    shares = [found[f"ZeRO stage {stage}"]["state_bytes"] / plain["state_bytes"] for stage in (2, 3)]
    # Weights, gradients, two moments: 4 x 4 bytes each under DDP, 4 + 3 x 4 / 2 at stage 2, 4 x 4 / 2 at stage 3.
    assert shares == pytest.approx([10 / 16, 8 / 16], rel=0.05)
    assert (folder / "demo.png").stat().st_size > 10_000
    assert "continues Beautiful is" in printed and demo.RESUMED in printed
    assert len(printed.splitlines()) < 45, "more than a screen"
    return found


def _demo(*flags: str) -> str:
    """Run the demo in this process and forks of it, instead of in new processes; return what it printed."""
    import torch.multiprocessing as processes

    start = processes.start_processes

    def fork(*args: Any, start_method: str, **kwargs: Any) -> Any:
        assert start_method == "spawn"
        return start(*args, start_method="fork", **kwargs)

    with ExitStack() as stack:
        found = stack.enter_context(modules("demo", "demo"))
        stack.enter_context(mock.patch.object(processes, "start_processes", fork))
        stack.enter_context(mock.patch("sys.argv", [str(SCRIPT), *flags]))
        printed = stack.enter_context(redirect_stdout(StringIO()))
        found.demo.main()
    return printed.getvalue()


@pytest.mark.timeout(TEST_SECONDS)
def test_demo_keeps_its_promises(demo: SimpleNamespace, tmp_path: Path) -> None:
    printed = ranks.run_alone(_demo, "--steps", "2", "--output_dir", str(tmp_path), timeout=RUN_SECONDS)
    check(tmp_path, printed, 2, demo)


@pytest.mark.slow
@pytest.mark.timeout(TEST_SECONDS)
def test_demo_learns_the_zen_by_heart(demo: SimpleNamespace, tmp_path: Path) -> None:
    printed = run([str(SCRIPT), "--output_dir", str(tmp_path)], cache=tmp_path / "cache", seconds=2 * RUN_SECONDS)
    text = check(tmp_path, printed, 60, demo)["text"]
    assert str(text).startswith("Beautiful is better than ugly.\nExplicit is better than implicit.\nSimple is better than complex.")
