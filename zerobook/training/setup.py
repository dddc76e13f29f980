"""The initial state of a run, new or from a checkpoint, and its prepared model."""

from collections.abc import Callable
from typing import Any

from torch import nn

from zerobook import head
from zerobook.checkpoint.manager import CheckpointManager
from zerobook.checkpoint.progress import Progress
from zerobook.checkpoint.save import bytes_of_state
from zerobook.checkpoint.state import read_progress
from zerobook.config import RecipeConfig
from zerobook.config_sources import ConfigSources
from zerobook.data.batch_loader import BatchLayout
from zerobook.data.prepare import PreparedData
from zerobook.errors import ConfigError
from zerobook.health.judge import describe
from zerobook.health.watch import Watch
from zerobook.launch.fast import FAST
from zerobook.models.compiled import compile_layers
from zerobook.models.isolation import choose_isolating_collator
from zerobook.models.load import pin_rotary
from zerobook.models.save import compute_result_bytes
from zerobook.models.whole_rows import check_split
from zerobook.objective import Objective
from zerobook.runlog.lifecycle import log_hang
from zerobook.runlog.writer import RunLog
from zerobook.strategy import Strategy
from zerobook.training import resume
from zerobook.training.intervals import WRITE_SPEED, Timetable
from zerobook.training.pace import DeviceClock
from zerobook.training.recipe import Collator
from zerobook.training.schedule import learning_rate_schedule
from zerobook.training.state import RunState
from zerobook.utils.host_memory import freed_blocks_returned
from zerobook.utils.units import counted


def make_first_state(
    config: RecipeConfig,
    strategy: Strategy,
    manager: CheckpointManager,
    log: RunLog,
    model: nn.Module,
    data: PreparedData,
    collate: Collator,
    layout: BatchLayout,
    say: Callable[[str], None],
) -> tuple[RunState, dict[str, Any]]:
    """Return the run's initial state, and the state of the recovery policy. Collective; loads no weights.

    Args:
        model: the model that the recipe loaded, not yet distributed.
        say: prints a line on rank 0.

    Raises:
        CheckpointError: data, model or settings differ from those of the checkpoint.
    """
    # Make all checks of the checkpoint before its weights are loaded, which takes long.
    checkpoint = manager.checkpoint
    progress = read_progress(checkpoint) if checkpoint else Progress(seed=config.seed)
    resume.check_data(checkpoint, progress, data, config)
    resume.compare_held_out_data(progress, data, say)
    resume.check_base(checkpoint, config, model)
    policy = resume.restore_decisions(progress, manager, strategy, log)
    state = RunState(config, data, layout, progress, collate, pin_memory=strategy.device.type == "cuda")
    state.total_steps = resume.choose_schedule_length(state, checkpoint, say)
    state.schedule = learning_rate_schedule(
        config.lr_scheduler_type,
        peak=config.learning_rate,
        warmup=config.warmup_steps(state.total_steps),
        total=state.total_steps,
        from_zero=config.warmup_from_zero,
    )
    # A DeepSpeed JSON can have a scheduler, which then sets the rate.
    if strategy.owns_schedule:
        state.schedule = lambda step: strategy.learning_rate()
    return state, policy


def prepare_models(
    config: RecipeConfig,
    sources: ConfigSources,
    state: RunState,
    strategy: Strategy,
    objective: Objective,
    model: nn.Module,
    reference_model: nn.Module | None,
) -> tuple[Collator, list[str]]:
    """Distribute the model, and the reference model for the objective. Collective.

    Returns:
        (the cheapest form of the state's collator for the prepared model, notes for the user).

    Raises:
        ConfigError: the objective does not fit the strategy, or ``--torch_compile`` does not fit the model.
    """
    # Let the output layer compute the loss, if the model allows this.
    computes_loss_in_head = head.install(model) is not None
    # Sharding frees the whole weights. Without this context, the allocator would keep their memory.
    with freed_blocks_returned():
        strategy.prepare(model, config, state.total_steps)
        if reference_model is not None:
            objective.reference_model = strategy.prepare_frozen(reference_model)
    notes = []
    # Choose the frequencies of rotary embeddings once, for the longest sample, so that they do not depend on the batch.
    longest_sample = max(rows.longest_sample for rows in (state.data.train, *state.data.held_out.values()))
    note = pin_rotary(strategy.unwrapped, longest_sample)
    if note is not None:
        notes.append(f"  note: {note}")
    if reference_model is not None:
        pin_rotary(reference_model, longest_sample)
    strategy.model.train()
    # If ranks share rows, check that the objective and the model can work on a part of a row.
    check_split(strategy, objective)
    collate = choose_isolating_collator(
        strategy,
        state.collate,
        keep_mask=objective.needs_attention_mask(strategy.model),
        # An output layer that computes the loss itself can leave out positions without a label.
        supervised=computes_loss_in_head and objective.takes_positions and strategy.token_split is None,
        flag=config.rows_shared_by,
        chooses_attention=config.attn_implementation == "auto",
    )
    if config.torch_compile:
        notes.append(_compile(strategy.unwrapped, sources))
    return collate, notes


def _compile(model: nn.Module, sources: ConfigSources) -> str:
    """Compile the model's layers, and return a note for the user."""
    count = compile_layers(model)
    name = type(model).__name__
    # If ``--fast`` has turned torch_compile on, a model without layers is trained without it. A user's flag is refused.
    if not count and sources["torch_compile"] != FAST:
        raise ConfigError(f"torch_compile: {name} has no layers that transformers names. Leave the flag out.")
    return f"torch_compile: {counted(count, 'layer')} of {name}, compiled at the first run"


def check_space(manager: CheckpointManager, strategy: Strategy, state: RunState) -> None:
    """Refuse a run whose checkpoints and model will not fit onto the disk, see `CheckpointManager.check_space`."""
    # A resumed run may be past its end, if it was made shorter.
    steps_left = max(0, state.end_step - state.progress.step)
    manager.check_space(
        steps_left,
        share_left=steps_left / state.end_step,
        result_bytes=compute_result_bytes(strategy, state.config),
        has_held_out=bool(state.data.held_out),
    )


def make_timetable(
    manager: CheckpointManager, strategy: Strategy, state: RunState, *, evaluates: bool, saves: bool
) -> Timetable:
    """Return the timetable, which decides when the run evaluates and saves.

    Args:
        evaluates: there are held-out data or scorers.
        saves: checkpoints are written.
    """
    held_out_rows = sum(len(part) for part in state.data.held_out.values())
    return Timetable(
        strategy,
        step=state.progress.step,
        total_steps=state.total_steps,
        resumed=manager.resumes_in_place,
        eval_steps=state.config.eval_steps,
        save_steps=manager.save_steps,
        save_seconds=bytes_of_state(strategy) / WRITE_SPEED,
        held_out_batches=held_out_rows / state.layout.global_batch if evaluates else None,
        saves=saves,
    )


def report_hangs(watch: Watch, log: RunLog, config: RecipeConfig, rank: int, clock: DeviceClock | None) -> None:
    """Let the watch write into the runlog which rank blocks the run.

    Args:
        clock: tells the watch the position that the GPU has reached; None on a CPU.
    """
    watch.report = lambda verdict, text: log_hang(log, config.output_dir, rank, describe(verdict), text)
    if clock is not None:
        watch.locate = clock.locate
