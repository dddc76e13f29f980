"""The training loop, once for every recipe and every strategy."""

from __future__ import annotations

import math
import platform
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from tqdm import tqdm

from zerobook import __version__
from zerobook.checkpoint import state, store
from zerobook.checkpoint.keeper import Keeper
from zerobook.config import RecipeConfig, Resolved
from zerobook.data.feed import Feed, Layout
from zerobook.data.prepare import PreparedData
from zerobook.data.sampler import SampleOrder
from zerobook.errors import CheckpointError, DivergenceError
from zerobook.isolation import isolating
from zerobook.loss import Objective
from zerobook.preemption import EXIT_CODE, Preemption
from zerobook.progress import Progress
from zerobook.recipe import leave
from zerobook.runlog.writer import STEPS, RunLog, read
from zerobook.schedule import learning_rate_schedule
from zerobook.strategy import Strategy

Scorer = Callable[[Strategy, nn.Module, int], tuple[dict[str, float], list[dict[str, Any]]]]
"""(strategy, prepared model, step) -> (metrics by name, table of samples), called on every rank at every evaluation."""

_FOREVER = 2**62


class TrainingLoop:
    """Trains ``model`` on ``data`` as ``config`` says, spread as ``strategy`` says.

    The loss of a step is the sum over its supervised tokens divided by their count over all ranks and
    micro-batches. That count is known beforehand from the sample ids, so no rank has to ask another.
    Between log points nothing waits for the device.

    Args:
        collate: list of rows -> dict of tensors, with ``labels``.
        objective: the loss and which labels it counts.
        scorers: measure more than the loss at every evaluation.
    """

    def __init__(
        self,
        config: RecipeConfig,
        sources: Resolved,
        strategy: Strategy,
        model: nn.Module,
        data: PreparedData,
        *,
        collate: Callable[[list[dict[str, Any]]], dict[str, torch.Tensor]],
        objective: Objective,
        scorers: Sequence[Scorer] = (),
    ):
        self.config = config
        self.strategy = strategy
        self.data = data
        self.collate = collate
        self.objective = objective
        self.scorers = scorers
        self.layout = Layout(
            world_size=strategy.world_size,
            rank=strategy.rank,
            micro=config.per_device_train_batch_size,
            accumulation=config.gradient_accumulation_steps,
        )
        self.keeper = Keeper(strategy, config)
        checkpoint = self.keeper.checkpoint
        self.log = RunLog(config.output_dir) if strategy.is_main else None
        self.progress = state.read_progress(checkpoint) if checkpoint else Progress(seed=config.seed)
        self._check_data(checkpoint)
        self.feed = self._training_feed()
        self.total_steps = config.max_train_steps or self.progress.step + self.feed.steps()
        self.rate = learning_rate_schedule(
            config.lr_scheduler_type,
            peak=config.learning_rate,
            warmup=config.num_warmup_steps,
            total=self.total_steps,
        )
        strategy.prepare(model, config, self.total_steps)
        self.keeper.check_space(self.total_steps - self.progress.step)
        if data.train.isolated:
            self.collate = self.feed.collate = isolating(strategy, collate)
        self.evaluation_seconds = 0.0
        self._pending: list[dict[str, Any]] = []
        self._before: dict[int, float] = {}  # losses that an earlier attempt had behind the checkpoint
        self._start(sources)
        if checkpoint:
            self._resume(checkpoint)
        self.progress.total_steps = self.total_steps
        self.progress.global_batch = self.layout.global_batch
        self.progress.world_size = strategy.world_size

    # --- set-up
    def _check_data(self, checkpoint: Any) -> None:
        train, progress = self.data.train, self.progress
        if checkpoint and (progress.data_fingerprint, progress.data_size) != (train.fingerprint, len(train)):
            raise CheckpointError(
                f"{checkpoint}: it was trained on {_amount(progress.data_size)} with fingerprint {progress.data_fingerprint}; "
                f"the data is now {_amount(len(train))} with fingerprint {train.fingerprint}. Bring back the data, tokenizer "
                "and lengths of its config.json, or start a new run from the exported model."
            )
        progress.data_size, progress.data_fingerprint = len(train), train.fingerprint

    def _training_feed(self) -> Feed:
        config, progress = self.config, self.progress
        part = self.data.train.skipping(progress.skip_ranges)
        end = _FOREVER if config.max_train_steps else math.ceil(config.num_train_epochs * len(part))
        order = part.order(
            seed=progress.seed, weights=self.data.weights, by_length=config.group_by_length, passed=progress.stream
        )
        return Feed(
            part, order, self.layout, self.collate, cursor=progress.cursor, end=end,
            workers=config.dataloader_num_workers, pin_memory=self.strategy.device.type == "cuda",
        )  # fmt: skip

    def _start(self, sources: Resolved) -> None:
        config, strategy = self.config, self.strategy
        if config.report_to:
            strategy.accelerator.init_trackers("zerobook", config=_flat(config.model_dump()))
        if self.log is None:
            return
        self.log.event(
            "run_start",
            argv=sys.argv,
            config=config.model_dump(),
            sources=dict(sources),
            plan=strategy.plan.record(),
            live=strategy.describe(),
            batch=batch_arithmetic(self.layout),
            total_steps=self.total_steps,
            data={"train": len(self.data.train), "report": self.data.report, "bad_samples": self.data.bad_samples},
            versions=versions(),
        )
        tqdm.write(f"live engine: {describe_line(strategy.describe())}")
        tqdm.write(f"{batch_arithmetic(self.layout)}; {self.total_steps} steps over {_amount(len(self.data.train))}")
        if config.num_warmup_steps > self.total_steps:
            tqdm.write(
                f"  note: {config.num_warmup_steps} warm-up steps are more than the run has; the rate stays below its peak"
            )
        for part, report in self.data.report.items():
            tqdm.write(f"{part}: " + ", ".join(f"{number:,} {what}" for what, number in report.items() if number))
        tqdm.write(f"{self.feed.padding():.1%} of a batch's tokens are padding")

    def _resume(self, checkpoint: Any) -> None:
        for reason in self.keeper.passed_over:
            tqdm.write(f"passed over: {reason}")
        bytes_read = self.keeper.load()
        recorded, found = self.progress.following, self._following()
        differing = {key: [value, found.get(key)] for key, value in recorded.items() if found.get(key) != value}
        tqdm.write(f"resumed {checkpoint} at step {self.progress.step}") if self.log else None
        if self.log:
            aside = store.set_aside(self.keeper.folder, self.progress.step)
            before = self.progress
            self.log.event(
                "resume", checkpoint=str(checkpoint), step=before.step, cursor=before.cursor, samples=before.samples,
                world_size={"before": before.world_size, "now": self.strategy.world_size},
                global_batch={"before": before.global_batch, "now": self.layout.global_batch},
                set_aside=[str(folder) for folder in aside], passed_over=self.keeper.passed_over,
                bytes_read=bytes_read, verified=sorted(set(recorded) - set(differing)), differing=differing,
            )  # fmt: skip
            tqdm.write(f"  as recorded: {', '.join(sorted(set(recorded) - set(differing)))}")
            for key, (was, now) in differing.items():
                tqdm.write(f"  differs from the record: {key} of the next step is {now}, was to be {was}")
            steps = read(self.log.folder / STEPS)
            self._before = {s["step"]: s["loss"] for s in steps if s["step"] > before.step and s["attempt"] < self.log.attempt}

    def _following(self) -> dict[str, Any]:
        """What the next step uses, by name; recorded in a checkpoint, compared after it was loaded."""
        strategy, progress = self.strategy, self.progress
        generator = torch.Generator().manual_seed(_step_seed(progress.seed, progress.step, 0))
        return {
            "learning rate": strategy.learning_rate() if strategy.owns_schedule else self.rate(progress.step),
            "samples": self.feed.order.take(progress.cursor, 8, self.feed.end)[0].tolist(),
            "random numbers": torch.randint(2**31, (4,), generator=generator).tolist(),
        }

    # --- training
    def run(self) -> Progress:
        """Train to the end; returns the final `Progress`. Evaluates and saves on the way and at the end."""
        config, progress, strategy = self.config, self.progress, self.strategy
        self.preemption = Preemption(strategy, settle=lambda: float(self._pending[-1]["loss"]) if self._pending else None)
        self.bar = tqdm(
            total=self.total_steps, initial=progress.step, desc="training", unit="step", disable=not strategy.is_main,
            mininterval=1 if sys.stderr.isatty() else 15,
        )  # fmt: skip
        start = time.monotonic()
        self._window = (start, progress.tokens)
        evaluated = saved = final = None
        if config.eval_on_start and progress.step == 0:
            self.evaluate()
        strategy.model.train()
        if progress.step < self.total_steps:
            for plan, micro_batches in self.feed:
                self._step(plan, micro_batches)
                step = progress.step
                last = step >= self.total_steps
                if last or step % config.logging_steps == 0:
                    self._flush()
                if last or (config.eval_steps and step % config.eval_steps == 0):
                    final = self.evaluate()  # before the checkpoint, which says what it is worth
                    evaluated = step
                if config.save_steps and step % config.save_steps == 0:
                    self.save()
                    saved = step
                if config.async_save and self.log:
                    self.keeper.report(self.log)
                if last:
                    break
                if self.preemption.due(step):
                    self._leave_early(saved)
        self._flush()
        self.bar.close()
        if evaluated != progress.step:
            final = self.evaluate()
        if saved != progress.step:
            self.save()
        self.keeper.finish(self.log)
        if self.log:
            rate = None if strategy.owns_schedule else self.rate(progress.step)
            seconds = {"training": round(time.monotonic() - start - self.evaluation_seconds, 3),
                       "evaluation": round(self.evaluation_seconds, 3)}  # fmt: skip
            self.log.event("run_end", progress=progress.to_json(), learning_rate_after=rate, eval=final, seconds=seconds)
            tqdm.write(f"{seconds['training']:.1f} s training (saving included), {seconds['evaluation']:.1f} s evaluation")
        for tracker in strategy.accelerator.trackers:  # end_training would end the process group too
            tracker.finish()
        return progress

    def _step(self, plan: Any, micro_batches: Any) -> None:
        strategy, progress = self.strategy, self.progress
        torch.manual_seed(_step_seed(progress.seed, progress.step, strategy.rank))
        rate = None if strategy.owns_schedule else self.rate(progress.step)
        total = torch.zeros((), device=strategy.device)
        for index, batch in enumerate(micro_batches):
            with strategy.micro_batch(last=index == self.layout.accumulation - 1):
                loss = self._summed_loss(batch) / plan.tokens
                strategy.backward(loss)
            total += loss.detach()
        first = not self._pending and progress.step == 0
        memory = strategy.memory() if first else None  # at the seam: gradients are ready, nothing is applied
        if rate is None:
            rate = strategy.learning_rate()
            norm = strategy.apply(None)
        else:
            norm = strategy.apply(rate)
        if memory is not None:
            self._record_memory(memory)
        before = progress.cursor
        progress.step += 1
        progress.eval_loss = None
        progress.cursor = plan.cursor
        progress.epoch = self.feed.order.epoch(plan.cursor)
        progress.samples += plan.samples
        progress.tokens += plan.tokens
        self._pending.append(
            {"step": progress.step, "loss": total, "grad_norm": norm, "learning_rate": rate, "tokens": plan.tokens,
             "cursor": [before, plan.cursor], "ids": plan.ids}
        )  # fmt: skip
        self.bar.update(1)

    def _summed_loss(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        batch = {key: value.to(self.strategy.device, non_blocking=True) for key, value in batch.items()}
        labels = batch.pop("labels")
        return self.objective.loss(self.strategy.model(**batch).logits, labels)

    def _flush(self) -> None:
        """The log point: the only place where the host waits for losses and norms."""
        pending, self._pending = self._pending, []
        if not pending:
            return
        losses = self.strategy.sum_over_ranks(torch.stack([record["loss"] for record in pending])).tolist()
        for record, loss in zip(pending, losses, strict=True):
            record["loss"] = loss
            record["grad_norm"] = float(record["grad_norm"])
        now, tokens = time.monotonic(), self.progress.tokens
        rate = (tokens - self._window[1]) / max(now - self._window[0], 1e-9)
        self._window = (now, tokens)
        if self.log:
            for facts in self.feed.order.news():
                self.log.event("shard", **facts)
            for record in pending:
                record["ids"] = record["ids"][record["ids"] >= 0].tolist()
            self.log.steps(pending)
            self._compare_with_before(pending)
            self.bar.set_postfix({"loss": f"{losses[-1]:.4f}", "tok/s": f"{rate:.0f}"})
        last = pending[-1]
        if self.config.report_to:
            values = {"loss": last["loss"], "grad_norm": last["grad_norm"], "learning_rate": last["learning_rate"],
                      "tokens_per_second": rate, "epoch": self.progress.epoch}  # fmt: skip
            self.strategy.accelerator.log(values, step=last["step"])
        # every rank holds the same sums and norms, so all stop together; fp16's scaler skips steps that overflow by itself
        finite = ("loss",) if self.strategy.plan.precision == "fp16" else ("loss", "grad_norm")
        bad = [(record, key) for record in pending for key in finite if not math.isfinite(record[key])]
        if bad:
            record, key = bad[0]
            what = {"loss": "the loss", "grad_norm": "the gradient norm"}[key]
            if self.log:
                self.log.event("crash", reason=f"{what} is not finite", step=record["step"], value=str(record[key]))
            raise DivergenceError(
                f"step {record['step']}: {what} is {record[key]}; nothing was saved since. Resume from the last "
                f"checkpoint with a lower --learning_rate than {self.config.learning_rate}, or more --num_warmup_steps."
            )

    def _compare_with_before(self, pending: list[dict[str, Any]]) -> None:
        """The first losses behind a checkpoint against those that the stopped attempt had there, once."""
        shared = [record for record in pending if record["step"] in self._before]
        if shared:
            assert self.log is not None
            largest = max(abs(r["loss"] / self._before[r["step"]] - 1) for r in shared)
            steps = [record["step"] for record in shared]
            self.log.event("resume_verified", steps=[steps[0], steps[-1]], largest_relative_difference=largest)
            tqdm.write(f"steps {steps[0]} to {steps[-1]} again: losses within {largest:.1e} of those before the stop")
        self._before = {}

    def _record_memory(self, at_seam: dict[str, int]) -> None:
        """Bytes per rank: gradients at the seam of the first step, optimizer state after it."""
        strategy = self.strategy
        mine = strategy.memory() | {"gradients": at_seam["gradients"]}
        every = strategy.gather(mine)
        if self.log:
            trained = sum(strategy.shape(p).numel() for _, p in strategy.trainable())
            self.log.event("memory", per_rank_bytes=every, trained_parameters=trained)

    # --- evaluation and checkpoints
    def evaluate(self) -> dict[str, Any] | None:
        """Loss on the held-out data, together and per dataset, and what the scorers measure.

        Returns:
            ``loss`` (nats per supervised token, over all ranks and datasets), ``perplexity``, ``tokens``;
            ``datasets``, the same three per dataset, where there are several; the scorers' ``metrics``.
            None where nothing is held out and nothing scores.
        """
        strategy, step = self.strategy, self.progress.step
        if not self.data.held_out and not self.scorers:
            return None
        start = time.monotonic()
        strategy.model.eval()
        result = self._held_out_losses() if self.data.held_out else {}
        metrics: dict[str, float] = {}
        samples: list[dict[str, Any]] = []
        for scorer in self.scorers:
            measured, table = scorer(strategy, strategy.model, step)
            metrics |= measured
            samples += table
        strategy.model.train()
        if metrics:
            result["metrics"] = metrics
        seconds = round(time.monotonic() - start, 3)
        self.evaluation_seconds += seconds
        if self.log:
            self.log.event("eval", step=step, seconds=seconds, samples=samples, **result)
            tqdm.write(f"step {step}: " + describe_evaluation(result))
        if self.config.report_to:
            strategy.accelerator.log(_tracked(result), step=step)
        if "loss" in result:
            best = self.progress.best_eval_loss
            self.progress.best_eval_loss = result["loss"] if best is None else min(best, result["loss"])
            self.progress.eval_loss = result["loss"]
        return result

    @torch.no_grad()
    def _held_out_losses(self) -> dict[str, Any]:
        strategy, parts = self.strategy, self.data.held_out
        layout = Layout(world_size=strategy.world_size, rank=strategy.rank, micro=self.config.per_device_eval_batch_size)
        feeds = [
            Feed(part, SampleOrder(part.sizes, seed=0, shuffle=False), layout, self.collate, end=len(part))
            for part in parts.values()
        ]
        bar = tqdm(total=sum(f.steps() for f in feeds), desc="evaluating", leave=False, disable=not strategy.is_main)
        sums = torch.zeros(len(parts), device=strategy.device, dtype=torch.float64)
        for index, feed in enumerate(feeds):
            for _, batches in feed:
                for batch in batches:
                    sums[index] += self._summed_loss(batch)
                bar.update(1)
        bar.close()
        tokens = [int(part.supervised.sum()) for part in parts.values()]
        sums = strategy.sum_over_ranks(sums).tolist()
        result: dict[str, Any] = _losses(sum(sums), sum(tokens))
        if len(parts) > 1:
            result["datasets"] = {name: _losses(*pair) for name, *pair in zip(parts, sums, tokens, strict=True)}
        return result

    def save(self) -> None:
        """A checkpoint of this step. Losses are flushed first, so a non-finite one is never saved over."""
        self._flush()
        self.progress.scaler = self.strategy.scaler_state()
        self.progress.stream = self.feed.order.passed
        self.progress.following = self._following()
        self.keeper.save(self.progress, self.log)

    def _leave_early(self, saved: int | None) -> None:
        """Save, and end the process with `preemption.EXIT_CODE`."""
        step, reason = self.progress.step, self.preemption.received
        if saved != step:
            self.save()
        self.keeper.finish(self.log)
        self.bar.close()
        if self.log:
            self.log.event("preempted", step=step, signal=reason, exit_code=EXIT_CODE)
            tqdm.write(f"{reason}: saved at step {step}; go on with --resume_from_checkpoint auto")
        for tracker in self.strategy.accelerator.trackers:
            tracker.finish()
        self.strategy.barrier()
        leave(EXIT_CODE)


def _amount(samples: int) -> str:
    return f"{samples} samples" if samples else "a stream"


def batch_arithmetic(layout: Layout) -> str:
    """``2 micro x 4 accumulation x 8 processes = 64 samples a step``."""
    return (
        f"{layout.micro} micro x {layout.accumulation} accumulation x {layout.world_size} processes "
        f"= {layout.global_batch} samples a step"
    )


def describe_line(live: dict[str, Any]) -> str:
    stage = "" if live.get("zero_stage") is None else f", ZeRO stage {live['zero_stage']}"
    return f"{live['strategy']}{stage}, {live['world_size']} processes, masters in {live['master_dtype']}"


def describe_evaluation(result: dict[str, Any]) -> str:
    """``held-out loss 1.7716, perplexity 5.88 (code 1.2000, chat 2.1000), rougeL 21.3``."""
    words = []
    if "loss" in result:
        each = ", ".join(f"{name} {part['loss']:.4f}" for name, part in result.get("datasets", {}).items())
        words.append(
            f"held-out loss {result['loss']:.4f}, perplexity {result['perplexity']:.2f}" + (f" ({each})" if each else "")
        )
    words += [f"{name} {value:.4g}" for name, value in result.get("metrics", {}).items()]
    return ", ".join(words)


def _losses(total: float, tokens: int) -> dict[str, Any]:
    loss = total / tokens
    return {"loss": loss, "perplexity": math.exp(loss) if loss < 700 else math.inf, "tokens": tokens}


def _tracked(result: dict[str, Any]) -> dict[str, float]:
    flat = {f"eval_{key}": result[key] for key in ("loss", "perplexity") if key in result}
    flat |= {f"eval_loss/{name}": part["loss"] for name, part in result.get("datasets", {}).items()}
    return flat | {f"eval/{name}": value for name, value in result.get("metrics", {}).items()}


def versions() -> dict[str, str]:
    from importlib.metadata import PackageNotFoundError, version

    found = {"zerobook": __version__, "python": platform.python_version()}
    for package in ("torch", "accelerate", "deepspeed", "transformers", "peft"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found


def _step_seed(seed: int, step: int, rank: int) -> int:
    """One seed per (run, step, rank): SplitMix64's increment spreads neighbours apart."""
    return (seed * 0x9E3779B97F4A7C15 + step * 0xBF58476D1CE4E5B9 + rank * 0x94D049BB133111EB) % 2**63


def _flat(values: dict[str, Any]) -> dict[str, Any]:
    return {k: v if isinstance(v, int | float | str | bool) else str(v) for k, v in values.items()}
