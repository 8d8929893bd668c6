"""Training loops with Accelerate, drawn at random, under DDP and under ZeRO, which must see and save the same values.

By hand: ``python -m tests.accelerate.drawn_loops --count 30 --seed 1``, ``python -m tests.accelerate.drawn_loops --run "{...}"`` for one
that was printed.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tests.accelerate.loop_objects import accelerator_of, config_of, loader_of, model_of, optimizer_of
from tests.accelerate.loop_options import Drawn, changed, draw, full
from tests.support import ranks, trainers
from tests.support.sequences import loss_over_slices
from tests.trainer.drawn_options import AXES
from tests.trainer.drawn_runs import differences, errors_of, outcome_of, report, saved

# -- one loop ----------------------------------------------------------------------------------------------------------


class Counter:
    """State of a script that ``register_for_checkpointing`` saves."""

    def __init__(self) -> None:
        self.value = 0

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


class Loop:
    """One training script: its objects, and all that it sees."""

    def __init__(self, run: Drawn, models: Path, folder: Path, config: Any) -> None:
        self.run, self.folder = run, folder
        self.accelerator = accelerator_of(run, folder, config)
        torch.manual_seed(3)
        model = model_of(run, models)
        optimizer = optimizer_of(run, model)
        self.loader, self.held = loader_of(run, run["rows"], 1, True), loader_of(run, 4 * run["batch"] if run["axis"] else 7, 2, False)
        self.scheduler: Any = None
        if run["scheduler"]:
            self.scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: max(0.1, 1.0 - 0.07 * step))
        self._prepare(model, optimizer)
        self._add_second(models)
        self.counter = Counter()
        if run["registered"]:
            self.accelerator.register_for_checkpointing(self.counter)
        self.epoch = self.steps = 0
        self.seen: dict[str, list[Any]] = {name: [] for name in ("loss", "norm", "lr", "eval", "read", "second", "counter")}

    def _prepare(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        prepare, kind = self.accelerator.prepare, self.run["prepare"]
        if kind == "together":
            self.model, self.optimizer, self.loader, self.held = prepare(model, optimizer, self.loader, self.held)
        elif kind == "apart":
            self.loader, self.held = prepare(self.loader, self.held)
            self.model, self.optimizer = prepare(model, optimizer)
        elif kind == "optimizer first":
            self.optimizer, self.loader, self.model, self.held = prepare(optimizer, self.loader, model, self.held)
        else:
            self.model, self.optimizer = prepare(model, optimizer)
            self.loader, self.held = self.accelerator.prepare_data_loader(self.loader), prepare(self.held)
        if self.scheduler is not None and self.run["scheduler"] != "by hand":
            self.scheduler = prepare(self.scheduler)
        if self.run["unwraps"]:
            self.accelerator.unwrap_model(self.model).train()

    def _add_second(self, models: Path) -> None:
        """Make a second model, which the loss of the first needs, or which is trained beside it."""
        kind = self.run["second"]
        if not kind:
            return
        second: Any = trainers.load(models, "llama" if self.run["model"] == "gpt2" else "gpt2")
        if kind == "teacher":
            self.second = second.eval().requires_grad_(False)
        elif kind == "prepared teacher":
            second.eval().requires_grad_(False)
            if self.accelerator.state.deepspeed_plugin is None:
                self.second = self.accelerator.prepare_model(second, evaluation_mode=True)  # DDP refuses it
            else:
                self.second = self.accelerator.prepare(second)
        else:
            self.second, self.second_optimizer = self.accelerator.prepare(second, torch.optim.SGD(second.parameters(), lr=0.1))

    # -- losses

    def loss_with_second(self, batch: Any, index: int) -> torch.Tensor:
        loss, kind = self.loss_of(batch, index), self.run["second"]
        if not kind or kind.startswith("trained"):
            return loss
        with torch.no_grad():
            wanted = self.second(input_ids=batch["input_ids"])["logits"].float().softmax(-1)
        found = self.model(input_ids=batch["input_ids"])["logits"].float().log_softmax(-1)
        return loss + nn.functional.kl_div(found, wanted, reduction="batchmean") / 8

    def _train_second(self, batch: Any) -> None:
        if self.run["second"] not in ("trained", "trained in turn") or self.run["second"] == "trained in turn" and self.steps % 2:
            return
        loss = self.second(input_ids=batch["input_ids"], labels=batch["input_ids"]).loss
        self.accelerator.backward(loss * self.run["accumulation"])
        self.second_optimizer.step()
        self.second_optimizer.zero_grad()
        self.seen["second"].append(float(self.accelerator.reduce(loss.detach().float(), "mean")))

    def loss_of(self, batch: Any, index: int) -> torch.Tensor:
        kind, model = self.run["loss"], self.model
        if "shift_labels" in batch:
            loss = loss_over_slices(model, batch, model.seq_parallel_group)
            return loss * (1 + index) if kind == "scaled" else loss
        if self.run["model"] != "mlp" and kind in ("model", "skips"):
            return model(**batch).loss  # type: ignore[no-any-return]
        if kind == "two forwards":
            return sum(
                (self._own(model(input_ids=rows), rows) for rows in (batch["input_ids"], batch["input_ids"].flip(0))), torch.zeros(())
            )
        outputs = model(input_ids=batch["input_ids"])
        if kind == "tokens":
            shifted = batch["labels"][:, 1:]
            total = nn.functional.cross_entropy(
                outputs["logits"][:, :-1].flatten(0, 1).float(), shifted.flatten(), ignore_index=-100, reduction="sum"
            )
            count = self.accelerator.reduce((shifted != -100).sum(), "sum")
            return total * self.accelerator.num_processes / count  # type: ignore[no-any-return]
        loss = self._own(outputs, batch["input_ids"])
        if kind == "weighted":
            return loss * (1.0 + batch["input_ids"].float().mean() / 100) + 1e-4 * outputs["logits"].float().pow(2).mean()
        if kind == "penalty":
            head = self.accelerator.unwrap_model(model).get_output_embeddings() if self.run["model"] != "mlp" else model.module.head
            return loss + 1e-2 * head.weight.float().pow(2).sum()
        return loss * (1 + index) if kind == "scaled" else loss

    @staticmethod
    def _own(outputs: Any, ids: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(outputs["logits"][:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())

    # -- steps

    def train(self, last: int | None = None, skipped: int = 0) -> None:
        """Train to the end of the epochs, or to optimizer step ``last``; leave out the first batches of the epoch that it begins in."""
        while self.epoch < self.run["epochs"]:
            self.model.train()
            if hasattr(self.loader, "set_epoch"):
                self.loader.set_epoch(self.epoch)
            loader = self.accelerator.skip_first_batches(self.loader, skipped) if skipped else self.loader
            count = None
            with contextlib.suppress(TypeError):
                count = len(self.loader)
            for index, batch in enumerate(loader, skipped):
                if self.run["loss"] == "skips" and index == 2:
                    continue
                if self._micro_step(batch, index, index + 1 == count) and (self.steps == last or self._stops()):
                    self.batch = index + 1
                    return
            skipped = 0
            self._evaluate()
            self.epoch += 1

    def _stops(self) -> bool:
        if self.run["change"] != "stops":
            return False
        if self.steps == 3 and ranks.rank() == ranks.world() - 1:
            self.accelerator.set_trigger()
        return bool(self.accelerator.check_trigger())

    def _micro_step(self, batch: Any, index: int, ends: bool) -> bool:
        """Take one micro-step; return whether it ended with an update."""
        run, every = self.run, self.run["accumulation"]
        if run["pattern"] == "accumulate":
            with self.accelerator.accumulate(self.model):
                with self.accelerator.autocast() if run["autocast"] else contextlib.nullcontext():
                    loss = self.loss_with_second(batch, index)
                updates = self.accelerator.sync_gradients
                self._clear("before")
                self.accelerator.backward(loss)
                self._update(updates)
                if updates or run["scheduler"] != "by hand":
                    self._schedule()
                self._clear("after")
        else:
            updates = (index + 1) % every == 0 or ends
            if run["zero"] == "before" and index % every == 0:
                self._clear("before")
            quiet = run["pattern"] == "no_sync" and not updates
            with self.accelerator.no_sync(self.model) if quiet else contextlib.nullcontext():
                loss = self.loss_with_second(batch, index) / every
                self.accelerator.backward(loss)
            if updates:
                self._update(True)
                self._schedule()
                self._clear("after")
        self.seen["loss"].append(float(self.accelerator.reduce(loss.detach().float(), "mean")))
        if updates:
            self._train_second(batch)
            self.steps += 1
            self.counter.value += 1
            self.seen["counter"].append(self.counter.value)
            self._between()
        return bool(updates)

    def _clip_with_torch(self) -> None:
        kind, params = self.run["torch clip"], list(self.model.parameters())
        if kind == "norm":
            self.seen["norm"].append(float(torch.nn.utils.clip_grad_norm_(params, 0.5)))
        elif kind == "value":
            torch.nn.utils.clip_grad_value_(params, 0.01)
        elif kind:
            self.accelerator.clip_grad_value_(params, 0.01)

    def _update(self, updates: bool) -> None:
        if self.run["clip"] and (updates or self.run["clip"] == "always"):
            norm = self.accelerator.clip_grad_norm_(self.model.parameters(), 0.5)
            self.seen["norm"].append(float(norm))
        if updates:
            self._clip_with_torch()
        if self.run["guard"] and self.steps == 2:
            if self.run["guard"] == "drops":
                self.optimizer.zero_grad()
            return
        self.optimizer.step()

    def _schedule(self) -> None:
        if self.scheduler is not None:
            self.scheduler.step()

    def _clear(self, place: str) -> None:
        kind = self.run["zero"]
        if kind == "before" and place == "before" and self.run["pattern"] == "accumulate":
            if self.run["accumulation"] == 1:  # else it belongs after the step
                self.optimizer.zero_grad()
            return
        if place == "before" and kind != "before":
            return
        if kind == "kept":
            self.optimizer.zero_grad(set_to_none=False)
        elif kind == "module":
            self.model.zero_grad() if self.run["pattern"] != "accumulate" or self.accelerator.sync_gradients else None
        else:
            self.optimizer.zero_grad()
            if kind == "both":
                self.optimizer.zero_grad()

    def _between(self) -> None:
        """Do what scripts do between two updates."""
        change = self.run["change"] if self.steps == 2 else None
        model = self.accelerator.unwrap_model(self.model)
        if change == "freezes":
            list(model.parameters())[-1].requires_grad_(False)
        if change in ("lr", "group lr"):
            for group in self.optimizer.param_groups if change == "lr" else self.optimizer.param_groups[:1]:
                group["lr"] *= 0.5
        if change == "weights":
            from hf_zero.zero import GatheredParameters

            params = list(model.parameters())
            with GatheredParameters(params, modifier_rank=0), torch.no_grad():
                for param in params:
                    param.mul_(0.99)
        self.seen["lr"].append([group["lr"] for group in self.optimizer.param_groups])
        if self.run["reads"] == "norms":
            self.seen["read"].append({name: float(value.norm()) for name, value in trainers.weights_of(model).items()})
        if self.run["reads"] == "state":
            state = self.accelerator.get_state_dict(self.model)
            self.seen["read"].append({name: float(value.float().norm()) for name, value in state.items()} if ranks.rank() == 0 else {})

    def _evaluate(self) -> None:
        kind = self.run["eval"]
        if not kind:
            return
        self.model.eval()
        found: list[torch.Tensor] = []
        for index, batch in enumerate(self.held):
            if kind == "loss":
                with torch.no_grad():
                    found.append(self.accelerator.reduce(self.loss_with_second(batch, index).detach().float(), "mean")[None])
                continue
            with torch.no_grad():
                logits = self.model(input_ids=batch["input_ids"])["logits"].float().mean(dim=(1, 2))
            if kind == "metrics":
                found.append(self.accelerator.gather_for_metrics(logits))
            elif kind == "gather":
                found.append(self.accelerator.gather(logits))
            elif kind == "reduce":
                found.append(self.accelerator.reduce(logits.sum(), "sum")[None])
            elif kind == "objects":
                found.append(torch.tensor(self.accelerator.gather_for_metrics(logits.tolist(), use_gather_object=True)))
            else:
                found.append(self.accelerator.gather(self.accelerator.pad_across_processes(logits, dim=0, pad_index=0.0)))
        self.seen["eval"].append(torch.cat(found))
        self.model.train()

    # -- files

    def save(self) -> dict[str, torch.Tensor]:
        kind, place = self.run["save"], self.folder / "saved"
        if kind == "save_model":
            self.accelerator.save_model(self.model, str(place))
        elif kind == "unwrapped":
            state = self.accelerator.get_state_dict(self.model)
            self.accelerator.unwrap_model(self.model).save_pretrained(
                place, is_main_process=self.accelerator.is_main_process, save_function=self.accelerator.save, state_dict=state
            )
        elif kind == "state_dict":
            state = self.accelerator.get_state_dict(self.model)
            return {name: value.float() for name, value in state.items()} if ranks.rank() == 0 else {}
        self.accelerator.wait_for_everyone()
        return saved(place) if kind and ranks.rank() == 0 else {}


def result_of(run: Drawn, models: Path, folder: Path, config: Any) -> dict[str, Any]:
    """Train, resume if the run says so, save; return everything that a user sees."""
    loop = Loop(run, models, folder, config)
    if run["resume"]:
        loop.train(last=2)
        loop.accelerator.save_state(str(folder / "state"))
        if run["resume"] == "starts again":
            epoch, steps, batch = loop.epoch, loop.steps, loop.batch
            loop = Loop(run, models, folder, config)
            loop.epoch, loop.steps, loop.batch = epoch, steps, batch
        else:
            done = (loop.epoch, loop.steps, loop.batch)
            loop.train(last=3)
            loop.epoch, loop.steps, loop.batch = done
        loop.accelerator.load_state(str(folder / "state"))
        loop.train(skipped=loop.batch)
    else:
        loop.train()
        if run["twice"]:
            loop.accelerator.free_memory()
            loop = Loop(run, models, folder, config)
            loop.train()
    weights = trainers.weights_of(loop.accelerator.unwrap_model(loop.model))
    return {**loop.seen, "steps": loop.steps, "saved": loop.save(), "weights": weights}


def judged(run: Drawn, plain: Any, zero: Any) -> list[str]:
    """Return the differences of two outcomes, or one line with an error. In bf16 DDP keeps fp32 weights, so only losses and norms count."""
    if lines := errors_of(plain, zero):
        return lines
    if run["precision"] == "no":
        return list(differences(plain, zero))
    found = []
    for name, share in (("loss", 0.02), ("norm", 0.1), ("lr", 1e-6)):
        left, right = (torch.tensor(result[name], dtype=torch.float64) for result in (plain, zero))
        if left.shape != right.shape or not torch.allclose(left, right, rtol=share, atol=0.0):
            found.append(f".{name}: {plain[name]} and {zero[name]}")
    return found + [f".{name}: {plain[name]} and {zero[name]}" for name in ("steps",) if plain[name] != zero[name]]


def compared(run: Drawn, models: Path, folder: Path) -> list[str]:
    """Run under DDP and under ZeRO inside ranks; return the differences."""
    with trainers.clean_state():
        return judged(
            run, *(outcome_of(result_of, run, models, folder / name, config) for name, config in (("ddp", None), ("zero", config_of(run))))
        )


def alone(run: Drawn, models: Path, folder: Path, config: Any) -> Any:
    with trainers.clean_state():
        found = outcome_of(result_of, run, models, folder, config)
    return {name: value for name, value in found.items() if name != "weights"} if isinstance(found, dict) else found


def compared_over(run: Drawn, models: Path, folder: Path, copies: int = 1) -> list[str]:
    """Run on ``copies`` ranks without hf_zero, and on twice as many, two of which share each batch; return the differences of the first
    two.
    """
    plain = ranks.run_ranks(alone, copies, run, models, folder / "one", None, timeout=90)[0]
    first, second = ranks.run_ranks(alone, 2 * copies, run, models, folder / "two", config_of(run), timeout=90)[:2]
    if isinstance(plain, dict) and isinstance(second, dict):
        second = {**second, "saved": plain["saved"], "read": plain["read"]}
    return [*judged(run, plain, first), *(f"rank 1: {line}" for line in judged(run, plain, second))]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--run", help="options of one loop, as they were printed")
    parser.add_argument("--axes", nargs="+", choices=sorted(AXES), default=[None], help="what two ranks share")
    given = parser.parse_args()
    if "sequence" in given.axes and given.ranks != 2:
        parser.error("loops over slices are compared on 2 ranks: several groups take the batches in another order than DDP's ranks")
    random_ = random.Random(given.seed)
    runs = [full(eval(given.run))] if given.run else [draw(random_, given.axes[i % len(given.axes)]) for i in range(given.count)]  # noqa: S307

    def lines_of(run: Drawn, models: Path, folder: Path) -> list[str]:
        if run["axis"]:
            return compared_over(run, models, folder, given.ranks // 2)
        return sorted({line for one in ranks.run_ranks(compared, given.ranks, run, models, folder, timeout=90) for line in one})

    report(runs, lines_of, changed)
    return 0


if __name__ == "__main__":
    sys.exit(main())
