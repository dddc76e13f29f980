"""The initial state of a run: new, or from a checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from zerobook.checkpoint.manager import CheckpointManager
from zerobook.checkpoint.progress import Progress
from zerobook.checkpoint.state import read_progress
from zerobook.config import RecipeConfig
from zerobook.data.batch_loader import BatchLayout
from zerobook.data.prepare import PreparedData
from zerobook.runlog.writer import RunLog
from zerobook.strategy import Strategy
from zerobook.training import resume
from zerobook.training.recipe import Collator
from zerobook.training.schedule import learning_rate_schedule
from zerobook.training.state import RunState


def first_state(
    config: RecipeConfig,
    strategy: Strategy,
    manager: CheckpointManager,
    log: RunLog,
    model: nn.Module,
    data: PreparedData,
    collate: Collator,
    say: Callable[[str], None],
) -> tuple[RunState, dict[str, Any]]:
    """Return the run's initial state, and the state of the ladder of recovery actions. Collective; loads no weights.

    Args:
        model: as the recipe made it.
        say: prints a line on rank 0.

    Raises:
        CheckpointError: data, model or settings differ from those of the checkpoint.
    """
    # Everything that could refuse the checkpoint comes before its weights are loaded.
    checkpoint = manager.checkpoint
    progress = read_progress(checkpoint) if checkpoint else Progress(seed=config.seed)
    resume.check_data(checkpoint, progress, data, config)
    resume.compare_held_out_data(progress, data, say)
    resume.check_base(checkpoint, config, model)
    ladder = resume.earlier_decisions(progress, manager, strategy, log)
    # Ranks that share rows (tensor or sequence parallelism) read the same samples.
    layout = BatchLayout(
        world_size=strategy.mesh.data_parallel_size,
        rank=strategy.mesh.data_parallel_rank,
        micro=config.per_device_train_batch_size,
        accumulation=config.gradient_accumulation_steps,
        sharing=strategy.world_size // strategy.mesh.data_parallel_size,
    )
    state = RunState(config, data, layout, progress, collate, pin_memory=strategy.device.type == "cuda")
    state.total_steps = resume.schedule_steps(state, checkpoint, say)
    state.schedule = learning_rate_schedule(
        config.lr_scheduler_type,
        peak=config.learning_rate,
        warmup=config.warmup_steps(state.total_steps),
        total=state.total_steps,
    )
    # A DeepSpeed JSON can have a scheduler of its own.
    if strategy.owns_schedule:
        state.schedule = lambda step: strategy.learning_rate()
    return state, ladder
