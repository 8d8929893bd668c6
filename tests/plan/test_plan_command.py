"""``hf-zero plan`` as a command: its JSON, its exit status, its messages."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from hf_zero.cli import main
from hf_zero.config.resolve import resolve
from hf_zero.errors import ConfigError, UnsupportedError
from hf_zero.plan.command import settled
from hf_zero.plan.inputs import ModelWish, bytes_per_second_of
from hf_zero.plan.models import build_model, sequence_of
from hf_zero.system import pictures
from hf_zero.system.sizes import bytes_of, size_text
from tests.support.planned import LLAMA, plans_of
from tests.support.processes import REPO, run_python

KEYS = [
    "fits",
    "peak_bytes_per_rank",
    "process_bytes",
    "by_kind",
    "sent_bytes_per_step",
    "checkpoint_bytes",
    "seconds_per_step",
    "tokens_per_second",
    "reasons",
]
KINDS = ["parameters", "gradients", "masters", "moments", "gathered", "activations", "logits", "communication", "other"]
SCHEDULER = {"type": "WarmupDecayLR", "params": {"warmup_num_steps": "auto", "total_num_steps": "auto"}}


ZERO: dict[str, Any] = {"bf16": {"enabled": True}, "zero_optimization": {"stage": 3}, "train_micro_batch_size_per_gpu": "auto"}
RANKS = ["--config", json.dumps(ZERO), "--sequence", "32", "--ranks", "8", "--ranks-per-node", "4"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model's folder, and Python code that builds models."""
    folder = tmp_path_factory.mktemp("plans")
    (folder / "config.json").write_text(json.dumps({**LLAMA, "num_hidden_layers": 1, "model_type": "llama"}))
    (folder / "model.py").write_text(
        "import torch\nfrom torch import nn\n\n\n"
        "def make(width=8):\n    return nn.Linear(width, width), lambda n, s: {'input': torch.zeros(n, width)}\n"
    )
    (folder / "wrong.py").write_text(
        "import torch\nfrom torch import nn\n\n\ndef make():\n    return nn.Linear(8, 8), lambda n, s: {'input': torch.zeros(n, 5)}\n"
    )
    return folder


@pytest.fixture(scope="module")
def answers(folder: Path) -> dict[str, tuple[int, str, str]]:
    """Of plans for a device, in a process of their own: it stays for the life of one."""
    offload = {**ZERO, "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}}
    disk = {**ZERO, "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": "/nowhere"}}}
    lines = {
        "json": [str(folder), *RANKS, "--json", "--memory", "1GiB", "--tflops", "1", "--link", "1Gbit", "--plot", str(folder / "plan.png")],
        "table": [str(folder / "config.json"), *RANKS, "--checkpoint-activations"],
        "large": [str(folder), *RANKS, "--set", "vocab_size=1000000"],
        "moved": [str(folder), *RANKS, "--json", "--offload-activations", "--set", "num_hidden_layers=6"],
        "kept": [str(folder), *RANKS, "--json", "--set", "num_hidden_layers=6"],
        "limits": [str(folder), *RANKS, "--memory", "1GiB", "--tflops", "1", "--micro-batch", "2", "--plot", str(folder / "plan.html")],
        "doubt": [str(folder), *RANKS, "--device", "cpu", "--memory", "160MiB"],
        "small": [str(folder), *RANKS, "--memory", "100kB"],
        "offload": [str(folder), *RANKS[2:], "--json", "--config", json.dumps(offload), "--host-memory", "1GiB"],
        "disk": [str(folder), *RANKS[2:], "--json", "--config", json.dumps(disk)],
        "python": [f"python:{folder / 'model.py'}:make", *RANKS, "--json", "--set", "width=16"],
        "eager": [str(folder), *RANKS, "--json", "--attention", "eager", "--memory", "100kB"],
        "tensor": [str(folder), "--ranks", "2", "--config", json.dumps({**ZERO, "tensor_parallel": {"autotp_size": 2}, "other_key": 1})],
        "flash": [str(folder), *RANKS, "--json", "--attention", "flash"],
        "host": [str(folder), *RANKS, "--device", "cpu", "--memory", "100kB", "--json"],
    }
    found = dict(zip(lines, plans_of(list(lines.values())), strict=True))
    assert (folder / "plan.png").stat().st_size > 10_000
    return found


def test_json_has_exactly_the_keys(answers: Any) -> None:
    status, text, _ = answers["json"]
    content = json.loads(text)
    assert status == 0
    assert list(content) == KEYS
    assert list(content["by_kind"]) == KINDS
    assert list(content["peak_bytes_per_rank"]) == ["device", "host", "disk"]
    assert list(content["sent_bytes_per_step"]) == ["node", "network"]
    assert content["fits"] is True
    assert content["seconds_per_step"] > 0
    assert content["tokens_per_second"] * content["seconds_per_step"] == pytest.approx(8 * 32)  # a sample on each rank
    sent = content["sent_bytes_per_step"]
    assert sent["node"] == pytest.approx(3 * sent["network"], abs=2)  # of a ring over two nodes of four ranks, two hops of eight


def test_what_does_not_fit_is_status_one_with_reasons(answers: Any) -> None:
    status, text, _ = answers["eager"]
    content = json.loads(text)
    assert (status, content["fits"]) == (1, False)
    assert "device memory" in content["reasons"][0]
    assert content["seconds_per_step"] is None


def test_the_table_is_for_people(answers: Any) -> None:
    status, text, _ = answers["table"]
    assert status == 0
    for word in ("activations", "peak of the tier", "sent by a rank", "a checkpoint", "generate() adds", "largest at the peak"):
        assert word in text


def test_the_verdict_comes_first(answers: Any) -> None:
    lines = answers["limits"][1].splitlines()
    assert lines[0].startswith("it fits: a rank takes ") and lines[0].endswith(" of the 1.00 GiB of device memory"), lines[0]
    assert lines[1].startswith("at least ") and " tokens per second of all ranks (compute " in lines[1], lines[1]
    status, text, _ = answers["small"]
    assert status == 1 and text.startswith("IT DOES NOT FIT: a rank takes ") and "\n- device memory: " in text
    assert answers["table"][1].startswith("no limit was given (--memory): a rank takes ")


def test_a_page_is_one_file_that_answers_when_it_is_pointed_at(answers: Any, folder: Path) -> None:
    assert answers["limits"][0] == 0
    page = (folder / "plan.html").read_text()
    tree = ElementTree.fromstring(page.removeprefix("<!DOCTYPE html>").replace('<meta charset="utf-8">', ""))
    titles = [one.text or "" for one in tree.iter("title")][1:]
    assert 10 < len(titles) <= 400 and all(": " in title.splitlines()[0] for title in titles)
    assert any("activations " in title for title in titles) and "limit 1.00 GiB" in page and "it fits" in page
    assert "http" not in page and "<script" not in page and "url(" not in page


def test_warnings_of_a_run_are_in_its_plan(answers: Any) -> None:
    assert "\n- a run warns: `other_key` is ignored" in answers["tensor"][1]
    assert "a run warns" not in answers["table"][1]
    assert "a run warns" not in answers["large"][1], "a plan builds the whole model, but does not know how a run builds it"


def test_offload_is_on_other_tiers(answers: Any) -> None:
    on_device, on_host, on_disk = (json.loads(answers[name][1])["peak_bytes_per_rank"] for name in ("json", "offload", "disk"))
    assert on_host["device"] < on_device["device"]
    assert on_host["host"] > on_device["host"] + 100_000
    assert on_device["disk"] == on_host["disk"] == 0
    assert on_disk["disk"] > 90_000


@pytest.mark.quick
def test_activations_on_the_host_are_on_another_tier(answers: Any) -> None:
    moved, kept = (json.loads(answers[name][1]) for name in ("moved", "kept"))
    layers = 6
    there, here = (moved["peak_bytes_per_rank"][tier] - kept["peak_bytes_per_rank"][tier] for tier in ("host", "device"))
    assert there > kept["by_kind"]["activations"] * (layers - 2) / layers, "what all layers but the last save"
    assert here < 0, "and two layers' stay"
    assert [moved["by_kind"][kind] for kind in ("parameters", "masters")] == [kept["by_kind"][kind] for kind in ("parameters", "masters")]


def test_a_schedule_that_wants_the_steps_of_a_run_changes_nothing() -> None:
    assert settled({**ZERO, "scheduler": SCHEDULER}) == settled(ZERO)


@pytest.mark.quick
def test_a_value_that_a_model_reads_and_its_configuration_does_not_list() -> None:
    experts = {"moe_intermediate_size": 8, "num_experts": 2, "head_dim": 24}
    module = build_model(ModelWish("qwen3_moe", {**LLAMA, "num_hidden_layers": 1, **experts})).module
    assert module.get_parameter("model.layers.0.self_attn.q_proj.weight").shape == (4 * 24, 64)


def test_parameters_are_counted_before_ranks_divide_them(answers: Any) -> None:
    layer = 2 * 64 * 64 + 2 * 32 * 64 + 3 * 64 * 96 + 2 * 64
    whole = 2 * 211 * 64 + layer + 64
    for name in ("table", "tensor"):
        assert f"parameters: {whole:,}, of which {whole:,} are trained" in answers[name][1]


def test_memory_of_a_host_is_shared_by_its_ranks(answers: Any) -> None:
    status, text, _ = answers["host"]
    assert status == 1
    assert "host memory: 4 ranks x " in json.loads(text)["reasons"][0]


def test_a_process_on_a_cpu_takes_more_than_its_tensors(answers: Any) -> None:
    content = json.loads(answers["host"][1])
    least, most = content["process_bytes"]
    assert 1.1 * content["peak_bytes_per_rank"]["host"] < least < most
    assert json.loads(answers["json"][1])["process_bytes"] is None
    lines = answers["doubt"][1].splitlines()
    assert lines[0].startswith("it fits: ") and lines[1].startswith("its process is likely to take "), lines[:2]
    assert lines[1].endswith(", SO IT MAY NOT FIT"), "imports alone take more than 40 MiB"
    assert not any("not counted: imports" in line for line in lines), "the range of the process counts them"


def test_eager_attention_keeps_scores(answers: Any) -> None:
    kernel, eager = (json.loads(answers[name][1])["by_kind"]["activations"] for name in ("json", "eager"))
    assert eager > kernel


def test_a_sequence_per_sample_needs_no_mask(answers: Any) -> None:
    status, text, errors = answers["flash"]
    assert status == 0, errors  # the kernel takes no mask
    assert json.loads(text)["by_kind"] == json.loads(answers["json"][1])["by_kind"]


def test_a_model_of_python_code(answers: Any) -> None:
    status, text, _ = answers["python"]
    assert status == 0
    assert json.loads(text)["checkpoint_bytes"] >= 12 * (16 * 16 + 16)


WRONG: list[tuple[list[str], list[str]]] = [
    (["{}", *RANKS, "--memory", "80 gigabytes"], ["--memory", "80 gigabytes", "80GiB"]),
    (["{}", *RANKS, "--link", "400GB"], ["--link", "400GB", "400Gbit"]),
    (["{}", *RANKS, "--tflops", "nan"], ["--tflops is nan"]),
    (["{}", *RANKS[:4], "--ranks", "6", "--ranks-per-node", "4"], ["--ranks 6", "--ranks-per-node 4"]),
    (["{}", *RANKS, "--plot", "{}/none/plan.png"], ["--plot", "cannot be written"]),
    (["{}", *RANKS, "--plot", "{}/none/plan.html"], ["--plot", "cannot be written"]),
    (["{}", *RANKS, "--sequence", "4096"], ["--sequence is 4096", "2048 positions", "--set max_position_embeddings=4096"]),
    ([*RANKS], ["usage: give MODEL with --config FILE, MODEL with --fit, or --from FILE"]),
    (["lama", *RANKS], ["lama", "model_type", "llama"]),
    (["nobody/nothing", *RANKS], ["'nobody/nothing' is not a local file or folder, and cannot be loaded from the Hub"]),
    (["{}/none", *RANKS], ["does not exist"]),
    (["{}/none/config.json", *RANKS], ["does not exist"]),
    (["{}", *RANKS, "--set", "hiden_size=128"], ["--set hiden_size", "did you mean hidden_size"]),
    (["python:{}/model.py:make", *RANKS, "--set", "wide=16"], ["TypeError", "wide"]),
    (["python:{}/wrong.py:make", *RANKS, "--device", "cpu"], ["RuntimeError"]),
    (["{}", *RANKS, "--trainable", "lora:rank=2"], ["lora:rank=2", "match:REGEX"]),
    (["{}", "--device", "cpu", "--ranks", "6", "--config", json.dumps({"tensor_parallel": {"autotp_size": 4}})], ["6 rank", "autotp_size"]),
    (["{}", "--config", json.dumps({"train_micro_batch_size_per_gpu": "1.5"})], ["micro_batch_size_per_gpu", '"1.5"', "a whole number"]),
    (["{}", "--config", json.dumps({"scheduler": {"type": "WarmupL"}})], ["`scheduler.type`", "did you mean WarmupLR?"]),
    (["{}", "--fit", "--memory", "1GB", "--config", json.dumps({"wandb": {"teem": "a"}})], ["`wandb.teem`", "did you mean `wandb.team`?"]),
    (["{}", "--config", json.dumps({"torch_autocast": {"enabled": True}})], ["torch_autocast", "--device cpu"]),
    (
        ["{}", "--config", json.dumps({"pipeline": {"stages": 2}}), "--ranks", "3"],
        ["pipeline.stages: pp 2", "3 rank(s)", "1 or 3 would fit"],
    ),
]


@pytest.mark.parametrize("index", range(len(WRONG)))
def test_wrong_input_is_status_two_with_one_line(folder: Path, capsys: pytest.CaptureFixture[str], index: int) -> None:
    line, words = WRONG[index]
    status = main(["plan", *(part.replace("{}", str(folder)) for part in line)])
    lines = [text for text in capsys.readouterr().err.splitlines() if text.startswith("hf-zero plan:")]
    assert status == 2
    assert len(lines) == 1
    for word in words:
        assert word in lines[0]


@pytest.mark.quick
def test_a_wrong_flag_does_not_wait_for_torch(folder: Path) -> None:
    fit = ["--fit", "--global-batch", "8", "--memory", "1GiB"]
    lines = [
        [],
        [str(folder), "--config", "{}", "--ranks", "0"],
        [str(folder), "--config", "nothere.json"],
        [f"{folder}/missing", "--config", "{}"],
        ["./missing", *fit],
        [str(folder), "--config", "{}", "--memory", "80 gigabytes"],
        [str(folder), "--config", "{}", "--plot", f"{folder}/none/plan.png"],
        [str(folder), "--fit"],
        [str(folder), *fit, "--axes", "sideways"],
        [str(folder), *fit, "--rate", "mem=3"],
    ]
    code = f"""
    import sys
    sys.path.insert(0, {str(REPO)!r})
    from hf_zero.cli import main
    for line in {lines!r}:
        print(main(["plan", *line]), "torch" in sys.modules, "transformers" in sys.modules)
    """
    assert run_python(code).splitlines() == ["2 False False"] * len(lines)


@pytest.mark.quick
def test_a_model_of_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the Hub had it; where there is no network it is the cache that does."""
    import transformers

    config = transformers.LlamaConfig(**{**LLAMA, "num_hidden_layers": 1, "max_position_embeddings": 77})
    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", lambda name: config if name == "some-body/A_model.1" else None)
    planned = build_model(ModelWish("some-body/A_model.1", {"num_hidden_layers": 2}))
    assert type(planned.module).__name__ == "LlamaForCausalLM" and len(planned.module.model.layers) == 2
    assert (planned.positions, sequence_of(None, 77), sequence_of(None, 0), sequence_of(4096, 0)) == (77, 77, 1024, 4096)


@pytest.mark.quick
def test_a_picture_without_matplotlib(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(pictures, "find_spec", lambda name: None)
    for call in (partial(pictures.require_place, tmp_path / "plan.png"), partial(pictures.canvas, 1, (1.0, 1.0))):
        with pytest.raises(UnsupportedError, match="--plot needs matplotlib: pip install matplotlib"):
            call("--plot")


@pytest.mark.quick
def test_auto_is_filled_from_sources_and_the_model(capsys: pytest.CaptureFixture[str]) -> None:
    """As Trainer fills it; a value without a source has its default, except whether a precision is on."""
    block = {"stage": 3, "stage3_prefetch_bucket_size": "auto", "stage3_param_persistence_threshold": "auto"}
    config = {"bf16": {"enabled": "auto"}, "zero_optimization": block, "train_micro_batch_size_per_gpu": "auto"}
    found = settled(config, sources={"bf16": True, "hidden_size": 64, "per_device_train_batch_size": 3})
    assert (found["bf16"], found["train_micro_batch_size_per_gpu"]) == ({"enabled": True}, 3)
    assert found["zero_optimization"] == {"stage": 3, "stage3_prefetch_bucket_size": 3686, "stage3_param_persistence_threshold": 640}
    assert settled({**config, "bf16": {"enabled": False}})["zero_optimization"] == {"stage": 3}
    text = json.dumps({**config, "fp16": {"enabled": "auto"}})
    for given, words in (
        ([], '`bf16.enabled` is "auto", which Trainer replaces by its argument; there are no training arguments here: give --source bf16='),
        (["--source", "bf16"], "--source 'bf16' is not NAME=VALUE"),
        (["--source", "bf=true"], "sources['bf'] is no source"),
        (["--source", "bf16=true", "--micro-batch", "0"], "--micro-batch is 0"),  # bf16 on means fp16 off: no question is left
    ):
        assert main(["plan", "llama", "--config", text, *given]) == 2
        assert words in capsys.readouterr().err, given


ELASTICITY = {
    "enabled": True, "max_train_batch_size": 24, "micro_batch_sizes": [2, 3, 4], "min_gpus": 1, "max_gpus": 8, "version": 0.1
}  # fmt: skip


@pytest.mark.quick
def test_samples_of_a_micro_step() -> None:
    micro = "train_micro_batch_size_per_gpu"
    assert [settled({micro: text})[micro] for text in (4, "4", 4.0, "auto")] == [4, 4, 4, 1]
    alone = settled({"train_batch_size": 16}, 2)
    assert (alone[micro], alone["train_batch_size"]) == (2, 16)  # the engine accumulates
    counted = settled({"train_batch_size": 16, "gradient_accumulation_steps": 4}, 2)
    assert "train_batch_size" not in counted
    with pytest.raises(ConfigError, match="--micro-batch is missing"):
        settled({"train_batch_size": 16})
    # with the number of ranks it follows, as in a run
    assert settled({"train_batch_size": 32, "gradient_accumulation_steps": 2}, ranks=2)[micro] == 8
    assert settled({"train_batch_size": 32, "sequence_parallel_size": 2}, ranks=4)[micro] == 16
    assert settled({"train_batch_size": "auto"}, ranks=2)[micro] == 1
    with pytest.raises(ConfigError, match="33 is not a multiple of 2"):
        settled({"train_batch_size": 33}, ranks=2)
    elastic = {"elasticity": ELASTICITY}
    assert [settled(elastic, ranks=count)[micro] for count in (2, 8)] == [4, 3]
    assert resolve(settled(elastic, ranks=2), world_size=2).config.train_micro_batch_size_per_gpu == 4


@pytest.mark.quick
@pytest.mark.parametrize(
    ("text", "nbytes"), [("80GiB", 80 * 2**30), ("80GB", 80 * 10**9), ("1.5 TB", 1_500_000_000_000), ("512B", 512), ("80gb", 80 * 10**9)]
)
def test_sizes(text: str, nbytes: int) -> None:
    assert bytes_of(text, "--memory") == nbytes


@pytest.mark.quick
@pytest.mark.parametrize("text", ["80", "80G", "", " ", "-1GB", "0GB", "iB", "1iB", "GiB", "80Gbit"])
def test_sizes_that_are_none(text: str) -> None:
    with pytest.raises(ConfigError, match="--memory"):
        bytes_of(text, "--memory")


@pytest.mark.quick
def test_rates() -> None:
    assert bytes_per_second_of("400Gbit", "--link") == 50e9
    assert bytes_per_second_of("8Mbit/s", "--link") == 1e6
    for text in ("400", "400GB", "400Gb", "0Gbit"):
        with pytest.raises(ConfigError, match="--link"):
            bytes_per_second_of(text, "--link")
    assert [size_text(value) for value in (0, 1536, 80 * 2**30)] == ["0 B", "1.50 KiB", "80.00 GiB"]
