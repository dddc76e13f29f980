"""Events of the attempts of a run: how each began and ended, and what differs from the one before."""

from __future__ import annotations

from zerobook.runlog.events.event_type import Event, declare
from zerobook.runlog.formatting import far_above_best, figure, next_step_after_stop
from zerobook.utils.units import counted


def _describe_differences(title: str, event: Event) -> str:
    changes = [f"{key} {before} -> {now}" for key, (before, now) in event["differing"].items()]
    return f"{title}: {'; '.join(changes)}."


declare(
    "runlog",
    when="The log is new.",
    fields={"format": "version of the log's format"},
    is_quiet=True,
)


@declare(
    "run_start",
    when="An attempt begins.",
    fields={
        "step": "step from which the attempt continues; 0 for a new run",
        "config": "every key of the recipe's config with its value",
        "sources": "source of each value: default, a YAML file, a flag, Python",
        "versions": "versions of Python and of the packages that training uses",
        "code": "file of the recipe; commit of the git repository that tracks it, and how many files differ from that",
        "argv": "command line of the process",
        "plan": "resolved launch: strategy, processes, device, precision, DeepSpeed config, notes",
        "live": "strategy as read from the prepared model and optimizer: class that wraps the model, ZeRO stage, dtype of the "
        "master weights, and the number of them that rank 0 updates",
        "batch": "text: micro-batch x accumulation x processes (or groups that share rows) = global batch",
        "total_steps": "optimizer steps of the learning-rate schedule",
        "data": "number of training rows; for each dataset its format, statistics, ignored columns and unusable samples",
    },
)
def _run_start(event: Event) -> str:
    processes = counted(event["live"]["world_size"], "process")
    steps = counted(event["total_steps"], "step")
    begins = f"goes on from step {event['step']}" if event["step"] else "begins"
    return f"The run {begins}: {event['live']['strategy']} on {processes}, {event['batch']}, {steps} in all."


declare(
    "env",
    when="Written after run_start.",
    fields={
        "host": "host name of rank 0",
        "platform": "operating system",
        "cpus": "logical CPU cores",
        "host_memory": "bytes of host memory",
        "gpus": "names of the GPUs",
        "git": "commit of the git clone that Zerobook runs from, and how many files differ from it",
    },
    is_quiet=True,
)


@declare(
    "config_diff",
    when="The config differs from that of the last attempt.",
    fields={"differing": "key: [before, now]"},
)
def _config_diff(event: Event) -> str:
    return _describe_differences("Other settings than before", event)


@declare(
    "launch_diff",
    when="The launch differs from that of the last attempt: the strategy, the processes, the device, the precision.",
    fields={"differing": "key: [before, now]"},
)
def _launch_diff(event: Event) -> str:
    return _describe_differences("Another launch than before", event)


@declare(
    "env_diff",
    when="Machine or versions differ from those of the last attempt.",
    fields={"differing": "key: [before, now]"},
)
def _env_diff(event: Event) -> str:
    return _describe_differences("Another environment than before", event)


@declare(
    "resume",
    when="A checkpoint was loaded at the start of an attempt.",
    fields={
        "checkpoint": "folder of the checkpoint",
        "step": "its step",
        "cursor": "position in the sample order, over all epochs",
        "samples": "rows trained on so far; with `--packing`, a row is a pack",
        "world_size": "processes before and now",
        "global_batch": "rows of a step before and now",
        "set_aside": "checkpoints of later steps, which were renamed",
        "passed_over": "skipped checkpoints: why each of them could not be read",
        "bytes_read": "bytes of tensors that each rank read",
        "verified": "which of learning rate, samples and random numbers of the next step are as the checkpoint recorded them",
        "differing": "name: [recorded, found], for each of these three that differs",
    },
)
def _resume(event: Event) -> str:
    return f"Resumed from step {event['step']}; as recorded: {', '.join(event['verified'])}."


@declare(
    "preempted",
    when="SIGTERM, SIGUSR1 or Ctrl-C ended the attempt.",
    fields={
        "step": "last step",
        "signal": "name of the signal; SIGINT is Ctrl-C",
        "exit_code": "exit code, 75",
        "saved": "true if the step was saved",
    },
    ending=lambda event: "Interrupted" if event.get("signal") == "SIGINT" else "Preempted",
    style="warn",
)
def _preempted(event: Event) -> str:
    signal = "Ctrl-C" if event["signal"] == "SIGINT" else event["signal"]
    # Logs of earlier versions lack the field ``saved``.
    saved = "saved" if event.get("saved", True) else "not saved"
    return f"{signal} received at step {event['step']}: {saved}, left with exit code {event['exit_code']}."


@declare(
    "stop",
    when="A recovery action, a command or a `KeyboardInterrupt` stopped the attempt. Ctrl-C during the steps is `preempted`.",
    fields={
        "step": "last step",
        "rule": "why it had to stop, in words, such as `on_spike is stop`",
        "why": "finding in words, or the reason that the command gave",
        "reason": "reason, if a `KeyboardInterrupt` stopped it",
        "exit_code": "exit code, 76; left out after a `KeyboardInterrupt`",
        "go_on_from": "newest complete checkpoint from before the spike; if a command stopped the run, from before the stop",
        "set_aside": "checkpoints saved since the spike began, at their new paths",
        "by": "person whose command stopped it",
    },
    ending="STOPPED, and handed over",
    style="bad",
)
def _stop(event: Event) -> str:
    # Ctrl-C has no field ``why``, and a command has ``by``. A person who stopped the run needs no advice.
    if "why" not in event or event.get("by"):
        return f"STOPPED: {event.get('why') or event.get('reason')}."
    return f"STOPPED: {event['why']}. {next_step_after_stop(event.get('go_on_from'))}"


@declare(
    "crash",
    when="The attempt ended with an error, or the attempt before it ended without an event.",
    fields={
        "reason": "error in words",
        "error": "class of the error",
        "traceback": "last 4,000 characters of the traceback",
        "of_attempt": "attempt that ended without an event",
        "last_event": "seq of that attempt's last event",
        "last_utc": "time of that attempt's last event",
        "machine": "seq of its last machine event",
    },
    ending="CRASHED",
    style="bad",
)
def _crash(event: Event) -> str:
    # A later attempt writes the crash of an attempt that was killed.
    subject = f"Attempt {event['of_attempt']}" if event.get("of_attempt") else "CRASH"
    return f"{subject}: {event['reason'].rstrip('.')}."


@declare(
    "early_stop",
    when="Early stopping ends the run.",
    fields={
        "step": "last step",
        "evaluations": "evaluations without a lower held-out loss",
        "best": "lowest held-out loss, nats per supervised token",
        "steps_left": "steps that were not done",
    },
)
def _early_stop(event: Event) -> str:
    return (
        f"Early stopping at step {event['step']}: {counted(event['evaluations'], 'evaluation')} without a lower held-out loss "
        f"than {figure(event['best'], '.4f')}; not done: {counted(event['steps_left'], 'step')}."
    )


@declare(
    "run_end",
    when="The run is done, and its model is on the disk.",
    fields={
        "progress": "progress record, as in a checkpoint",
        "learning_rate_after": "learning rate that a further step would have",
        "eval": "last evaluation",
        "seconds": "seconds of training and of evaluation",
        "far_above_best": "loss: [last value, best], for each loss that ended far above its best",
    },
    ending="Finished",
    style=lambda event: "bad" if event.get("far_above_best") else "good",
)
def _run_end(event: Event) -> str:
    ended = f"The run ended at step {event['progress']['step']}."
    losses = event.get("far_above_best")
    return f"{ended} {far_above_best(losses)}" if losses else ended


@declare(
    "repaired",
    when="The end of a file was damaged when the log was opened.",
    fields={
        "file": "name of the file",
        "torn_bytes": "bytes of the incomplete last line",
        "kept_as": "file that keeps them",
        "damaged_lines_at_the_end": "lines that could not be read",
    },
)
def _repaired(event: Event) -> str:
    if "torn_bytes" in event:
        return f"An incomplete line at the end of {event['file']} was moved to {event['kept_as']}."
    return f"Damaged: {event['damaged_lines_at_the_end']} lines at the end of {event['file']} cannot be read."


@declare(
    "written_late",
    when="A full disk has room again.",
    fields={"lost": "writes that did not fit into memory meanwhile; a write is one event, or the steps since a log point"},
)
def _written_late(event: Event) -> str:
    return "The disk was full; the events of that time are written now."
