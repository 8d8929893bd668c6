"""Compare hf_zero with PyTorch DDP on this machine in about a minute: `make demo`, or `python examples/demo/demo.py [--steps 120]`.

The demo trains a small GPT-2 on the Zen of Python four times, from the same weights and on the same data: with PyTorch DDP and with ZeRO
stages 2 and 3 on two CPU ranks, and on one rank, resumed from the checkpoint of two ranks. The four loss curves must be equal. Then it
loads the model that stage 3 saved with `from_pretrained` and continues the first two words.
Needs no network and no GPU. Writes `runs/demo/demo.png`, `runs/demo/demo.json` and the model in `runs/demo/model`.
"""

from __future__ import annotations

import argparse
import codecs
import contextlib
import gc
import io
import json
import os
import re
import shutil
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

RANKS, BATCH, LENGTH = 2, 16, 32  # BATCH: sequences per step on all ranks together; LENGTH: words per sequence
SHAPE = {"n_positions": LENGTH, "n_embd": 256, "n_layer": 2, "n_head": 4, "bos_token_id": 0, "eos_token_id": 0}
NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
LEARNING_RATE, CLIPPING = 1e-3, 1.0
METHODS = {"PyTorch DDP": None, "ZeRO stage 2": 2, "ZeRO stage 3": 3}
RESUMED = "resumed on 1 rank"
PROMPT, WRITTEN = ("Beautiful", "is"), 55  # words


@dataclass
class Curve:
    """The results of one run: losses by step, and bytes of state on one rank after a backward pass."""

    losses: dict[int, float] = field(default_factory=dict)
    state_bytes: int = 0  # weights, gradients and Adam's moments of one rank


def words() -> list[str]:
    """Return the words of the Zen of Python, from the module `this`, which prints it on import."""
    with contextlib.redirect_stdout(io.StringIO()):
        import this
    return re.findall(r"\S+|\n", codecs.decode(this.s, "rot13"))


def vocabulary() -> list[str]:
    """Return the distinct words of the text; the token of a word is its index."""
    return sorted(set(words()))


def batch_of(step: int) -> Any:
    """Return the tokens of one step, (BATCH, LENGTH) int64; they are equal for all methods and numbers of ranks."""
    import torch

    known = {word: token for token, word in enumerate(vocabulary())}
    text = torch.tensor([known[word] for word in words()])
    starts = torch.randint(0, len(text) - LENGTH + 1, (BATCH,), generator=torch.Generator().manual_seed(step))
    return torch.stack([text[start : start + LENGTH] for start in starts.tolist()])


class Run:
    """A model in training under one method.

    Args:
        stage: ZeRO stage; None for DDP.
    """

    def __init__(self, stage: int | None) -> None:
        import torch
        import torch.distributed as dist
        from transformers import GPT2Config, GPT2LMHeadModel

        import hf_zero

        torch.manual_seed(0)
        model = GPT2LMHeadModel(GPT2Config(vocab_size=len(vocabulary()), use_cache=False, **SHAPE, **NO_DROPOUT)).train()
        optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
        self.zero, self.step = stage is not None, 0
        if stage is None:
            self.model: Any = torch.nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
            self.optimizer = optimizer
        else:
            micro = BATCH // dist.get_world_size()
            config = {"zero_optimization": {"stage": stage}, "train_micro_batch_size_per_gpu": micro, "gradient_clipping": CLIPPING}
            self.model = hf_zero.initialize(model=model, optimizer=optimizer, config=config)[0]

    def backward(self) -> float:
        """Run forward and backward of the next step, and return the mean loss over all ranks."""
        import torch.distributed as dist

        self.step += 1
        mine = batch_of(self.step).chunk(dist.get_world_size())[dist.get_rank()]
        loss = self.model(input_ids=mine, labels=mine).loss
        self.model.backward(loss) if self.zero else loss.backward()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        return mean.item() / dist.get_world_size()

    def update(self) -> None:
        """Run the optimizer step."""
        import torch

        if self.zero:
            self.model.step()
        else:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), CLIPPING)
            self.optimizer.step()
            self.optimizer.zero_grad()

    def close(self) -> None:
        """Free the engine's memory and remove its hooks."""
        if self.zero:
            self.model.destroy()


def held_bytes() -> int:
    """Return the bytes of all tensors that this process holds; tensors that share memory count once."""
    import torch

    gc.collect()
    tensors = [found for found in gc.get_objects() if issubclass(type(found), torch.Tensor)]
    # Read gradients as torch holds them: under ZeRO a script that reads `.grad` itself is warned, or refused.
    with torch._C.DisableTorchFunctionSubclass():
        gradients = [torch._C.TensorBase.grad.__get__(tensor) for tensor in tensors if tensor.is_leaf]
    tensors += [gradient for gradient in gradients if gradient is not None]
    storages = [tensor.untyped_storage() for tensor in tensors if tensor.device.type == "cpu"]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def state_bytes(stage: int | None) -> int:
    """Return the bytes that a run adds to this process' tensors, after its second backward pass."""
    before = held_bytes()
    run = Run(stage)
    run.backward()
    run.update()
    run.backward()
    added = held_bytes() - before
    run.close()
    return added


def train_all(rank: int, port: int, folder: Path, steps: int, results: Any) -> None:
    """Train with each method as one of two ranks; the first rank reports all losses and saves the model of stage 3."""
    start(rank, RANKS, port)
    for name, stage in METHODS.items():
        held = state_bytes(stage)
        run = Run(stage)
        for step in range(1, steps + 1):
            loss = run.backward()
            run.update()
            if rank == 0:
                results.put((name, step, loss, held))
            if stage == 3 and step == steps // 2:
                run.model.save_checkpoint(folder / "checkpoint")
        if stage == 3:
            run.model.save_16bit_model(folder / "model", "model.safetensors")
            if rank == 0:
                run.model.module.config.save_pretrained(folder / "model")
        run.close()


def start(rank: int, ranks: int, port: int) -> None:
    """Set torchrun's environment variables, join the process group, and show only warnings."""
    os.environ |= {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_RANK": str(rank),
    }
    os.environ["HF_ZERO_LOG_LEVEL"] = "warning"
    import torch
    import transformers

    import hf_zero

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(1)  # more threads would only slow down such a small model
    hf_zero.init_distributed()


def free_port() -> int:
    """Return a free port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def train_on_two_ranks(folder: Path, steps: int, report: Callable[[str, int, float], None]) -> dict[str, Curve]:
    """Run all methods on two ranks, one after the other in the same two processes, and return their curves."""
    import torch.multiprocessing as processes

    results = processes.get_context("spawn").SimpleQueue()
    ranks = processes.start_processes(train_all, (free_port(), folder, steps, results), RANKS, join=False, start_method="spawn")
    curves = {name: Curve() for name in METHODS}
    ended = False
    while not ended or not results.empty():
        ended = ended or ranks.join(timeout=0.05)
        while not results.empty():
            name, step, loss, held = results.get()
            curves[name].losses[step], curves[name].state_bytes = loss, held
            report(name, step, loss)
    return curves


def resume_on_one_rank(folder: Path, steps: int, report: Callable[[str, int, float], None]) -> Curve:
    """Continue stage 3 on one rank, in this process, from the checkpoint that two ranks wrote in the middle of their run."""
    start(0, 1, free_port())
    run, curve = Run(3), Curve()
    run.model.load_checkpoint(folder / "checkpoint")
    run.step = run.model.global_steps
    while run.step < steps:
        loss = run.backward()
        curve.losses[run.step] = loss
        run.update()
        report(RESUMED, run.step, loss)
    return curve


def recite(folder: Path) -> str:
    """Load the saved model with from_pretrained and return its continuation of the first two words."""
    import torch
    from transformers import AutoModelForCausalLM

    model, known = AutoModelForCausalLM.from_pretrained(folder).eval(), vocabulary()
    tokens = torch.tensor([[known.index(word) for word in PROMPT]])
    with torch.no_grad():
        for _ in range(WRITTEN):  # the model was never trained to predict a word after the last position
            following = model(input_ids=tokens[:, 1 - LENGTH :]).logits[:, -1].argmax(dim=-1)
            tokens = torch.cat([tokens, following[:, None]], dim=1)
    lines = " ".join(known[token] for token in tokens[0].tolist()).split("\n")
    return "\n".join(line.strip() for line in lines)


def largest_difference(curve: Curve, reference: Curve) -> float:
    """Return the largest difference of the two losses over the steps of ``curve``."""
    return max(abs(loss - reference.losses[step]) for step, loss in curve.losses.items())


def draw(path: Path, curves: dict[str, Curve]) -> None:
    """Plot the loss curves, their differences from DDP, and the memory of each method."""
    from matplotlib.figure import Figure

    plain = curves["PyTorch DDP"]
    styles = {"PyTorch DDP": ("#bbbbbb", 7, "-"), "ZeRO stage 2": ("#4292c6", 3.5, "-"), "ZeRO stage 3": ("#08306b", 1.2, "-")}
    styles[RESUMED] = ("#d94801", 2.0, "--")
    figure = Figure(figsize=(13, 4), layout="constrained")
    losses, apart, memory = figure.subplots(1, 3, width_ratios=(5, 4, 3))
    for name, curve in curves.items():
        color, width, line = styles[name]
        losses.plot(list(curve.losses), list(curve.losses.values()), line, color=color, linewidth=width, label=name)
        if curve is not plain:
            distances = [abs(loss - plain.losses[step]) for step, loss in curve.losses.items()]
            apart.plot(list(curve.losses), distances, line, color=color, linewidth=max(1.2, width / 2), label=name)
    losses.set(title="loss: four curves, one line", xlabel="optimizer step", ylabel="loss (nats per word)", ylim=(0, None))
    apart.set(title="distance from PyTorch DDP", xlabel="optimizer step", ylabel="difference of the losses (nats per word)")
    apart.set_yscale("symlog", linthresh=1e-7)
    apart.set_ylim(0, 1)
    sizes = {name: curve.state_bytes / 2**20 for name, curve in curves.items() if curve.state_bytes}
    bars = memory.bar([name.replace(" ", "\n", 1) for name in sizes], list(sizes.values()), color=[styles[name][0] for name in sizes])
    memory.bar_label(bars, [f"{size:.1f}" for size in sizes.values()])
    memory.set(title="memory per rank, two ranks", ylabel="weights, gradients, Adam's moments (MiB)", ylim=(0, 1.1 * max(sizes.values())))
    for axes in (losses, apart, memory):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color="#e5e5e5")
        axes.set_axisbelow(True)
    losses.legend(frameon=False)
    apart.legend(frameon=False)
    figure.savefig(path, dpi=120)


def show(folder: Path, curves: dict[str, Curve], text: str, steps: int, seconds: float) -> None:
    """Print the table and the model's text."""
    from rich.console import Console
    from rich.table import Table

    plain = curves["PyTorch DDP"]
    table = Table(title=f"The same model, weights and data, {steps} steps in fp32")
    for heading in ("method", "ranks", "last loss", "difference", "memory", "of DDP's"):
        table.add_column(heading, justify="left" if heading == "method" else "right")
    for name, curve in curves.items():
        difference = "-" if curve is plain else f"{largest_difference(curve, plain):.1e}"
        memory = [f"{curve.state_bytes / 2**20:.1f} MiB", f"{curve.state_bytes / plain.state_bytes:.0%}"] if curve.state_bytes else ["", ""]
        table.add_row(name, "1" if name == RESUMED else str(RANKS), f"{curve.losses[steps]:.6f}", difference, *memory)
    console = Console()
    console.print(table)
    console.print("Difference: largest difference from PyTorch DDP's loss at the same step.", style="dim")
    console.print("Memory: weights, gradients and Adam's moments of one rank after a backward pass.", style="dim")
    console.print(f"Resumed: from step {steps // 2}, from a checkpoint that {RANKS} ranks wrote.", style="dim")
    console.print(f"\nThe model that stage 3 saved, reloaded, continues [bold]{' '.join(PROMPT)}[/bold]:\n")
    console.print(text, style="green", highlight=False)
    console.print(f"\nPicture: {folder / 'demo.png'}\nModel:   {folder / 'model'}\n{seconds:.0f} seconds", soft_wrap=True)


def main() -> None:
    """Run all four methods, print the results and draw the plots."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=60, help="optimizer steps of each run, an even number (default 60)")
    parser.add_argument("--output_dir", type=Path, default=Path("runs/demo"), help="where everything goes (default runs/demo)")
    args = parser.parse_args()
    if args.steps < 2 or args.steps % 2:
        parser.error(f"--steps {args.steps}: give an even number, at least 2; the checkpoint is written in the middle.")
    os.environ |= {"CUDA_VISIBLE_DEVICES": "", "HF_ZERO_LOG_LEVEL": "warning", "KINETO_LOG_LEVEL": "99"}  # set before torch is imported
    began = time.monotonic()
    shutil.rmtree(args.output_dir / "checkpoint", ignore_errors=True)  # written by an earlier demo
    args.output_dir.mkdir(parents=True, exist_ok=True)
    columns = (
        TextColumn("{task.description:<26}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[loss]}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as progress:
        bars = {name: progress.add_task(name, total=args.steps, loss="", start=False) for name in METHODS}
        bars[RESUMED] = progress.add_task(RESUMED, total=args.steps, loss="", start=False)

        def report(name: str, step: int, loss: float) -> None:
            progress.start_task(bars[name])
            progress.update(bars[name], completed=step, loss=f"loss {loss:.3f}")

        curves = train_on_two_ranks(args.output_dir, args.steps, report)
        curves[RESUMED] = resume_on_one_rank(args.output_dir, args.steps, report)
    text = recite(args.output_dir / "model")
    numbers = {name: {"losses": curve.losses, "state_bytes": curve.state_bytes} for name, curve in curves.items()}
    (args.output_dir / "demo.json").write_text(json.dumps(numbers | {"text": text}, indent=1) + "\n", encoding="utf-8")
    draw(args.output_dir / "demo.png", curves)
    show(args.output_dir, curves, text, args.steps, time.monotonic() - began)


if __name__ == "__main__":
    main()
