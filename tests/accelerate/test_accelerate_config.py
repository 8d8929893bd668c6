"""Stock `accelerate config`, answered on a terminal with DeepSpeed chosen, and what `accelerate launch` makes of its file."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.processes import environment, run

pexpect = pytest.importorskip("pexpect", reason="the terminal tests need pexpect (in the extra `test`)")

DOWN = "\x1b[B"
ENTER = "\r"
# What each question needs: a number is a menu row, a text is typed, None takes the default.
PLUGIN_ANSWERS: tuple[tuple[str, int | str | None], ...] = (
    ("In which compute environment", 0),
    ("Which type of machine", 4),
    ("How many different machines", None),
    ("Should distributed operations be checked", None),
    ("optimize your script with torch dynamo", None),
    ("Do you want to use DeepSpeed", "yes"),
    ("json file to a DeepSpeed config", "no"),
    ("ZeRO optimization stage", 3),
    ("offload optimizer states", 0),
    ("offload parameters", 0),
    ("How many gradient accumulation steps", "2"),
    ("use gradient clipping", "yes"),
    ("gradient clipping value", "0.5"),
    ("save 16-bit model weights", "yes"),
    ("enable `deepspeed.zero.Init`", "yes"),
    ("enable Mixture-of-Experts", None),
    ("How many GPU", "2"),
    ("mixed precision", 0),
)
REPORT = """
import json, os, torch
from accelerate import Accelerator
accelerator = Accelerator()
plugin = accelerator.state.deepspeed_plugin
total = accelerator.reduce(torch.tensor([float(accelerator.process_index + 1)]))
facts = [accelerator.num_processes, torch.distributed.get_world_size(), str(accelerator.distributed_type), total.item()]
gathered = accelerator.gather(torch.tensor([accelerator.process_index, int(accelerator.is_main_process)])).tolist()
if accelerator.is_main_process:
    print("REPORT " + json.dumps({"facts": facts, "gathered": gathered, "config": plugin.deepspeed_config, "init": plugin.zero3_init_flag}))
accelerator.end_training()
"""


def answer(home: Path, answers: tuple[tuple[str, int | str | None], ...]) -> dict[str, Any]:
    """Runs `accelerate config` on a pseudo-terminal, answers its questions in order, and returns the file it wrote.

    The file goes where it always goes, below ``HF_HOME``, and `accelerate launch` finds it there.
    """
    command = str(Path(sys.executable).with_name("accelerate"))
    env: Any = environment({"TERM": "xterm", "COLUMNS": "200", "HF_HOME": str(home)})
    child = pexpect.spawn(command, ["config"], env=env, encoding="utf-8", timeout=60, dimensions=(60, 200))
    try:
        for question, given in answers:
            child.expect_exact(question)
            if isinstance(given, int):
                child.expect_exact("selecting with enter")
                _choose(child, question, given)
            else:
                child.sendline(given or "")
        child.expect(pexpect.EOF)
    except pexpect.TIMEOUT:
        pytest.fail(f"no such question; the terminal shows {child.before!r}")
    finally:
        child.close(force=True)
    assert child.exitstatus == 0, child.before
    return yaml.safe_load((home / "accelerate" / "default_config.yaml").read_text())


def _choose(child: Any, question: str, row: int) -> None:
    """Moves to a row of a menu (the ZeRO stage starts at 2, all others at 0) and takes it.

    The menu reads single keys in raw mode, and a key that arrives between two reads is turned into another one by the
    terminal, so there is a pause before each.
    """
    start = 2 if "ZeRO" in question else 0
    for key in [DOWN] * (row - start) + [ENTER]:
        time.sleep(0.3)
        child.send(key)


def launch(home: Path, script: str) -> dict[str, Any]:
    """Starts a script with `accelerate launch` and nothing else, and returns what its main process reported."""
    path = home / "script.py"
    path.write_text(script)
    out = run(["accelerate", "launch", str(path)], cwd=home, env={"HF_HOME": str(home)}, timeout=200)
    (line,) = [line for line in out.splitlines() if line.startswith("REPORT ")]
    return json.loads(line.removeprefix("REPORT "))


def test_plugin_questions_reach_the_plugin_and_two_ranks_run(tmp_path: Path) -> None:
    """From the terminal to two real ranks, on gloo where there is no accelerator."""
    written = answer(tmp_path, PLUGIN_ANSWERS)
    assert written["distributed_type"] == "DEEPSPEED" and written["num_processes"] == 2 and written["use_cpu"] is False
    assert written["deepspeed_config"] == {
        "zero_stage": 3,
        "offload_optimizer_device": "none",
        "offload_param_device": "none",
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 0.5,
        "zero3_save_16bit_model": True,
        "zero3_init_flag": True,
    }
    report = launch(tmp_path, REPORT)
    assert report["facts"] == [2, 2, "DistributedType.DEEPSPEED", 3.0]
    assert report["gathered"] == [0, 1, 1, 0]
    assert report["config"]["zero_optimization"]["stage"] == 3 and report["config"]["gradient_accumulation_steps"] == 2
    assert report["config"]["gradient_clipping"] == 0.5 and report["init"] is True


def test_config_file_path_reaches_the_plugin(tmp_path: Path) -> None:
    ours = {"zero_optimization": {"stage": 2}, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 3}
    (tmp_path / "zero2.json").write_text(json.dumps(ours))
    questions = [question for question, _ in PLUGIN_ANSWERS]
    answers = (
        *PLUGIN_ANSWERS[: questions.index("json file to a DeepSpeed config")],
        ("json file to a DeepSpeed config", "yes"),
        ("path to the json DeepSpeed config file", str(tmp_path / "zero2.json")),
        ("enable `deepspeed.zero.Init`", None),
        *PLUGIN_ANSWERS[questions.index("enable Mixture-of-Experts") : -1],
    )
    written = answer(tmp_path, answers)
    assert written["deepspeed_config"] == {"deepspeed_config_file": str(tmp_path / "zero2.json"), "zero3_init_flag": False}
    report = launch(tmp_path, REPORT)
    assert report["facts"][:3] == [2, 2, "DistributedType.DEEPSPEED"]
    assert report["config"]["zero_optimization"] == {"stage": 2}
    assert report["config"]["gradient_accumulation_steps"] == 3
