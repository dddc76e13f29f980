"""Losses, norms and metrics of the steps since the last log point, reduced over the ranks, as numbers."""

from collections.abc import Sequence

import torch

from zerobook.checkpoint import store
from zerobook.checkpoint.manager import CheckpointManager
from zerobook.config import RecipeConfig
from zerobook.errors import ConfigError
from zerobook.runlog.records import StepRecord
from zerobook.strategy.mesh import Mesh
from zerobook.training.intervals import Measured


def reduce_records(
    records: Sequence[StepRecord], mesh: Mesh, clock: Measured, objective: str, *, has_command: bool = False
) -> tuple[Measured, bool]:
    """Convert the tensors of ``records`` to numbers, in place, and sum losses and metrics over the ranks. Collective.

    Every rank gets exactly the same numbers, since all ranks decide from them. This waits for the device.

    Args:
        clock: this rank's measurements of steps and saves.
        has_command: whether a command of a person waits. Only rank 0 knows this.
        objective: name of the objective's class, for an error message.

    Returns:
        Rank 0's ``clock`` and ``has_command``, on every rank.
    """
    names = sorted(records[0].sums)
    for record in records:
        if sorted(record.sums) != names:
            raise ConfigError(
                f"{objective}.loss returned the metrics {names} in one step and {sorted(record.sums)} in another. It has to "
                "return the same metrics for every batch, since they are summed over the ranks; a metric may be 0."
            )
    # Make a table with a row for each step, and columns for the loss, the norm and each metric.
    losses = torch.stack([torch.as_tensor(record.loss) for record in records]).float()
    norms = torch.stack([torch.as_tensor(record.grad_norm, device=losses.device).float() for record in records])
    # Every rank has the same norms. Only rank 0 contributes them to the sum over the ranks.
    if mesh.rank != 0:
        norms = torch.zeros_like(norms)
    columns = [losses, norms]
    for name in names:
        columns.append(torch.stack([record.sums[name] for record in records]).float())
    # Two further rows send what only rank 0 knows to all ranks, which saves another collective.
    main_rows = losses.new_zeros(2, len(columns))
    if mesh.rank == 0:
        main_rows[0, :2] = torch.tensor(clock)
        main_rows[1, 0] = has_command
    values = torch.cat([torch.stack(columns, dim=1), main_rows])
    *step_rows, clock_values, command_values = mesh.sum_over_samples(values).tolist()
    for record, (loss, norm, *metric_values) in zip(records, step_rows, strict=True):
        record.loss = loss
        record.grad_norm = norm
        record.sums = {}
        record.metrics = {name: float(value) for name, value in record.metrics.items()}
        record.metrics |= dict(zip(names, metric_values, strict=True))
    return Measured(clock_values[0], clock_values[1]), command_values[0] > 0


def describe_divergence(record: StepRecord, config: RecipeConfig, manager: CheckpointManager) -> str:
    """Return the error message for a model whose losses are not finite. Collective."""
    advice = "There is no checkpoint: start again with"
    if manager.strategy.on_main(lambda: bool(store.list_complete(manager.folder))):
        advice = "Go on with --resume_from_checkpoint auto and"
    return (
        f"step {record.step}: the loss is {record.loss}, and none was finite for a while; nothing was saved since. {advice} a "
        f"lower --learning_rate than {config.learning_rate}, or more --num_warmup_steps."
    )
