"""The training loop, once for every recipe and every strategy."""

from __future__ import annotations

import atexit
import math
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from zerobook.bars import tqdm
from zerobook.checkpoint import origin, state, store
from zerobook.checkpoint.keeper import Keeper
from zerobook.config import RecipeConfig, Resolved
from zerobook.data.collate import to_device
from zerobook.data.feed import Feed, Layout
from zerobook.data.prepare import PreparedData
from zerobook.data.sampler import rows_of
from zerobook.errors import CheckpointError, DivergenceError
from zerobook.evaluation import held_out
from zerobook.isolation import settled
from zerobook.loss import Objective
from zerobook.modeling import pin_rotary
from zerobook.preemption import EXIT_CODE, Preemption
from zerobook.progress import Progress
from zerobook.recipe import leave
from zerobook.recovery import Recovery
from zerobook.runlog.attempt import begin, decided, last_words, write_page
from zerobook.runlog.history import last_of
from zerobook.runlog.lines import backwards
from zerobook.runlog.policy import Measure, joined, rate_share
from zerobook.runlog.watch import Watch
from zerobook.runlog.words import far_above_best
from zerobook.runlog.writer import EVENTS, STEPS, RunLog
from zerobook.schedule import learning_rate_schedule
from zerobook.strategy import Strategy
from zerobook.terminal import plain
from zerobook.versions import versions

Scorer = Callable[[Strategy, nn.Module, int], tuple[dict[str, float], list[dict[str, Any]]]]
"""(strategy, prepared model, step) -> (metrics by name, table of samples), called on every rank at every evaluation."""

_FOREVER = 2**62


class TrainingLoop:
    """Trains ``model`` on ``data`` as ``config`` says, spread as ``strategy`` says.

    The loss of a step is the sum over its supervised tokens divided by their count over all ranks and
    micro-batches. That count is known beforehand from the sample ids, so no rank has to ask another.
    Between log points nothing here waits for the device. DeepSpeed does so itself in each step, and FSDP2 where it keeps the
    gradients in host memory. transformers does so in each forward pass of an encoder-decoder: 3 times for BART and
    BlenderBot, twice for T5, to see whether the mask masks anything.

    Args:
        collate: list of rows -> the model's arguments by name, tensors above all, with ``labels``. One of a causal recipe is
            replaced by the form of it that costs the prepared model least: see `zerobook.isolation.settled`.
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
            world_size=strategy.mesh.data_parallel_size,
            rank=strategy.mesh.data_parallel_rank,
            micro=config.per_device_train_batch_size,
            accumulation=config.gradient_accumulation_steps,
        )
        self.keeper = Keeper(strategy, config)
        checkpoint = self.keeper.checkpoint
        self.log: RunLog | None = None
        strategy.on_main(self._open_log)
        self.progress = state.read_progress(checkpoint) if checkpoint else Progress(seed=config.seed)
        self._check_data(checkpoint)
        self._check_base(checkpoint, model)
        ladder = self._decided_before(checkpoint)
        self.watch = Watch(config, strategy, self.keeper, self.log, detector=self.progress.detector, ladder=ladder)
        self.feed = self.training_feed()
        self.total_steps = self._laid_out(checkpoint)
        self.schedule = learning_rate_schedule(
            config.lr_scheduler_type,
            peak=config.learning_rate,
            warmup=config.num_warmup_steps,
            total=self.total_steps,
        )
        strategy.prepare(model, config, self.total_steps)
        parts = [self.data.train, *self.data.held_out.values()]
        note = pin_rotary(strategy.unwrapped, max(part.longest_sample for part in parts))
        if note and strategy.is_main:
            tqdm.write(f"  note: {note}")
        self._saved: int | None = self.progress.step if self.keeper.goes_on_in_place else None
        if self._saved != self.end_step:
            self.keeper.check_space(self.end_step - self.progress.step)
        self.collate = self.feed.collate = settled(strategy, collate)
        self.recovery = Recovery(self)
        self.evaluation_seconds = 0.0
        self.waited = 0.0  # s for data, since the last log point
        self._evaluated: int | None = None
        self._evaluation: dict[str, Any] | None = None
        self._pending: list[dict[str, Any]] = []
        self._before: dict[int, float] = {}  # losses that an earlier attempt had behind the checkpoint
        self._start(sources)
        if checkpoint:
            self._resume(checkpoint)
        self.progress.total_steps = self.total_steps
        self.progress.global_batch = self.layout.global_batch
        self.progress.world_size = strategy.world_size

    # --- set-up
    def _open_log(self) -> None:
        self.log = RunLog(self.config.output_dir)  # stays here: it cannot be sent to other ranks, as a result would be

    def _check_data(self, checkpoint: Any) -> None:
        train, progress = self.data.train, self.progress
        if checkpoint and (progress.data_fingerprint, progress.data_size) != (train.fingerprint, len(train)):
            raise CheckpointError(
                f"{checkpoint}: it was trained on {_amount(progress.data_size)} with fingerprint {progress.data_fingerprint}; "
                f"the data is now {_amount(len(train))} with fingerprint {train.fingerprint}. Bring back the data, tokenizer "
                "and lengths of its config.json, or start a new run from the exported model."
            )
        progress.data_size, progress.data_fingerprint = len(train), train.fingerprint
        if checkpoint:
            saved, now = store.read_json(checkpoint / "config.json")["config"], self.config.model_dump()
            for key in ("group_by_length", "datasets"):
                was, here = _order(saved, key), _order(now, key)
                if key in saved and was != here:
                    raise CheckpointError(
                        f"{checkpoint}: the order of its samples depends on {key}, which was {was} and is {here} now; samples "
                        "would come twice or never. Bring the old value back, or start a new run from the exported model."
                    )

    def _check_base(self, checkpoint: Path | None, model: nn.Module) -> None:
        """Refuse a checkpoint whose weights would compute something else here: another base, config or LoRA setting.

        A branch on the hub can move while a run is stopped, and a folder can get other content.
        """
        if checkpoint is None:
            return
        kept, config = store.read_json(checkpoint / "config.json"), self.config.model_dump()
        facts, adapts = getattr(model, "base_facts", None), self.config.trains_adapters
        for key in ("lora_r", "lora_alpha", "lora_target_modules") if adapts else ():
            before, here = kept["config"].get(key), config[key]
            if before is not None and (set(before) != set(here) if isinstance(here, list) else before != here):
                raise CheckpointError(
                    f"{checkpoint}: what its adapters do depends on {key}, which was {before} and is {here} now. Bring the old "
                    "value back, or start a new run from the exported model."
                )
        was, now = kept.get("base_commit"), getattr(model, "base_commit", None)
        if adapts and was and now and was != now:
            raise CheckpointError(
                f"{checkpoint}: its adapters were trained beside commit {was} of {self.config.model_name_or_path}, and "
                f"--model_revision {self.config.model_revision} is commit {now} now. Pass --model_revision {was}."
            )
        origin.check(checkpoint, kept, facts, weights=not (was and now))

    def training_feed(self) -> Feed:
        """From where the progress stands, without what is left out."""
        config, progress = self.config, self.progress
        part = self.data.train.skipping(progress.skip_ranges)
        end = _FOREVER if config.max_train_steps else rows_of(config.num_train_epochs, len(part))
        order = part.order(
            seed=progress.seed, weights=self.data.weights, by_length=config.group_by_length, passed=progress.stream
        )
        feed = Feed(
            part, order, self.layout, self.collate, cursor=progress.cursor, end=end,
            workers=config.dataloader_num_workers, pin_memory=self.strategy.device.type == "cuda",
        )  # fmt: skip
        # samples that are left out shorten the run, not the schedule: see `_laid_out`
        self.end_step = config.max_train_steps or progress.step + feed.steps()
        return feed

    def _laid_out(self, checkpoint: Path | None) -> int:
        """Steps that the learning-rate schedule is laid out for.

        A resumed run keeps the layout that the checkpoint records: samples left out since then shorten the run, not the
        schedule. It is laid out anew only where a person asks for another number of steps or epochs, or another global batch.
        """
        if checkpoint is None:
            return self.end_step
        progress, config = self.progress, self.config
        saved = store.read_json(checkpoint / "config.json")["config"]
        before = saved["max_train_steps"] or (saved["num_train_epochs"], progress.global_batch)
        now = config.max_train_steps or (config.num_train_epochs, self.layout.global_batch)
        if now == before:
            return progress.total_steps
        if self.log and self.end_step != progress.total_steps:
            tqdm.write(f"  the learning-rate schedule is laid out anew: {self.end_step} steps, {progress.total_steps} before")
        return self.end_step

    def _start(self, sources: Resolved) -> None:
        config, strategy = self.config, self.strategy
        if config.report_to:
            strategy.accelerator.init_trackers("zerobook", config=_flat(config.model_dump()))
        if self.log is None:
            return
        begin(
            self.log,
            config=config.model_dump(),
            versions=versions(),
            step=self.progress.step,
            argv=sys.argv,
            sources=dict(sources),
            plan=strategy.plan.record(),
            live=strategy.describe(),
            batch=self.layout.arithmetic,
            total_steps=self.total_steps,
            data={"train": len(self.data.train), "report": self.data.report, "bad_samples": self.data.bad_samples},
        )
        tqdm.write(f"live engine: {_live(strategy.describe())}")
        tqdm.write(f"{self.layout.arithmetic}; {self.total_steps} steps over {_amount(len(self.data.train))}")
        if config.num_warmup_steps > self.total_steps:
            tqdm.write(
                f"  note: {config.num_warmup_steps} warm-up steps are more than the run has; the rate stays below its peak"
            )
        for part, report in self.data.report.items():
            tqdm.write(f"{part}: " + ", ".join(f"{number:,} {what}" for what, number in report.items() if number))
        asked = config.per_device_eval_batch_size
        if self.data.held_out and (rows := self._rows_evaluated()) < asked:
            tqdm.write(
                f"  note: an evaluation takes {rows} row(s) at once; {asked}, as per_device_eval_batch_size asks, could have "
                f"more than {held_out.LOGITS:,} logits"
            )
        if self.progress.step < self.end_step:
            tqdm.write(f"{self.feed.padding():.1%} of a batch's tokens are padding")
        else:
            tqdm.write(f"all {self.progress.step} steps are done; nothing is left to train")

    def _resume(self, checkpoint: Any) -> None:
        for reason in self.keeper.passed_over.values():
            tqdm.write(plain(f"passed over: {reason}"))
        _, bytes_read = self.keeper.load()
        verified, differing = self.verify(self.progress.following)
        self.watch.saved(self.progress.step)  # the last attempt may have ended before it proved this checkpoint good
        tqdm.write(f"resumed {checkpoint} at step {self.progress.step}") if self.log else None
        if self.log:
            aside = store.set_aside(self.keeper.folder, self.progress.step, self.keeper.passed_over)
            self.keeper.take_back()
            before = self.progress
            self.log.event(
                "resume", checkpoint=str(checkpoint), step=before.step, cursor=before.cursor, samples=before.samples,
                world_size={"before": before.world_size, "now": self.strategy.world_size},
                global_batch={"before": before.global_batch, "now": self.layout.global_batch},
                set_aside=[str(folder) for folder in aside], passed_over=[*self.keeper.passed_over.values()],
                bytes_read=bytes_read, verified=verified, differing=differing,
            )  # fmt: skip
            tqdm.write(f"  as recorded: {', '.join(verified)}")
            for key, (was, now) in differing.items():
                tqdm.write(f"  differs from the record: {key} of the next step is {now}, was to be {was}")
            self._before = _losses_behind(self.log, before.step)
        self._evaluation = self.strategy.on_main(lambda: _evaluated_at(self.log, self.progress))
        self._evaluated = None if self._evaluation is None else self.progress.step

    def _decided_before(self, checkpoint: Path | None) -> dict[str, Any]:
        """Take over what earlier attempts decided after ``checkpoint`` was written; returns their ladder's state.

        Without a checkpoint the run begins anew, and takes over only how many steps trackers have seen.
        """
        before = self.strategy.on_main(lambda: decided(self.log.folder))  # type: ignore[union-attr]
        progress = self.progress
        progress.redone = max(progress.redone, before.redone + max(0, before.step - progress.step))
        if checkpoint is None:
            return {}
        progress.skip_ranges = joined(progress.skip_ranges, before.skips)
        for cut in before.cuts:  # the same cut may stand there twice
            if progress.rate_cuts.count(cut) < before.cuts.count(cut):
                progress.rate_cuts.append(cut)
        self.keeper.proven = set(before.proven)
        return before.ladder

    def rate(self) -> float:
        """Return the next step's learning rate: what the schedule gives, lowered by the cuts."""
        step, strategy = self.progress.step, self.strategy
        scheduled = strategy.learning_rate() if strategy.owns_schedule else self.schedule(step)
        return scheduled * rate_share(self.progress.rate_cuts, step)

    def _following(self) -> dict[str, Any]:
        """What the next step uses, by name; recorded in a checkpoint, compared after it was loaded."""
        progress = self.progress
        generator = torch.Generator().manual_seed(_step_seed(progress.seed, progress.step, 0))
        return {
            "learning rate": self.rate(),
            "samples": self.feed.order.take(progress.cursor, 8, self.feed.end)[0].tolist(),
            "random numbers": torch.randint(2**31, (4,), generator=generator).tolist(),
        }

    def verify(self, recorded: dict[str, Any]) -> tuple[list[str], dict[str, list[Any]]]:
        """What the next step uses against what a checkpoint says it was to use: (names that agree, name -> [was, is])."""
        found = self._following()
        differing = {key: [value, found.get(key)] for key, value in recorded.items() if found.get(key) != value}
        return sorted(set(recorded) - set(differing)), differing

    def went_back(self, losses: dict[int, float]) -> None:
        """The progress is an earlier one now; what was known of the steps behind it is forgotten, but for their ``losses``."""
        self.feed = self.training_feed()
        self._before = losses
        self._evaluated = self._saved = None
        self.strategy.model.train()
        self.bar.n = self.progress.step
        self.bar.refresh()
        self._window = (time.monotonic(), self.progress.tokens)

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
        with last_words(self.log, config.output_dir, strategy.rank):
            if config.eval_on_start and progress.step == 0:
                self.evaluate()
            strategy.model.train()
            while (measure := self._until_trouble()) is not None:
                self.recovery.act(measure)
            self.bar.close()
            if self._evaluated != progress.step:
                self.evaluate()
            if self._saved != progress.step:
                self.save()
            self.keeper.finish(self.log)
        if self.log:
            seconds = {"training": round(time.monotonic() - start - self.evaluation_seconds, 3),
                       "evaluation": round(self.evaluation_seconds, 3)}  # fmt: skip
            far = self.watch.far_above_best(progress.eval_loss, progress.best_eval_loss)
            self.log.event(
                "run_end", progress=progress.to_json(), learning_rate_after=self.rate(), eval=self._evaluation, seconds=seconds,
                far_above_best=far,
            )  # fmt: skip
            tqdm.write(f"{seconds['training']:.1f} s training (saving included), {seconds['evaluation']:.1f} s evaluation")
            write_page(self.log)
            if far:  # as the last line: the recipe still saves the model
                atexit.register(tqdm.write, f"WARNING: {far_above_best(far)}")
        for tracker in strategy.accelerator.trackers:  # end_training would end the process group too
            tracker.finish()
        return progress

    def _until_trouble(self) -> Measure | None:
        """Train to the end, or until something has to be done about a spike; returns that."""
        config, progress = self.config, self.progress
        steps = iter(self.feed)
        while progress.step < self.end_step:
            asked = time.monotonic()
            found = next(steps, None)
            self.waited += time.monotonic() - asked
            if found is None:
                break
            self._step(*found)
            step = progress.step
            last = step >= self.end_step
            evaluates = last or (config.eval_steps and step % config.eval_steps == 0)
            saves = config.save_steps and step % config.save_steps == 0
            if evaluates or saves or step % config.logging_steps == 0:
                measure = self._flush()
                if measure is not None:
                    return measure
            if evaluates:
                self.evaluate()  # before the checkpoint, which says what it is worth
            if saves:
                measure = self.watch.replicas(step)
                if measure is not None and measure.kind != "none":
                    return measure
                self.save()
            if config.async_save and self.log:
                self.keeper.report(self.log)
            if not last and self.preemption.due(step):
                self._leave_early()
        return None

    def _step(self, plan: Any, micro_batches: Any) -> None:
        strategy, progress = self.strategy, self.progress
        torch.manual_seed(_step_seed(progress.seed, progress.step, strategy.mesh.data_parallel_rank))
        rate = self.rate()
        total = torch.zeros((), device=strategy.device)
        for index, batch in enumerate(micro_batches):
            with strategy.micro_batch(last=index == self.layout.accumulation - 1):
                loss = self._summed_loss(batch) / plan.tokens
                strategy.backward(loss)
            total += loss.detach()
        first = not self._pending and progress.step == 0
        memory = strategy.memory() if first else None  # at the seam: gradients are ready, nothing is applied
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
        batch = to_device(batch, self.strategy.device)
        labels = batch.pop("labels")
        return self.objective.loss(self.strategy.model(**batch).logits, labels)

    def _flush(self) -> Measure | None:
        """The log point: the only place where the host waits for losses and norms. Returns what is to be done about them."""
        pending, self._pending = self._pending, []
        if not pending:
            return None
        for record, (loss, norm) in zip(pending, self._reduced(pending), strict=True):
            record["loss"], record["grad_norm"] = loss, norm
        now, tokens = time.monotonic(), self.progress.tokens
        rate = (tokens - self._window[1]) / max(now - self._window[0], 1e-9)
        waited, self.waited = self.waited / max(now - self._window[0], 1e-9), 0.0
        self._window = (now, tokens)
        last = pending[-1]
        if self.log:
            for facts in self.feed.order.news():
                self.log.event("shard", **facts)
            for record in pending:
                record["ids"] = record["ids"][record["ids"] >= 0].tolist()
            self.log.steps(pending)
            self.log.event(
                "metrics", durable=False, steps=[pending[0]["step"], last["step"]], loss=last["loss"],
                mean_loss=sum(r["loss"] for r in pending) / len(pending), grad_norm=last["grad_norm"],
                learning_rate=last["learning_rate"], tokens_per_second=round(rate, 1), data_wait=round(waited, 4),
            )  # fmt: skip
            self.log.take_notes()
            self._compare_with_before(pending)
            self.bar.set_postfix({"loss": f"{last['loss']:.4f}", "tok/s": f"{rate:.0f}"})
        if self.config.report_to:
            values = {"loss": last["loss"], "grad_norm": last["grad_norm"], "learning_rate": last["learning_rate"],
                      "tokens_per_second": rate, "epoch": self.progress.epoch, "step": last["step"]}  # fmt: skip
            self.strategy.accelerator.log(values, step=self._tracker_step(last["step"]))
        measure = self.watch.see(pending)
        self._annotate(last["step"])
        if measure is None and self.watch.dead():
            self._give_up(last)
        return measure

    def _reduced(self, pending: list[dict[str, Any]]) -> list[tuple[float, float]]:
        """(loss summed over ranks, gradient norm) of each step, the same bits on every rank: all decide from them alike."""
        losses = torch.stack([record["loss"] for record in pending]).float()
        norms = torch.stack([torch.as_tensor(record["grad_norm"], device=losses.device).float() for record in pending])
        mesh = self.strategy.mesh
        if mesh.data_parallel_rank != 0:  # every rank has the same norms; the first rank's are taken
            norms = torch.zeros_like(norms)
        return [tuple(pair) for pair in mesh.sum_over_data_parallel(torch.stack([losses, norms], dim=1)).tolist()]

    def _annotate(self, step: int) -> None:
        """What the watch said, as text in the trackers."""
        said, self.watch.said = self.watch.said, []
        if not said:
            return
        for tracker in self.strategy.accelerator.trackers:
            if tracker.name == "tensorboard":
                tracker.writer.add_text("runlog", "\n\n".join(said), self._tracker_step(step))
            elif tracker.name == "wandb":
                tracker.run.log({"runlog": "\n".join(said)}, step=self._tracker_step(step))

    def _tracker_step(self, step: int) -> int:
        """Return ``step`` plus the steps that were done and given up. It never falls, since trackers take no step twice."""
        return step + self.progress.redone

    def _give_up(self, last: dict[str, Any]) -> None:
        raise DivergenceError(
            f"step {last['step']}: the loss is {last['loss']}, and none was finite for a while; nothing was saved since. "
            f"Resume from the last checkpoint with a lower --learning_rate than {self.config.learning_rate}, or more "
            "--num_warmup_steps."
        )

    def leave(self, code: int) -> None:
        """End this process, once all ranks are here."""
        for tracker in self.strategy.accelerator.trackers:
            tracker.finish()
        self.strategy.barrier()
        leave(code)

    def _compare_with_before(self, pending: list[dict[str, Any]]) -> None:
        """The first losses behind a checkpoint against those that the stopped attempt had there, once."""
        shared = [record for record in pending if record["step"] in self._before]
        if shared:
            assert self.log is not None
            before = self._before
            largest = max(abs(r["loss"] - before[r["step"]]) / max(abs(before[r["step"]]), 1e-30) for r in shared)
            steps = [record["step"] for record in shared]
            self.log.event("verify", after="steps done again", steps=[steps[0], steps[-1]], largest_relative_difference=largest)
            tqdm.write(f"steps {steps[0]} to {steps[-1]} again: losses within {largest:.1e} of those before")
        self._before = {}

    def _record_memory(self, at_seam: dict[str, int]) -> None:
        """Bytes per rank: gradients at the seam of the first step, optimizer state after it, weights at the larger of both."""
        strategy = self.strategy
        mine = strategy.memory()
        mine |= {"gradients": at_seam["gradients"], "parameters": max(mine["parameters"], at_seam["parameters"])}
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
        self._evaluated, self._evaluation = step, None
        if not self.data.held_out and not self.scorers:
            return None
        start = time.monotonic()
        strategy.model.eval()
        result = self._held_out() if self.data.held_out else {}
        metrics: dict[str, float] = {}
        samples: list[dict[str, Any]] = []
        for scorer in self.scorers:
            measured, table = scorer(strategy, strategy.model, step)
            metrics |= measured
            samples += table
        strategy.model.train()
        strategy.after_forwards()
        if metrics:
            result["metrics"] = metrics
        seconds = round(time.monotonic() - start, 3)
        self.evaluation_seconds += seconds
        if self.log:
            self.log.event("eval", step=step, seconds=seconds, samples=samples, **result)
            tqdm.write(f"step {step}: " + held_out.describe(result))
        if self.config.report_to:
            strategy.accelerator.log(held_out.tracked(result), step=self._tracker_step(step))
        if "loss" in result:
            self.progress.evaluated(result["loss"])
        self._evaluation = result
        return result

    def _held_out(self) -> dict[str, Any]:
        return held_out.losses(self.strategy, self.data.held_out, self._rows_evaluated(), self.collate, self._summed_loss)

    def _rows_evaluated(self) -> int:
        """Rows that a process takes at once in an evaluation."""
        asked = self.config.per_device_eval_batch_size
        longest = max(part.most_labels for part in self.data.held_out.values())
        return held_out.rows_at_once(asked, longest, held_out.vocabulary(self.strategy.unwrapped.config))

    def save(self) -> None:
        """A checkpoint of this step, unless its loss or gradient was not finite: what is good would be pruned for it."""
        step, last = self.progress.step, self.watch.history[-1] if self.watch.history else None
        if last is not None and (last.masked or not math.isfinite(last.loss)):
            if self.log:
                self.log.event("checkpoint", state="not_saved", step=step, reason="its loss or gradient was not finite")
            return
        self._saved = step
        self.watch.saved(step)
        self.progress.detector = self.watch.detector.state()
        self.progress.scaler = self.strategy.scaler_state()
        self.progress.stream = self.feed.order.passed
        self.progress.following = self._following()
        self.keeper.save(self.progress, self.log)

    def _leave_early(self) -> None:
        """Save, and end the process with `preemption.EXIT_CODE`. What asks for a rollback is not saved."""
        step, reason = self.progress.step, self.preemption.received
        if self._flush() is None and self._saved != step:
            self.save()
        self.keeper.finish(self.log)
        self.bar.close()
        if self.log:
            good, others = self.keeper.steps()
            saved = step in (*good, *others)
            self.log.event("preempted", step=step, signal=reason, exit_code=EXIT_CODE, saved=saved)
            done = f"saved at step {step}" if saved else f"step {step} was not saved"
            tqdm.write(f"{reason}: {done}; go on with --resume_from_checkpoint auto")
        self.leave(EXIT_CODE)


def _evaluated_at(log: RunLog | None, progress: Progress) -> dict[str, Any] | None:
    """Return the evaluation of the state that ``progress`` describes, if it is the last one in the log; None otherwise."""
    assert log is not None
    found = last_of(log.folder / EVENTS, ["eval"]).get("eval")
    # The checkpoint names its own loss: a branch that was given up may have been evaluated at the same step.
    if found is None or (found["step"], found.get("loss")) != (progress.step, progress.eval_loss):
        return None
    return {key: found[key] for key in ("loss", "perplexity", "tokens", "datasets", "metrics") if key in found}


def _losses_behind(log: RunLog, step: int) -> dict[int, float]:
    """What earlier attempts recorded behind ``step``, as far as it is the newest stretch of the log."""
    found: dict[int, float] = {}
    for record in backwards(log.folder / STEPS):
        if record is None or record["step"] <= step:
            break
        if record["loss"] is not None:
            found.setdefault(record["step"], record["loss"])
    return found


def _order(config: dict[str, Any], key: str) -> Any:
    """Return what ``key`` of a config says of the samples' order; of datasets, their weights do."""
    value = config.get(key)
    return {spec["name"]: spec.get("weight") for spec in value} if isinstance(value, list) else value


def _amount(samples: int) -> str:
    return f"{samples} samples" if samples else "a stream"


def _live(live: dict[str, Any]) -> str:
    stage = "" if live.get("zero_stage") is None else f", ZeRO stage {live['zero_stage']}"
    return f"{live['strategy']}{stage}, {live['world_size']} processes, masters in {live['master_dtype']}"


def _step_seed(seed: int, step: int, rank: int) -> int:
    """One seed per (run, step, rank): SplitMix64's increment spreads neighbours apart."""
    return (seed * 0x9E3779B97F4A7C15 + step * 0xBF58476D1CE4E5B9 + rank * 0x94D049BB133111EB) % 2**63


def _flat(values: dict[str, Any]) -> dict[str, Any]:
    return {k: v if isinstance(v, int | float | str | bool) else str(v) for k, v in values.items()}
