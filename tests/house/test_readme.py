"""What the pages promise: links lead somewhere, printed commands and configurations are understood, the quickstarts run as printed."""

from __future__ import annotations

import argparse
import json
import re
import shlex
import sys
import textwrap
from pathlib import Path

import pytest

from tests.support import processes, ranks
from tests.support.examples import EXAMPLES, REPOSITORY, modules

PAGES = sorted([*REPOSITORY.glob("*.md"), *REPOSITORY.glob("docs/*.md"), *EXAMPLES.rglob("*.md")])
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SCRIPT_OF_EXAMPLE = re.compile(r"examples/(\w+)/(run_\w+)\.py")


def name_of(page: Path) -> str:
    return str(page.relative_to(REPOSITORY))


def fenced(page: Path, language: str) -> list[str]:
    """Contents of the fenced blocks in one language."""
    return [text for found, text in FENCE.findall(page.read_text()) if found == language]


def printed_lines(page: Path) -> list[str]:
    """Lines of blocks, fenced or indented, with continued ones joined."""
    text = page.read_text()
    blocks = [block for _, block in FENCE.findall(text)]
    blocks += [line[4:] for line in text.splitlines(keepends=True) if line.startswith("    ")]
    return "".join(blocks).replace("\\\n", " ").splitlines()


def anchors(page: Path) -> set[str]:
    """Names under which a page's headings can be linked to."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#\s]*#?[^)\s]*)\)", page.read_text()):
        if target.startswith(("http://", "https://")):
            continue
        path, _, anchor = target.partition("#")
        found = (page.parent / path).resolve() if path else page
        assert found.exists(), f"{name_of(page)} links to {target}"
        assert not anchor or anchor in anchors(found), f"{name_of(page)} links to {target}"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_files_in_printed_commands_exist(page: Path) -> None:
    for line in printed_lines(page):
        for word in re.findall(r"(?:^|(?<=\s))(?:examples|benchmarks|tests|docs)/[\w./-]+\.(?:py|json|yaml|md)\b", line):
            assert word.startswith("benchmarks/results/") or (REPOSITORY / word).is_file(), f"{name_of(page)}: {line}"


@pytest.mark.parametrize("page", [page for page in PAGES if fenced(page, "json")], ids=name_of)
def test_printed_configurations_are_accepted_without_a_warning(page: Path) -> None:
    from hf_zero.config.resolve import resolve

    for block in fenced(page, "json"):
        assert resolve({"train_micro_batch_size_per_gpu": 16} | json.loads(block), world_size=8, strict=True).warnings == []


def known_flags(folder: str, script: str) -> set[str]:
    """Flags of a script of an example, by its own parser."""
    parsers: list[argparse.ArgumentParser] = []

    def remember(parser: argparse.ArgumentParser, *_: object, **__: object) -> None:
        parsers.append(parser)
        raise SystemExit

    from transformers import HfArgumentParser

    with modules(folder, "flags", script) as found, pytest.MonkeyPatch.context() as patch:
        patch.setattr(found.flags.Parser, "parse_args", remember, raising=False)
        patch.setattr(HfArgumentParser, "parse_args_into_dataclasses", remember)
        with pytest.raises(SystemExit):
            getattr(found, script).main()
    return set(parsers[0]._option_string_actions)


def test_flags_in_printed_commands_are_known() -> None:
    printed: dict[tuple[str, str], dict[str, str]] = {}
    for page in PAGES:
        for line in printed_lines(page):
            found = SCRIPT_OF_EXAMPLE.search(line)
            if found and not line.startswith(("|", "Nothing")):
                flags = [word for word in shlex.split(line[found.end() :], comments=True) if word.startswith("--")]
                printed.setdefault((found[1], found[2]), {}).update(dict.fromkeys(flags, f"{name_of(page)}: {line}"))
    assert len(printed) == 8, "a script of the examples without a printed command"
    for (folder, script), flags in printed.items():
        known = known_flags(folder, script)
        for flag, line in flags.items():
            assert flag in known, f"{flag} in {line}"


# Quickstarts

TINY = """
    import torch
    from types import SimpleNamespace

    class Tiny(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))

        def forward(self, x, y):
            return SimpleNamespace(loss=(self.net(x) - y).square().mean())

    torch.manual_seed(0)
    samples = [{"x": torch.randn(8), "y": torch.randn(1)} for _ in range(16)]
    """
GPT2 = """
    from transformers import AutoConfig, AutoModelForCausalLM
    config = AutoConfig.for_model("gpt2", n_layer=1, n_embd=16, n_head=2, vocab_size=32, n_positions=8, bos_token_id=0, eos_token_id=0)
    samples = [{"input_ids": torch.arange(8) + i, "labels": torch.arange(8) + i} for i in range(16)]
    """
CONFIG = {
    "zero_optimization": {"stage": 3},
    "train_micro_batch_size_per_gpu": "auto",
    "optimizer": {"type": "AdamW", "params": {"lr": "auto"}},
}
LAUNCHER = """
    compute_environment: LOCAL_MACHINE
    distributed_type: DEEPSPEED
    deepspeed_config: {gradient_accumulation_steps: 1, gradient_clipping: 1.0, offload_optimizer_device: none, offload_param_device: none,
      zero3_init_flag: true, zero3_save_16bit_model: true, zero_stage: 3}
    machine_rank: 0
    main_training_function: main
    mixed_precision: 'no'
    num_machines: 1
    num_processes: 2
    use_cpu: false
    """
# Lines of two ranks would run into each other.
TORCHRUN = ["torch.distributed.run", "--standalone", "--nproc_per_node", "2", "--local-ranks-filter", "0"]


def run_on_two_ranks(folder: Path, launcher: list[str], *parts: str) -> list[str]:
    """Run the parts of a script one behind the other; lines that it printed (under ``TORCHRUN``, that its first rank did)."""
    (folder / "train.py").write_text("\n".join(map(textwrap.dedent, parts)))
    return processes.run([sys.executable, "-m", *launcher, "train.py"], cwd=folder, timeout=150).splitlines()


def quickstart(heading: str) -> str:
    """The Python of one section of the front page."""
    page = (REPOSITORY / "README.md").read_text()
    section = page[page.index(f"## {heading}") :].split("\n## ")[0]
    return next(text for language, text in FENCE.findall(section) if language == "python")


@pytest.mark.slow
def test_quickstart_without_trainer(tmp_path: Path) -> None:
    (tmp_path / "accelerate.yaml").write_text(textwrap.dedent(LAUNCHER))
    before = """
        model = AutoModelForCausalLM.from_config(config)
        loader = torch.utils.data.DataLoader(samples, batch_size=4)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
        """
    after = """
        if accelerator.is_main_process:
            from transformers.integrations.deepspeed import unset_hf_deepspeed_config
            unset_hf_deepspeed_config()
            saved = AutoModelForCausalLM.from_pretrained("out")
            print("PARAMETERS", sum(parameter.numel() for parameter in saved.parameters()), type(model).__module__)
        """
    port = str(ranks._free_port())  # 0 means a free one to newer accelerate only
    launcher = ["accelerate.commands.accelerate_cli", "launch", "--config_file", "accelerate.yaml", "--main_process_port", port]
    printed = run_on_two_ranks(tmp_path, launcher, "import torch", GPT2, before, quickstart("Quickstart: a script without Trainer"), after)
    (line,) = [line for line in printed if line.startswith("PARAMETERS")]
    assert int(line.split()[1]) > 1000
    assert line.split()[2].startswith("hf_zero.")


@pytest.mark.slow  # tests/accelerate/test_accelerate_launch.py runs such a script
def test_quickstart_of_a_deepspeed_script(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text(json.dumps(CONFIG | {"train_micro_batch_size_per_gpu": 4}))
    before = """
        model = Tiny()
        loader = torch.utils.data.DataLoader(samples, batch_size=4)
        """
    after = "print('STEPS', engine.global_steps)"
    printed = run_on_two_ranks(tmp_path, TORCHRUN, TINY, before, quickstart("Quickstart: a DeepSpeed script"), after)
    norms = [float(line) for line in printed if re.fullmatch(r"\d+\.\d+(e-\d+)?", line)]
    assert len(norms) == 4 and min(norms) > 0
    assert "STEPS 4" in printed


@pytest.mark.slow
@pytest.mark.parametrize("line", [0, 1], ids=["json", "fields"])
def test_quickstart_with_trainer(tmp_path: Path, line: int) -> None:
    (tmp_path / "ds.json").write_text(json.dumps(CONFIG | {"bf16": {"enabled": "auto"}}))
    chosen = quickstart("Quickstart: Trainer").splitlines()[line]
    after = """
        model = AutoModelForCausalLM.from_config(config)
        trainer = Trainer(model=model, args=args, train_dataset=samples)
        trainer.train()
        print("ENGINE", type(trainer.model_wrapped).__module__, trainer.model_wrapped.zero_optimization_stage())
        """
    imports = "import torch, hf_zero\nfrom transformers import Trainer, TrainingArguments"
    printed = run_on_two_ranks(tmp_path, TORCHRUN, imports, GPT2, chosen, after)
    engines = [line for line in printed if line.startswith("ENGINE")]
    assert [" hf_zero." in line and line.endswith(" 3") for line in engines] == [True]


@pytest.mark.slow
def test_the_comparison_of_the_migration_page(tmp_path: Path) -> None:
    """Its two scripts run as printed; the run is compared with a changed copy of its rows."""
    script, comparison = fenced(REPOSITORY / "docs" / "migrate-from-deepspeed.md", "python")
    (tmp_path / "engine.py").write_text(script)
    (tmp_path / "compare.py").write_text(comparison)
    processes.run([sys.executable, "-m", *TORCHRUN, "engine.py", "2"], cwd=tmp_path, env={"HF_ZERO": "1"}, timeout=150)
    rows = json.loads((tmp_path / "run1.json").read_text())
    assert len(rows) == 20 and all(row["loss"] > 0 and row["grad_norm"] > 0 for row in rows)
    rows[3]["loss"] *= 1.5
    (tmp_path / "run0.json").write_text(json.dumps(rows))
    printed = processes.run([sys.executable, "compare.py"], cwd=tmp_path)
    assert printed.splitlines() == ["loss largest relative difference: 3.3e-01", "grad_norm largest relative difference: 0.0e+00"]
