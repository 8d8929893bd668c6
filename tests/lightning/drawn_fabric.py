"""A loop with Lightning's Fabric and drawn options: its objects, and all that it sees."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tests.lightning import drawn_parts as parts
from tests.lightning.drawn_options import Drawn

SEEN = ("loss", "norm", "lr", "eval", "read", "second")


class Loop:
    """One training script with Fabric."""

    def __init__(self, run: Drawn, folder: Path, sharded: bool) -> None:
        self.run, self.folder, self.sharded = run, folder, sharded
        self.fabric = self._fabric()
        self.fabric.launch()
        self.fabric.seed_everything(3, verbose=False)
        model, self.scheduler = self._model(), None
        parts.freeze(run, model, sharded, wrapped=False)
        self._set_up(model)
        parts.freeze(run, model, sharded, wrapped=True)
        self.second: Any = None
        if run["second"]:
            self._add_second()
        loader = parts.loader_of(run["rows"], 1)
        held = parts.loader_of(7, 2, train=False)
        self.loader, self.held = self.fabric.setup_dataloaders(loader, held)
        self.epoch = self.steps = self.batches = 0
        self.seen: dict[str, list[Any]] = {name: [] for name in SEEN}

    def _fabric(self) -> Any:
        from lightning.fabric import Fabric
        from lightning.fabric.strategies import DDPStrategy

        run = self.run
        if self.sharded:
            strategy: Any = parts.strategy_of(run)
        else:
            strategy = DDPStrategy(find_unused_parameters=run["frozen"] in ("freezes", "unfreezes") or run["second"] == "one loss")
        return Fabric(accelerator="cpu", devices=2, strategy=strategy, precision=run["precision"])

    def _model(self, seed: int = 11) -> Any:
        with self.fabric.init_module() if self.run["late"] else contextlib.nullcontext():
            return parts.network_of(self.run, seed)

    def _set_up(self, model: Any) -> None:
        run, fabric = self.run, self.fabric
        self.plain = model
        if run["setup"] == "module first":
            self.model = fabric.setup_module(model)
            found = parts.optimizers_of(run, self.model)
            self.optimizers = [fabric.setup_optimizers(optimizer) for optimizer in found]
            self.scheduler = parts.scheduler_of(run, found[0])
        else:
            found = parts.optimizers_of(run, model)
            self.scheduler = parts.scheduler_of(run, found[0])
            if run["setup"] == "with scheduler":
                self.model, *self.optimizers, self.scheduler = fabric.setup(model, *found, scheduler=self.scheduler)
            else:
                self.model, *self.optimizers = fabric.setup(model, *found)
        if run["call"] == "marked":
            self.model.mark_forward_method("loss")

    def _add_second(self) -> None:
        second = self._model(23)
        if self.run["second"] == "teacher":
            self.second = self.fabric.setup_module(second.requires_grad_(False).eval()) if self.sharded else second.eval()
        else:
            self.second, self.second_optimizer = self.fabric.setup(second, torch.optim.SGD(second.parameters(), lr=0.1))

    # -- losses

    def loss_of(self, rows: Tensor, labels: Tensor) -> Tensor:
        kind = self.run["call"]
        if kind == "marked":
            return self.model.loss(rows, labels)  # type: ignore[no-any-return]
        logits = self.model(rows)
        if kind == "two forwards":
            logits = logits + self.model(rows.flip(0))
        if self.run["second"] == "teacher":
            with torch.no_grad():
                wanted = self.second(rows).float().softmax(-1)
            return parts.loss_of(logits, labels) + nn.functional.kl_div(logits.float().log_softmax(-1), wanted, reduction="batchmean")
        if self.run["second"] == "one loss":
            logits = logits + self.second(rows)
        return parts.loss_of(logits, labels)

    def _backward(self, loss: Tensor, model: Any = None) -> None:
        several = self.run["second"] in ("in turn", "interleaved", "one loss", "teacher")
        self.fabric.backward(loss, **({"model": model or self.model} if several else {}))

    # -- steps

    def train(self, last: int | None = None, skipped: int = 0) -> None:
        """Train to the end of the epochs, or to update ``last``; leave out the first batches of the epoch that it begins in."""
        while self.epoch < self.run["epochs"]:
            self.model.train()
            self.loader._num_iter_calls = self.epoch
            for index, (rows, labels) in enumerate(self.loader):
                if index < skipped:
                    continue
                updates = (index + 1) % self.run["accumulation"] == 0 or index + 1 == len(self.loader)
                if self._micro_step(rows, labels, index, updates) and self.steps == last:
                    self.batches = index + 1
                    return
            skipped = 0
            self._evaluate()
            self.epoch += 1

    def _micro_step(self, rows: Tensor, labels: Tensor, index: int, updates: bool) -> bool:
        run, every = self.run, self.run["accumulation"]
        if run["pattern"] == "config":
            updates = (self.seen_batches + 1) % every == 0
        if run["zero"] == "before" and index % every == 0:
            self._clear()
        if run["call"] == "closure":
            self._step_with_closure(rows, labels)
        else:
            by_config = run["pattern"] == "config" and self.sharded
            quiet = run["pattern"] == "no_sync" and every > 1
            with self.fabric.no_backward_sync(self.model, enabled=not updates) if quiet else contextlib.nullcontext():
                loss = self.loss_of(rows, labels)
                self._backward(loss if by_config else loss / every)
            self._second_step(rows, labels, "between")
            self._record(loss)
            if updates or by_config:
                self._update(updates)
        if updates:
            self.steps += 1
            self._between()
            self._second_step(rows, labels, "after")
        return updates

    @property
    def seen_batches(self) -> int:
        return len(self.seen["loss"])

    def _record(self, loss: Tensor) -> None:
        self.seen["loss"].append(float(self.fabric.all_reduce(loss.detach().float().clone(), reduce_op="mean")))

    def _step_with_closure(self, rows: Tensor, labels: Tensor) -> None:
        def closure() -> Tensor:
            self._clear()
            loss = self.loss_of(rows, labels)
            self._backward(loss)
            return loss

        for optimizer in self.optimizers:
            optimizer.step(closure)
            self._record(closure())
        if self.run["scheduler"] == "step" and self.scheduler is not None:
            self.scheduler.step()

    def _second_step(self, rows: Tensor, labels: Tensor, place: str) -> None:
        kind = self.run["second"]
        if kind == "in turn" and place == "after" or kind == "interleaved" and place == "between":
            loss = parts.loss_of(self.second(rows), labels)
            self._backward(loss, self.second)
            self.seen["second"].append(float(self.fabric.all_reduce(loss.detach().float().clone(), reduce_op="mean")))
            if kind == "in turn":
                self.second_optimizer.step()
                self.second_optimizer.zero_grad()

    def _update(self, updates: bool) -> None:
        run = self.run
        if updates:
            self._clip()
            if run["reads"] == "gradients":
                self.seen["read"].append(parts.gradient_norms(self.plain, self.sharded))
        if run["skips"] and self.steps == 1:
            if run["skips"] == "drops":
                self._clear()
            return
        for optimizer in self.optimizers:
            optimizer.step()
        if run["second"] in ("interleaved", "one loss"):
            self.second_optimizer.step()
            self.second_optimizer.zero_grad()
        if updates and run["scheduler"] == "step" and self.scheduler is not None:
            self.scheduler.step()
        if run["zero"] != "before":
            self._clear()

    def _clip(self) -> None:
        kind, model, fabric = self.run["clip"], self.model, self.fabric
        for optimizer in self.optimizers:
            if kind in ("norm", "inf", "not finite"):
                options = {"inf": {"norm_type": float("inf")}, "not finite": {"error_if_nonfinite": False}}.get(kind, {})
                self.seen["norm"].append(float(fabric.clip_gradients(model, optimizer, max_norm=0.1, **options)))
            elif kind == "value":
                fabric.clip_gradients(model, optimizer, clip_val=0.01)
        if kind == "torch":
            self.seen["norm"].append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.1)))
        elif kind == "torch value":
            nn.utils.clip_grad_value_(model.parameters(), 0.01)
        elif kind == "config" and not self.sharded:
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)

    def _clear(self) -> None:
        if self.run["zero"] == "module":
            self.model.zero_grad()
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=self.run["zero"] != "kept")

    def _between(self) -> None:
        run = self.run
        parts.freeze_between(run, self.plain, self.steps)
        if run["change"] == "lr" and self.steps == 2:
            for group in self.optimizers[0].param_groups:
                group["lr"] *= 0.5
        if run["change"] == "weights" and self.steps == 2:
            parts.shrink(self.plain)
        self.seen["lr"].append([group["lr"] for optimizer in self.optimizers for group in optimizer.param_groups])
        if run["reads"] == "norms":
            self.seen["read"].append({name: float(value.norm()) for name, value in parts.weights_of(self.plain).items()})
        if run["reads"] == "state":
            self.seen["read"].append({name: float(value.float().norm()) for name, value in self.model.state_dict().items()})

    def _evaluate(self) -> None:
        kind, found = self.run["eval"], torch.zeros(())
        self.model.eval()
        if kind:
            for rows, labels in self.held:
                with torch.no_grad():
                    loss = parts.loss_of(self.model(rows), labels)
                if kind == "all_gather":
                    loss = self.fabric.all_gather(loss).mean()
                elif kind == "all_reduce":
                    loss = self.fabric.all_reduce(loss, reduce_op="mean")
                found = found + loss
            self.seen["eval"].append(float(self.fabric.all_reduce(found, reduce_op="mean")))
        if self.scheduler is not None and self.run["scheduler"] == "epoch":
            self.scheduler.step()
        if self.scheduler is not None and self.run["scheduler"] == "plateau":
            self.scheduler.step(self.seen["loss"][-1])
        self.model.train()

    # -- files

    def state(self) -> dict[str, Any]:
        found: dict[str, Any] = {"model": self.model, "steps": self.steps, "epoch": self.epoch, "batches": self.batches}
        if self.run["saves"] != "model only":
            found |= {f"optimizer{index}": optimizer for index, optimizer in enumerate(self.optimizers)}
        if self.scheduler is not None:
            found["scheduler"] = self.scheduler
        if self.run["saves"] == "with more":
            found |= {"numbers": [1, 2.5], "kept": {"tensor": torch.arange(3)}}
        return found

    def load(self, place: Path) -> None:
        state = self.state()
        remains = self.fabric.load(str(place), state)
        self.seen["read"].append(sorted(key for key in remains if not key.startswith("_") and key != "ds_version"))
        self.steps, self.epoch, self.batches = (state[name] for name in ("steps", "epoch", "batches"))


def result_of(run: Drawn, folder: Path, sharded: bool) -> dict[str, Any]:
    """Train, resume if the run says so, save; return everything that a user sees."""
    loop = Loop(run, folder, sharded)
    if run["resume"]:
        loop.train(last=2)
        loop.fabric.save(str(folder / "state"), loop.state())
        if run["resume"] == "starts again":
            loop = Loop(run, folder, sharded)
        else:
            loop.train(last=3)
        loop.load(folder / "state")
        loop.train(skipped=loop.batches)
    else:
        loop.train()
    found = {**loop.seen, "steps": loop.steps, "weights": parts.weights_of(loop.plain)}
    if run["saves"] == "state_dict":
        path = folder / f"weights{loop.fabric.global_rank}.pt"
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(loop.model.state_dict(), path)
        found["saved"] = torch.load(path, weights_only=False)
    return found
