"""The checkpoints of a run: find, load, save, protect and report them."""

import math
import os
import shutil
from collections.abc import Callable, Collection
from dataclasses import asdict
from pathlib import Path
from typing import Any

from zerobook.checkpoint import resume, state, store
from zerobook.checkpoint.hook_state import make_hook_state
from zerobook.checkpoint.progress import Progress
from zerobook.checkpoint.recovery_state import RecoveryState
from zerobook.checkpoint.resolution import resolve_resume
from zerobook.checkpoint.save import Saver, bytes_of_state
from zerobook.config import AUTOMATIC, KEPT_AUTOMATICALLY, RecipeConfig
from zerobook.errors import ConfigError, SaveError
from zerobook.health.position import during, touch
from zerobook.runlog.writer import RunLog
from zerobook.strategy import Strategy
from zerobook.utils.bars import tqdm
from zerobook.utils.terminal import plain
from zerobook.utils.units import counted, size

# Seconds after which torchrun kills processes that do not end at SIGTERM, unless TORCH_ELASTIC_SHUTDOWN_TIMEOUT sets another
# number (torch 2.13, distributed/launcher/api.py).
TORCHRUN_S = 30


class CheckpointManager:
    """Manages the checkpoints in ``config.output_dir``.

    `__init__`, `check_space`, `load`, `load_hook_states`, `is_undamaged`, `save` and `finish` are collective. The other methods
    are for rank 0, except `remember` and `path_of`, which any rank may call.

    Attributes:
        checkpoint: the checkpoint that the run resumes from, or None.
        skipped: damaged checkpoints that are not used, each with the reason; on rank 0 only.
        proven: steps of the checkpoints that were proven good; on rank 0 only.
        save_steps: when the run saves, as in the config; 0 (at its end only) if the disk has room for one checkpoint only.
        decisions: what was decided about spikes. Other ranks than 0 know only decisions of earlier attempts. `remember` adds to
            them.

    Raises:
        LockedError: another run writes to the folder.
        CheckpointError: the requested checkpoint is not complete.
        ConfigError: a node does not see the folder, or the folder is an earlier run's and this run does not resume.
    """

    def __init__(self, strategy: Strategy, config: RecipeConfig):
        self.strategy = strategy
        self.config = config
        self.folder = store.folder_of(config.output_dir)
        self.saver = Saver(strategy, config.output_dir, keep=config.kept_checkpoints, background=config.async_save)
        self.skipped: dict[Path, str] = {}
        self.proven: set[int] = set()
        self.save_steps = config.save_steps
        self._keeps_proven = True
        self._has_warned_of_slow_save = False
        # The order matters: all ranks must see the folder, and rank 0 must lock it, before it is changed or read.
        state.require_shared_folder(strategy, config.output_dir)
        strategy.on_main(lambda: resume.lock_run_folder(config))
        # Rank 0 sends its decisions as a dict: messages between ranks hold plain values, and no objects of our classes.
        decisions = strategy.on_main(lambda: asdict(RecoveryState.read(config.output_dir)))
        self.decisions = RecoveryState(**decisions)
        if config.resume_from_checkpoint == "auto":
            strategy.on_main(self._finish_rollback, takes_long=True)
        self.checkpoint = strategy.on_main(self._resolve_resume, takes_long=True)
        self._explicit_steps = strategy.on_main(self._find_explicit_steps)

    def remember(self, **values: Any) -> None:
        """Change values of `decisions`, by their names, and write them to disk. On other ranks than 0 it does nothing."""
        if not self.strategy.is_main:
            return
        vars(self.decisions).update(values)
        try:
            self.decisions.write(self.config.output_dir)
        except OSError as error:
            # A full disk does not end the training here, nor when the runlog is written. The next call writes all values again.
            tqdm.write(
                f"WARNING: what was decided about spikes cannot be written ({error.strerror}): another attempt would not know"
            )

    def _resolve_resume(self) -> Path | None:
        """Return the checkpoint to resume from, after reading every byte of it, and fill `skipped`. Rank 0."""
        resolution = resolve_resume(self.config.output_dir, self.config.resume_from_checkpoint, thorough=True)
        self.skipped = resolution.skipped
        return resolution.checkpoint

    def _find_explicit_steps(self) -> list[int]:
        """Return the steps of the checkpoints in the folder that were saved with an explicit ``save_steps``. Rank 0.

        The user wanted these checkpoints, so a run that saves automatically does not prune them. For any other run the list is
        empty.
        """
        if not self.config.limits_checkpoints_itself:
            return []
        steps = []
        for checkpoint in store.list_all(self.folder):
            if store.find_damage(checkpoint) is not None:
                continue
            if store.read_json(checkpoint / "config.json")["config"].get("save_steps") != AUTOMATIC:
                steps.append(store.read_json(checkpoint / store.PROGRESS)["step"])
        return steps

    def _finish_rollback(self) -> None:
        """Finish a rollback that the last attempt began and did not end: set the later checkpoints aside. Rank 0.

        Otherwise ``auto`` would take the newest checkpoint, which may have the damage that the rollback was to undo.
        """
        step = self.decisions.rollback_to
        # A damaged checkpoint cannot be returned to. Then the later ones are the best that there is.
        if step is None or store.find_damage(self.path_of(step), thorough=True) is not None:
            return
        new_paths = store.set_aside(self.folder, step)
        if new_paths:
            names = ", ".join(path.name for path in new_paths)
            tqdm.write(f"the last attempt ended during a rollback to step {step}: set aside {names}")

    @property
    def resumes_in_place(self) -> bool:
        """True if the run resumes from a checkpoint in its own folder, so that the step of the start is saved already.

        A checkpoint that was set aside counts too, since `restore_name` restores its name.
        """
        return self.checkpoint is not None and self.checkpoint.parent.resolve() == self.folder.resolve()

    def check_space(self, steps: int, *, share_left: float, result_bytes: int, has_held_out: bool) -> None:
        """Raise `ConfigError`, or warn, if the disk has too little space for the checkpoints of the next ``steps``.

        If the user has not set how many checkpoints to keep, keep as many as fit and warn of the drawbacks.

        Args:
            share_left: ``steps`` as a share of the run.
            result_bytes: size of the model or adapter that the run writes at its end, beside its checkpoints.
            has_held_out: whether there are held-out data, so that one checkpoint is the best.
        """
        config = self.config
        strategy = self.strategy
        checkpoint_bytes = bytes_of_state(strategy)
        # A finished run that is started again saves no checkpoint.
        is_finished = steps == 0 and self.resumes_in_place
        count = 0 if is_finished else config.checkpoints_at_once(steps, share_left=share_left, has_held_out=has_held_out)
        assert count is not None, "the number of steps is known here"
        # The run prunes checkpoints of earlier attempts, which frees their space.
        prunable = 0
        if config.kept_checkpoints and not is_finished:
            prunable = strategy.on_main(self._count_prunable_bytes)
        free = strategy.on_main(lambda: shutil.disk_usage(config.output_dir).free)
        # The checkpoints stay when the model or adapter is written.
        needed = count * checkpoint_bytes + result_bytes
        if needed <= free + prunable:
            return

        # The space is too small. Keep fewer checkpoints, or report the problem.
        disk = f"{Path(config.output_dir).absolute()} has {size(free)} free"
        result = f"the {config.result} of {size(result_bytes)}"
        if config.limits_checkpoints_itself and count > 0:
            fitting = (free + prunable - result_bytes) // checkpoint_bytes
            drawbacks = self._keep_fewer(fitting, is_new=prunable == 0, has_held_out=has_held_out)
            if drawbacks is not None:
                self._warn(f"{disk}, and a checkpoint takes {size(checkpoint_bytes)} beside {result}. {drawbacks}")
                return
            problem = (
                f"{disk}, and one checkpoint of {size(checkpoint_bytes)} does not fit beside {result}. Nothing could be saved: "
                "a run that is killed could not resume, a spike could not be rolled back, and the trained weights might be "
                "lost at the end. Free some space, or give another --output_dir. --on_low_disk warn trains all the same."
            )
        else:
            problem = (
                f"{counted(count, 'checkpoint')} of {size(checkpoint_bytes)} each and {result} need {size(needed)}, and "
                f"{disk}. Lower --save_total_limit (one more is on disk while it is written), save less often (--save_steps "
                "0: at the end only, and a killed run is lost), give another --output_dir, or pass --on_low_disk warn."
            )
        if config.on_low_disk == "error":
            raise ConfigError(f"output_dir: {problem}")
        self._warn(problem)

    def _keep_fewer(self, fitting: int, *, is_new: bool, has_held_out: bool) -> str | None:
        """Limit the kept checkpoints to those that fit onto the disk. Return the drawbacks in words; None if too few fit.

        Args:
            fitting: number of checkpoints that fit onto the disk after all that may be pruned are pruned.
            is_new: whether there are no prunable checkpoints yet.
        """
        # A checkpoint is pruned only when the next one is complete, so a run that saves twice needs room for two.
        if fitting < 2:
            if fitting < 1 or not is_new:
                return None
            self.save_steps = 0
            return (
                "The run saves at its end only: one that is killed starts again at step 0, and a spike cannot be rolled back."
            )
        # The newest checkpoint and the one that is being written need two places. The proven and the best one get the others.
        self.saver.keep = 1
        spare = fitting - 2
        if self.config.final_model == "best":
            # The best one comes first, since the run needs it at its end.
            self.saver.keep_best = spare >= 1
            self._keeps_proven = spare >= 2
        else:
            self._keeps_proven = spare >= 1
            self.saver.keep_best = spare >= 2
        drawbacks = [f"One checkpoint is kept in place of {KEPT_AUTOMATICALLY}."]
        if not self._keeps_proven:
            drawbacks.append("A spike that is noticed after the next save cannot be rolled back.")
        if has_held_out and not self.saver.keep_best:
            drawbacks.append("The one with the lowest held-out loss is not kept.")
        return " ".join(drawbacks)

    def _count_prunable_bytes(self) -> int:
        """Return the bytes of the checkpoints that saves of this run may prune. Rank 0."""
        total = 0
        for checkpoint in store.list_complete(self.folder):
            if not store.is_pinned(checkpoint) and store.step_of(checkpoint) not in self._explicit_steps:
                total += store.bytes_of(checkpoint)
        return total

    def _warn(self, message: str) -> None:
        if self.strategy.is_main:
            tqdm.write(f"  warning: output_dir: {message}")

    def load(self, step: int | None = None) -> tuple[Progress, list[int]]:
        """Load `checkpoint`, or the one of ``step``, into the live model and optimizer. Collective.

        Returns:
            (progress that the checkpoint records, for each rank the bytes of tensors that it read).
        """
        checkpoint = self.checkpoint if step is None else self.path_of(step)
        assert checkpoint is not None
        progress, bytes_read = state.load(self.strategy, checkpoint)
        return progress, self.strategy.gather(bytes_read)

    def load_hook_states(self, step: int | None = None) -> dict[str, dict[str, Any]]:
        """Return the state of each hook in `checkpoint`, or in the one of ``step``, by the hook's name. Collective."""
        checkpoint = self.checkpoint if step is None else self.path_of(step)
        assert checkpoint is not None
        return state.read_hook_states(checkpoint, self.strategy)

    def restore_name(self) -> None:
        """Restore the name of the checkpoint that the run resumes from, if it was set aside in the run's folder. Rank 0."""
        checkpoint = self.checkpoint
        assert checkpoint is not None
        # The step in its name is then followed by a suffix, and is not read as a step.
        if store.step_of(checkpoint) < 0 and self.resumes_in_place:
            store.restore_name(checkpoint, store.read_json(checkpoint / store.MANIFEST)["step"])

    # --- checkpoints for rollbacks; on rank 0, except `is_undamaged`
    def steps(self) -> tuple[list[int], list[int]]:
        """Return (steps of the checkpoints proven good, steps of the other complete checkpoints), each in order."""
        proven: list[int] = []
        unproven: list[int] = []
        for checkpoint in store.list_complete(self.folder):
            step = store.step_of(checkpoint)
            if step in self.proven:
                proven.append(step)
            else:
                unproven.append(step)
        return proven, unproven

    def prove(self, steps: Collection[int], log: RunLog) -> None:
        """Mark the checkpoints of ``steps`` as proven good, and protect the newest proven one from pruning."""
        _, unproven = self.steps()
        for step in sorted(set(steps) & set(unproven)):
            self.proven.add(step)
            log.event("checkpoint", state="proven_good", step=step)
        self.remember(proven=self.steps()[0])
        self.protect()

    def is_undamaged(self, step: int) -> bool:
        """Return whether the checkpoint of ``step`` is undamaged, after reading every byte. Damage is printed. Collective."""

        def check() -> bool:
            # Note progress after each block: reading a large checkpoint takes longer than a phase may take without progress.
            reason = store.find_damage(self.path_of(step), thorough=True, tell=lambda count: touch())
            if reason is not None:
                self.skipped[self.path_of(step)] = reason
                tqdm.write(plain(f"  skipped: {reason}"))
            return reason is None

        return self.strategy.on_main(check, takes_long=True)

    def protect(self, *steps: int) -> None:
        """Protect the newest proven checkpoint, and those of ``steps``, from pruning. This replaces earlier protection."""
        protected = {*steps, *self._explicit_steps}
        proven, _ = self.steps()
        if proven and self._keeps_proven:
            protected.add(proven[-1])
        self.saver.protected = frozenset(protected)

    def before(self, step: int) -> Path | None:
        """Return the newest complete checkpoint from before ``step``; None if there is none."""
        earlier = [checkpoint for checkpoint in store.list_complete(self.folder) if store.step_of(checkpoint) < step]
        return earlier[-1] if earlier else None

    def make_weight_reader(self, step: int) -> Callable[[str, int], float] | None:
        """Return a function that reads a single number of a weight from the newest checkpoint before ``step``.

        Returns:
            A function of (weight's name, position in the flattened weight), which returns NaN for a frozen weight; None if
            there is no such checkpoint.
        """
        checkpoint = self.before(step)
        if checkpoint is None:
            return None
        reader = state.Reader(checkpoint)

        def read_weight(name: str, position: int) -> float:
            tensor_name = f"weight/{name}"
            # A checkpoint has no frozen weights.
            if tensor_name not in reader.index["pieces"]:
                return math.nan
            return float(reader.read(tensor_name, position, position + 1)[0])

        return read_weight

    def path_of(self, step: int) -> Path:
        """Return where the checkpoint of ``step`` is, or would be."""
        return self.folder / store.name_of(step)

    # --- saving

    def save(self, progress: Progress, log: RunLog, hook_states: dict[str, dict[str, Any]] | None = None) -> None:
        """Save the state after a complete step. With ``async_save``, only copy it and start the save. Collective.

        Args:
            hook_states: hook's name -> its state.
        """
        self.saver.save(
            progress,
            {
                "asked": self.strategy.plan.asked,
                "config": self.config.model_dump(),
                "chat_template": self.config.chat_template_text,
                "base_commit": getattr(self.strategy.unwrapped, "base_commit", None),
                "base": getattr(self.strategy.unwrapped, "base_facts", None),
            },
            make_hook_state(hook_states or {}, self.strategy),
        )
        # The result of a save in the background is not known yet. The trainer calls `report` after later steps.
        if not self.config.async_save:
            self.strategy.on_main(lambda: self.report(log))

    # Warns once if a save takes longer than the time that torchrun leaves a process between SIGTERM and SIGKILL.
    def _warn_of_slow_save(self, seconds: float) -> None:
        limit = int(os.environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", TORCHRUN_S))
        if self._has_warned_of_slow_save or seconds < limit or "TORCHELASTIC_RUN_ID" not in os.environ:
            return
        self._has_warned_of_slow_save = True
        tqdm.write(
            f"WARNING: this save took {seconds:.0f} s. At SIGTERM, torchrun kills its processes after {limit} s, before "
            "a save ends. Set TORCH_ELASTIC_SHUTDOWN_TIMEOUT to more seconds, as many as the scheduler leaves it (before torch "
            "2.12, zerobook launch alone reads it), or let the scheduler send SIGUSR1 to the ranks: docs/guides/checkpoints.md "
            "says how."
        )

    def finish(self, log: RunLog) -> None:
        """Wait for a save in progress, and report it. Collective."""
        # The wait may be longer than the time limit of a phase of a step, so it has a phase of its own.
        with during("save"):
            self.saver.wait()
            self.strategy.barrier()
        self.strategy.on_main(lambda: self.report(log))

    def report(self, log: RunLog) -> None:
        """Log the results of the saves that ended since the last call. Rank 0.

        Raises:
            SaveError: a save failed, and ``on_save_error`` is stop. The launcher then stops all ranks.
        """
        for folder, seconds, problem in self.saver.results():
            step = store.step_of(folder)
            if problem is None:
                # After a rollback, a step may be saved again. What was known of its earlier checkpoint is not true of this one.
                if step in self.proven:
                    self.proven.remove(step)
                    self.remember(proven=self.steps()[0])
                self.skipped.pop(folder, None)
                log.event(
                    "checkpoint",
                    state="complete",
                    step=step,
                    folder=str(folder),
                    seconds=round(seconds, 3),
                    background=self.config.async_save,
                )
                tqdm.write(f"step {step}: checkpoint {folder}")
                self._warn_of_slow_save(seconds)
                continue
            complete = store.list_complete(folder.parent)
            last_complete = None
            fallback = "there is no complete one yet"
            if complete:
                last_complete = complete[-1].name
                fallback = f"the last complete one is {last_complete}"
            log.event("save_failed", step=step, reason=problem, last_complete=last_complete)
            message = f"{folder}: it could not be saved ({problem}); {fallback}."
            if self.config.on_save_error == "stop":
                raise SaveError(
                    f"{message} Free some space, and resume with --resume_from_checkpoint auto. With --on_save_error "
                    "continue, training continues without it."
                )
            tqdm.write(f"WARNING: step {step}: {message} Training continues without it.")
