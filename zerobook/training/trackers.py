"""Experiment trackers, through accelerate."""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Callable, Sequence
from functools import partial
from netrc import NetrcParseError, netrc
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from zerobook.config import RecipeConfig
from zerobook.evaluation import held_out
from zerobook.runlog.records import EvaluationRecord, StepRecord
from zerobook.strategy import Strategy
from zerobook.training.hooks import Hook, TrainerView
from zerobook.utils import hub
from zerobook.utils.bars import tqdm
from zerobook.utils.reading import read_json
from zerobook.utils.terminal import without_passwords
from zerobook.utils.writing import write_whole

if TYPE_CHECKING:
    from accelerate.tracking import GeneralTracker

# File in the runlog's folder that keeps the trackers' own ids of the run, so that a resumed run goes on in them.
IDENTITIES = "trackers.json"


class Trackers(Hook):
    """Logs the last step of each log point, evaluations, and messages of the spike monitor.

    Trackers accept each step number only once, so the number that they get also counts the abandoned steps. A tracker that
    raises an error is not called again: the training goes on, and the runlog has all values.
    """

    def __init__(self, strategy: Strategy, config: RecipeConfig, *, resumed: bool):
        """Start the trackers, or continue those of a resumed run. Collective.

        Args:
            resumed: the run continues from a checkpoint in its own folder.
        """
        self.strategy = strategy
        self.accelerator = strategy.accelerator
        self.has_ended = False
        ids_file = Path(config.output_dir) / "runlog" / IDENTITIES
        ids = _read_ids(ids_file) if resumed else {}
        wandb_id = os.environ.get("WANDB_RUN_ID") or ids.get("wandb") or uuid.uuid4().hex[:8]
        options = _make_options(config, ids, wandb_id)
        trackers: list[GeneralTracker] = []
        # Start one after another, since each may fail. On other ranks than 0, accelerate starts none.
        for name in config.report_to:
            self.accelerator.log_with = [name]
            self.accelerator.trackers = []
            # A tracker with an id already has the config, from the attempt that began the run in it.
            if _succeeds(name, partial(self._start, name, config, options, logs_config=name not in ids)):
                trackers += self.accelerator.trackers
        self.accelerator.trackers = trackers
        if strategy.is_main:
            for tracker in trackers:
                # A tracker without ids gets an empty one, which records that it has the config.
                ids.setdefault(tracker.name, wandb_id if tracker.name == "wandb" else "")
                if tracker.name == "mlflow":
                    ids["mlflow"] = tracker.active_run.info.run_id
            write_whole(ids_file, json.dumps(ids))

    # Start one tracker. W&B starts offline if it cannot be reached, unless the user has set ``WANDB_MODE``.
    def _start(self, name: str, config: RecipeConfig, options: dict[str, dict[str, Any]], *, logs_config: bool) -> None:
        if name == "wandb" and self.strategy.is_main and "WANDB_MODE" not in os.environ:
            reason = _why_wandb_is_offline()
            if reason is not None:
                folder = os.environ.get("WANDB_DIR", config.output_dir)
                options["wandb"] |= {"mode": "offline", "dir": folder}
                tqdm.write(f"wandb: {reason}, so it records in {folder}. Upload that later with wandb sync")
        project = config.project or os.environ.get("WANDB_PROJECT") or "zerobook"
        logged_config = _flatten(config.model_dump()) if logs_config else None
        self.accelerator.init_trackers(project, config=logged_config, init_kwargs=options)

    def on_log(self, trainer: TrainerView, records: Sequence[StepRecord]) -> None:
        last = records[-1]
        values = {
            "loss": last.loss,
            "grad_norm": last.grad_norm,
            "learning_rate": last.learning_rate,
            "tokens_per_second": trainer.pace.tokens_per_second,
            "all_tokens_per_second": trainer.pace.all_tokens_per_second,
            "data_wait": trainer.pace.data_wait,
            "epoch": trainer.progress.epoch,
            "step": last.step,
        }
        if trainer.pace.mfu is not None:
            values["mfu"] = trainer.pace.mfu
        if trainer.pace.tflops is not None:
            values["tflops"] = trainer.pace.tflops
        values |= {f"train/{name}": value for name, value in last.metrics.items()}
        self._log(values, _tracker_step(trainer, last.step))

    def on_alert(self, trainer: TrainerView, messages: Sequence[str]) -> None:
        step = _tracker_step(trainer, trainer.progress.step)

        def write(tracker: Any) -> None:
            if tracker.name == "tensorboard":
                tracker.writer.add_text("runlog", "\n\n".join(messages), step)
            elif tracker.name == "wandb":
                tracker.run.log({"runlog": "\n".join(messages)}, step=step)

        self._call_each(write)

    def on_evaluate(self, trainer: TrainerView, record: EvaluationRecord) -> None:
        self._log(held_out.tracked(record.result), _tracker_step(trainer, record.step))

    def on_end(self, trainer: TrainerView) -> None:
        self.has_ended = True

    def on_error(self, trainer: TrainerView, error: Exception) -> None:
        self.has_ended = False

    def close(self, trainer: TrainerView) -> None:
        # Finish the trackers here, when the model is written: some wait until everything is uploaded. A run that failed is not
        # marked as finished. Do not call `Accelerator.end_training`, which would end the process group too.
        if self.has_ended:
            self._call_each(lambda tracker: tracker.finish())

    def _log(self, values: dict[str, Any], step: int) -> None:
        self._call_each(lambda tracker: tracker.log(values, step=step))

    def _call_each(self, call: Callable[[GeneralTracker], None]) -> None:
        """Call ``call`` with each tracker that has not failed."""
        self.accelerator.trackers = [
            tracker for tracker in self.accelerator.trackers if _succeeds(tracker.name, partial(call, tracker))
        ]


def _make_options(config: RecipeConfig, ids: dict[str, str], wandb_id: str) -> dict[str, dict[str, Any]]:
    """Return tracker -> its arguments: the name of the run, and its id if the tracker takes one.

    Args:
        ids: tracker -> its id of the run that is continued; empty for a new run.
        wandb_id: W&B's id of the run. Unlike MLflow, W&B also takes an id for a new run.
    """
    run_name = config.run_name or os.environ.get("WANDB_NAME") or Path(config.output_dir).name
    # MLflow reads a name only for a new run.
    mlflow_options = {"run_name": run_name}
    if "mlflow" in ids:
        mlflow_options = {"run_id": ids["mlflow"]}
    return {
        "wandb": {"name": run_name, "id": wandb_id, "resume": "allow"},
        "mlflow": mlflow_options,
        "swanlab": {"experiment_name": run_name},
        "trackio": {"name": run_name},
    }


def _succeeds(name: str, call: Callable[[], None]) -> bool:
    """Return whether a call of a tracker raises no error; otherwise, print a warning."""
    try:
        call()
    # Catch everything, since each tracker's library has other errors.
    except Exception as error:
        reason = without_passwords(f"{type(error).__name__}: {error}")
        tqdm.write(f"WARNING: {name}: {reason}. The run goes on without this tracker; the runlog has all values")
        return False
    return True


def _why_wandb_is_offline() -> str | None:
    """Return why W&B can only record on this machine; None if it can be reached."""
    import wandb

    address = wandb.setup().settings.base_url
    # Without a key, W&B would ask for one, and an unattended run would wait without end.
    if not (os.environ.get("WANDB_API_KEY") or _is_logged_in(urlsplit(address).netloc)):
        return f"there is no key for {address} (wandb login)"
    # Test the connection here, since W&B's client tries for minutes.
    try:
        hub.connect(address)
    except OSError as error:
        return f"{address} cannot be reached ({error.strerror or error})"
    return None


def _is_logged_in(host: str) -> bool:
    """Return whether ``wandb login`` has written a key for a host into the netrc file, under its name or an earlier one."""
    try:
        names = netrc(os.environ.get("NETRC")).hosts
    except (OSError, NetrcParseError):
        return False
    return any(name == host or "wandb" in name for name in names)


def _read_ids(file: Path) -> dict[str, str]:
    """Return tracker -> its id of the run; nothing if the file is missing or damaged."""
    try:
        return {name: str(run_id) for name, run_id in read_json(file).items()}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, AttributeError) as error:
        # The file may have been changed by hand.
        tqdm.write(f"WARNING: {file}: it has no ids of trackers ({error}), so the trackers begin another run")
        return {}


def _tracker_step(trainer: TrainerView, step: int) -> int:
    """Return the number that trackers get for a step. It also counts the steps that were done twice, so it never goes back."""
    return step + trainer.progress.redone


def _flatten(values: dict[str, Any]) -> dict[str, Any]:
    """Return numbers as they are and other values as text, which every tracker takes, without passwords in addresses."""
    flat = {}
    for name, value in values.items():
        flat[name] = value if isinstance(value, int | float | bool) else without_passwords(str(value))
    return flat
