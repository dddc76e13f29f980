"""A run's own checkpoints, from its first look at the folder to its last save."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Collection
from contextlib import ExitStack
from pathlib import Path

from tqdm import tqdm

from zerobook.checkpoint import state, store
from zerobook.checkpoint.command import size_words
from zerobook.checkpoint.save import BYTES_PER_WEIGHT, Saver
from zerobook.config import RecipeConfig
from zerobook.errors import CheckpointError, ConfigError
from zerobook.progress import Progress
from zerobook.runlog.writer import RunLog
from zerobook.strategy import Strategy


class Keeper:
    """Holds ``config.output_dir``'s checkpoints for this run. All methods are collective, `report` in the background excepted.

    Attributes:
        checkpoint: what the run goes on from, or None.
        passed_over: why newer ones were not taken; rank 0 alone knows.
        proven: steps of checkpoints that training went on well from; rank 0 alone knows.

    Raises:
        CheckpointError: another run writes there, or what was asked for is not whole.
        ConfigError: a node does not see the folder.
    """

    def __init__(self, strategy: Strategy, config: RecipeConfig):
        self.strategy, self.config = strategy, config
        self.folder = store.folder_of(config.output_dir)
        self.saver = Saver(strategy, config.output_dir, keep=config.save_total_limit, background=config.async_save)
        self.passed_over: list[str] = []
        self.proven: set[int] = set()
        state.check_shared(strategy, config.output_dir)
        self._ownership = ExitStack()  # until the process ends
        strategy.on_main(lambda: self._ownership.enter_context(store.owned(self.folder)))
        asked = config.resume_from_checkpoint
        self.checkpoint = strategy.on_main(lambda: store.find(config.output_dir, asked, passed_over=self.passed_over))

    def check_space(self, steps: int) -> None:
        """Raise `ConfigError` (or warn) where the checkpoints of the next ``steps`` will not fit onto the disk."""
        config, strategy = self.config, self.strategy
        one = BYTES_PER_WEIGHT * sum(strategy.shape(p).numel() for _, p in strategy.trainable())
        most, there = config.checkpoints_at_once(steps), 0
        if config.save_total_limit:  # pruning what is there makes room
            there = strategy.on_main(lambda: sum(map(store.bytes_of, store.complete(self.folder))))
        free = strategy.on_main(lambda: shutil.disk_usage(config.output_dir).free)
        if most * one <= free + there:
            return
        problem = (
            f"output_dir: {most} checkpoint(s) of {size_words(one)} each need {size_words(most * one)}, and "
            f"{Path(config.output_dir).absolute()} has {size_words(free)} free. Lower --save_total_limit (one more is on disk "
            "while it is written), save less often, give another --output_dir, or pass --on_low_disk warn."
        )
        if config.on_low_disk == "error":
            raise ConfigError(problem)
        if strategy.is_main:
            tqdm.write(f"  warning: {problem}")

    def load(self, step: int | None = None) -> tuple[Progress, list[int]]:
        """Bring `checkpoint` back, or the one of ``step``.

        Returns:
            (the loop's state in it, bytes of tensors that each rank read).
        """
        checkpoint = self.checkpoint if step is None else self._of(step)
        assert checkpoint is not None
        progress, mine = state.load(self.strategy, checkpoint)
        return progress, self.strategy.gather(mine)

    # --- what there is to go back to; rank 0
    def steps(self) -> tuple[list[int], list[int]]:
        """Steps of the whole checkpoints: those proven good, and the others."""
        there = [store.step_of(c) for c in store.complete(self.folder)]
        return [s for s in there if s in self.proven], [s for s in there if s not in self.proven]

    def prove(self, steps: Collection[int], log: RunLog | None) -> None:
        """Training went on well from these; the newest of them is not pruned until another is."""
        if log is None:
            return
        for step in sorted(set(steps) & set(self.steps()[1])):
            self.proven.add(step)
            log.event("checkpoint", state="proven_good", step=step)
        self.protect()

    def protect(self, *steps: int) -> None:
        """From now on, the newest proven checkpoint and those of ``steps`` are not pruned."""
        self.saver.protected = frozenset([*self.steps()[0][-1:], *steps])

    def before(self, step: int) -> Path | None:
        """The newest whole checkpoint from before ``step``."""
        whole = [checkpoint for checkpoint in store.complete(self.folder) if store.step_of(checkpoint) < step]
        return whole[-1] if whole else None

    def reads_before(self, step: int) -> Callable[[str, int], float] | None:
        """(weight's name, place in it) -> its value in that checkpoint, NaN for a frozen weight; None where there is none."""
        checkpoint = self.before(step)
        if checkpoint is None:
            return None
        reader = state.Reader(checkpoint)
        held = reader.index["pieces"]
        return lambda name, place: (
            float(reader.read(f"weight/{name}", place, place + 1)[0]) if f"weight/{name}" in held else math.nan
        )

    def _of(self, step: int) -> Path:
        return self.folder / f"step-{step:06d}"

    # --- saving

    def save(self, progress: Progress, log: RunLog | None) -> None:
        """Save the state after a whole step; in the background, only begin to."""
        self.saver.save(progress, {"asked": self.strategy.plan.asked, "config": self.config.model_dump()})
        if not self.config.async_save:
            self.strategy.on_main(lambda: self.report(log))

    def finish(self, log: RunLog | None) -> None:
        """Wait for what is under way."""
        self.saver.wait()
        self.strategy.barrier()
        self.strategy.on_main(lambda: self.report(log))

    def report(self, log: RunLog | None) -> None:
        """Write down what became of the saves that ended since the last call. Rank 0 knows, and the launcher stops all with it.

        Raises:
            CheckpointError: one failed, and ``on_save_error`` is stop.
        """
        for folder, seconds, problem in self.saver.results():
            step = store.step_of(folder)
            assert log is not None
            if problem is None:
                self.proven.discard(step)  # after a rollback, a step is saved anew
                log.event("checkpoint", state="complete", step=step, folder=str(folder), seconds=round(seconds, 3))
                tqdm.write(f"step {step}: checkpoint {folder}")
                continue
            whole = store.complete(folder.parent)
            last = f"the last complete one is {whole[-1].name}" if whole else "there is no complete one yet"
            log.event("save_failed", step=step, reason=problem, last_complete=whole[-1].name if whole else None)
            message = f"{folder}: it could not be saved ({problem}); {last}."
            if self.config.on_save_error == "stop":
                raise CheckpointError(
                    f"{message} Make room, and go on with --resume_from_checkpoint auto; --on_save_error continue trains on "
                    "without it."
                )
            tqdm.write(f"WARNING: step {step}: {message} Training goes on without it.")
