"""The whole no-trainer loop, from stock `accelerate config` on a terminal through its launcher to the numbers of plain PyTorch."""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from hf_zero.optim.factory import build_scheduler
from tests.support import accelerate_loop as script
from tests.support.launches import launch_on_ranks, report_of
from tests.support.processes import environment

RANKS, ACCUMULATION, CLIP = 2, 2, 1.0
OPTIMIZER = {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto", "betas": [0.9, 0.95], "eps": 1e-7}}
SCHEDULER = {
    "type": "WarmupDecayLR",
    "params": {
        "warmup_min_lr": "auto",
        "warmup_max_lr": "auto",
        "warmup_num_steps": "auto",
        "total_num_steps": "auto",
        "warmup_type": "linear",
    },
}
PLUGIN = {
    "gradient_accumulation_steps": ACCUMULATION,
    "gradient_clipping": CLIP,
    "offload_optimizer_device": "none",
    "offload_param_device": "none",
    "zero3_init_flag": True,
    "zero3_save_16bit_model": True,
}


@dataclass(frozen=True)
class Run:
    """One way to start the same training: where the plugin, the optimizer and the scheduler come from."""

    name: str
    deepspeed_config: dict[str, Any]
    json: dict[str, Any] | None = None
    optimizer: str = "code"
    scheduler: str = "code"
    zero_options: dict[str, Any] | None = None


def _json(stage: int, *sections: str, **keys: Any) -> dict[str, Any]:
    known = {"optimizer": OPTIMIZER, "scheduler": SCHEDULER}
    return {
        "zero_optimization": {"stage": stage, "stage3_gather_16bit_weights_on_model_save": True},
        "train_micro_batch_size_per_gpu": "auto",
        "train_batch_size": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": CLIP,
        **{name: known[name] for name in sections},
        **keys,
    }


def _auto_json() -> dict[str, Any]:
    """Everything on "auto", as the JSON files in circulation have it."""
    data = _json(3, "optimizer", "scheduler", gradient_clipping="auto")
    data["zero_optimization"] |= {
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
        "stage3_gather_16bit_weights_on_model_save": "auto",
    }
    data["optimizer"] = {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto", "betas": "auto", "eps": "auto"}}
    return data


ANSWERS = Run("answers_stage3", {**PLUGIN, "zero_stage": 3})
RUNS = (
    Run("json_all_by_config_stage2", {}, _json(2, "optimizer", "scheduler"), "config", "config"),
    Run("zero_plugin_callable_stage3", PLUGIN | {"zero_stage": 2}, None, "ours", "callable", {"config": _json(3, "optimizer")}),
)
SLOW_RUNS = (
    *(Run(f"answers_stage{stage}", {**PLUGIN, "zero_stage": stage, "zero3_init_flag": False}) for stage in (0, 1, 2)),
    Run("json_optimizer_in_code_stage3", {"zero3_init_flag": True}, _json(3)),
    Run("json_without_init_stage3", {"zero3_init_flag": False}, _json(3)),
    Run("json_all_by_config_stage3", {"zero3_init_flag": True}, _json(3, "optimizer", "scheduler"), "config", "config"),
    Run("json_callable_stage1", {}, _json(1, "optimizer"), "config", "callable"),
    Run("zero_plugin_typed_stage1", PLUGIN | {"zero_stage": 3}, None, "code", "code", {"stage": 1, "gradient_clipping": CLIP}),
    Run("zero_plugin_all_auto_stage3", PLUGIN | {"zero_stage": 2}, None, "ours", "ours", {"config": _auto_json()}),
)


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import GPT2Config, GPT2LMHeadModel

    folder = tmp_path_factory.mktemp("model")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = GPT2Config(
            vocab_size=script.VOCAB,
            n_positions=16,
            n_embd=32,
            n_layer=2,
            n_head=2,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            bos_token_id=0,
            eos_token_id=0,
        )
        GPT2LMHeadModel(config).save_pretrained(folder)
    return folder


def start(case: Run, model_folder: Path, folder: Path, mixed_precision: str = "no") -> dict[str, Any]:
    """Writes the launcher's YAML (and JSON), runs the script on two ranks, and returns its report."""
    deepspeed_config = dict(case.deepspeed_config)
    if case.json is not None:
        (folder / "ds.json").write_text(json.dumps(case.json))
        deepspeed_config["deepspeed_config_file"] = str(folder / "ds.json")
    launcher = {
        "compute_environment": "LOCAL_MACHINE",
        "deepspeed_config": deepspeed_config,
        "distributed_type": "DEEPSPEED",
        "num_machines": 1,
        "num_processes": RANKS,
        "use_cpu": False,
        # accelerate refuses this answer next to a JSON file; it is not asked then either
        **({} if case.json is not None else {"mixed_precision": mixed_precision}),
    }
    (folder / "launcher.yaml").write_text(yaml.safe_dump(launcher))
    words = words_of(case, model_folder, folder)
    if case.zero_options is not None:
        words += ["--plugin", "zero", "--zero_options", json.dumps(case.zero_options)]
    report: dict[str, Any] = report_of(launch_on_ranks(folder / "launcher.yaml", Path(script.__file__), *words))
    return report


def words_of(case: Run, model_folder: Path, folder: Path) -> list[str]:
    return ["--model", str(model_folder), "--output", str(folder), "--optimizer", case.optimizer, "--scheduler", case.scheduler]


def reference(case: Run, model_folder: Path) -> tuple[list[float], list[float], dict[str, torch.Tensor], float]:
    """The same training in one process: losses per micro-step, norms per step, final weights, final loss on the evaluation rows."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_folder)
    optimizer, step_schedule = _reference_optimizer(case, model)
    rows = script.rows(script.ROWS, 1)
    batches = [_stack(rows[at : at + script.BATCH]) for at in range(0, len(rows), script.BATCH)] * 2
    losses: list[float] = []
    norms: list[float] = []
    per_step = RANKS * ACCUMULATION
    model.train()
    for at in range(0, len(batches), per_step):
        values = []
        for batch in batches[at : at + per_step]:
            loss = model(**batch).loss
            (loss / per_step).backward()
            values.append(loss.item())
        losses += [sum(values[m : m + RANKS]) / RANKS for m in range(0, per_step, RANKS)]
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP).item())
        optimizer.step()
        optimizer.zero_grad()
        step_schedule()
    model.eval()
    with torch.no_grad():
        held_out = [model(**_stack([row])).loss.item() for row in script.rows(script.EVAL_ROWS, 2)]
    return losses, norms, model.state_dict(), sum(held_out) / len(held_out)


def _reference_optimizer(case: Run, model: torch.nn.Module) -> tuple[torch.optim.Optimizer, Callable[[], None]]:
    """The optimizer a case asks for, and how its schedule moves per step."""
    if case.optimizer == "code":
        optimizer = script.make_optimizer("code", model)
        schedule = script.make_scheduler("code", optimizer, RANKS)
        # accelerate moves a schedule made in code once per process: it counts samples, not steps
        return optimizer, lambda: [schedule.step() for _ in range(RANKS)] and None
    source = case.json or (case.zero_options or {})["config"]
    params = {key: value for key, value in source["optimizer"]["params"].items() if value != "auto"}
    params |= {"lr": script.LR, "weight_decay": script.DECAY}
    optimizer = torch.optim.AdamW(model.parameters(), **params)
    if case.scheduler == "callable":
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, script.lr_at)
    else:
        values = {"warmup_min_lr": 0, "warmup_max_lr": script.LR, "warmup_num_steps": 2, "total_num_steps": script.STEPS}
        schedule = build_scheduler("WarmupDecayLR", values | {"warmup_type": "linear"}, optimizer)
    return optimizer, schedule.step


def _stack(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {key: torch.stack([row[key] for row in rows]) for key in rows[0]}


def check(report: dict[str, Any], case: Run, model_folder: Path, folder: Path) -> None:
    """One run against the reference, and everything a no-trainer script relies on besides the numbers."""
    from transformers import AutoModelForCausalLM

    losses, norms, weights, held_out = reference(case, model_folder)
    stage = int(case.name[-1])
    assert report["world"] == [RANKS, stage]
    assert report["run"]["losses"] == pytest.approx(losses, rel=1e-4)
    assert report["run"]["norms"] == pytest.approx(norms, rel=1e-4)
    assert report["eval_before"][1] == report["eval_after"][1] == script.EVAL_ROWS
    assert report["eval_after"][0] == pytest.approx(held_out, rel=1e-4)

    half = ACCUMULATION * script.SAVED_AT
    assert report["again"]["losses"] == report["run"]["losses"][half:], "training from a loaded state must repeat bit for bit"
    assert report["again"]["norms"] == report["run"]["norms"][script.SAVED_AT :]
    assert report["again"]["lrs"] == report["run"]["lrs"][script.SAVED_AT :]
    assert report["skipped"] is False and report["unwrapped"] == "GPT2LMHeadModel"

    exported = AutoModelForCausalLM.from_pretrained(folder / "export").state_dict()
    assert exported.keys() == weights.keys()
    for name, value in exported.items():
        expected = weights[name]
        if name.endswith("attn.c_attn.bias"):
            # Softmax ignores a shift of all scores, so the gradient of the key's bias is 0 and Adam scales up rounding noise.
            query_and_value = torch.arange(len(value)).view(3, -1)[[0, 2]].flatten()
            value, expected = value[query_and_value], expected[query_and_value]
        torch.testing.assert_close(value, expected, rtol=1e-3, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}")
    if stage == 3:
        assert report["state_is_none"] == [0] + [1] * (RANKS - 1), "only rank 0 holds the gathered weights"


@pytest.mark.parametrize("case", RUNS, ids=lambda case: case.name)
def test_loop_equals_plain_pytorch(case: Run, model_folder: Path, tmp_path: Path) -> None:
    check(start(case, model_folder, tmp_path), case, model_folder, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("case", SLOW_RUNS, ids=lambda case: case.name)
def test_loop_equals_plain_pytorch_in_every_combination(case: Run, model_folder: Path, tmp_path: Path) -> None:
    check(start(case, model_folder, tmp_path), case, model_folder, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_loop_in_mixed_precision(precision: str, model_folder: Path, tmp_path: Path) -> None:
    """The launcher's answer reaches the engine; the weights learn and the export is 16-bit and loads."""
    from transformers import AutoModelForCausalLM

    report = start(ANSWERS, model_folder, tmp_path, mixed_precision=precision)
    losses, _, _, held_out = reference(ANSWERS, model_folder)
    assert report["run"]["losses"] == pytest.approx(losses, rel=0.05)
    assert report["eval_after"][0] == pytest.approx(held_out, rel=0.05)
    assert math.isfinite(report["run"]["norms"][-1])
    expected = {"bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "export", dtype="auto")
    assert {p.dtype for p in exported.parameters()} == {expected}


# -- the terminal ----------------------------------------------------------------------------------------------------------

DOWN = "\x1b[B"
ENTER = "\r"
# What each question needs: a number is a menu row, a text is typed, None takes the default.
TYPED: tuple[tuple[str, int | str | None], ...] = (
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
    ("gradient clipping value", "1.0"),
    ("save 16-bit model weights", "yes"),
    ("enable `deepspeed.zero.Init`", "yes"),
    ("enable Mixture-of-Experts", None),
    ("How many GPU", "2"),
    ("mixed precision", 0),
)


def answer(home: Path, answers: tuple[tuple[str, int | str | None], ...]) -> dict[str, Any]:
    """Runs `accelerate config` on a pseudo-terminal, answers its questions in order, and returns the file it wrote.

    The file goes where it always goes, below ``HF_HOME``, and `accelerate launch` finds it there.
    """
    command = str(Path(sys.executable).with_name("accelerate"))
    env: Any = environment({"TERM": "xterm", "COLUMNS": "200", "HF_HOME": str(home)})
    pexpect = pytest.importorskip("pexpect", reason="the terminal tests need pexpect (in the extra `test`)")
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


@pytest.mark.slow  # fast: `test_loop_equals_plain_pytorch`; the questions are accelerate's
def test_a_terminals_answers_become_two_ranks_and_their_numbers(model_folder: Path, tmp_path: Path) -> None:
    """On gloo where there is no accelerator; stock accelerate would let both ranks see all rows there."""
    written = answer(tmp_path, TYPED)
    assert written["distributed_type"] == "DEEPSPEED" and written["num_processes"] == 2 and written["use_cpu"] is False
    assert written["deepspeed_config"] == ANSWERS.deepspeed_config
    words = words_of(ANSWERS, model_folder, tmp_path)
    report = report_of(launch_on_ranks(tmp_path / "accelerate" / "default_config.yaml", Path(script.__file__), *words))
    check(report, ANSWERS, model_folder, tmp_path)
    facts = report["facts"]
    assert facts["ranks"][:3] == [2, 2, "DistributedType.DEEPSPEED"] and (torch.cuda.is_available() or facts["ranks"][3] == "gloo")
    assert facts["gathered"] == [0, 1, 1, 0] and facts["total"] == 3.0
    assert facts["config"]["zero_optimization"]["stage"] == 3 and facts["config"]["gradient_accumulation_steps"] == ACCUMULATION
    assert facts["config"]["gradient_clipping"] == CLIP and facts["init"] is True


SHOWS_CONFIG = """
import json
from accelerate import Accelerator
accelerator = Accelerator()
report = [accelerator.num_processes, str(accelerator.distributed_type), accelerator.state.deepspeed_plugin.deepspeed_config]
accelerator.print("REPORT " + json.dumps(report))
accelerator.end_training()
"""


@pytest.mark.slow
def test_a_json_named_on_the_terminal_reaches_the_plugin(tmp_path: Path) -> None:
    ours = {"zero_optimization": {"stage": 2}, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 3}
    (tmp_path / "zero2.json").write_text(json.dumps(ours))
    questions = [question for question, _ in TYPED]
    answers = (
        *TYPED[: questions.index("json file to a DeepSpeed config")],
        ("json file to a DeepSpeed config", "yes"),
        ("path to the json DeepSpeed config file", str(tmp_path / "zero2.json")),
        ("enable `deepspeed.zero.Init`", None),
        *TYPED[questions.index("enable Mixture-of-Experts") : -1],
    )
    written = answer(tmp_path, answers)
    assert written["deepspeed_config"] == {"deepspeed_config_file": str(tmp_path / "zero2.json"), "zero3_init_flag": False}
    (tmp_path / "script.py").write_text(SHOWS_CONFIG)
    world, kind, config = report_of(launch_on_ranks(tmp_path / "accelerate" / "default_config.yaml", tmp_path / "script.py"))
    assert (world, kind) == (2, "DistributedType.DEEPSPEED")
    assert config["zero_optimization"] == {"stage": 2} and config["gradient_accumulation_steps"] == 3
