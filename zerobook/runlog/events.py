"""The events of a runlog: when each is written, and the fields it has. The reference in the docs is generated from them."""

from __future__ import annotations

from typing import NamedTuple


class EventKind(NamedTuple):
    """``when`` it is written; ``fields``: what each of its own fields holds."""

    when: str
    fields: dict[str, str]


COMMON = {
    "seq": "number of the event, from 0, without gaps over the whole file",
    "attempt": "number of the process start, from 1",
    "branch": "number of the branch, from 0; a new one begins whenever steps are done again",
    "type": "type of the event",
    "utc": "time of day, UTC, ISO 8601 with milliseconds",
    "monotonic": "seconds of a clock that only runs forward; comparable within an attempt",
    "parent": "seq of the event that caused this one; left out where nothing did",
    "crc": "CRC-32 of the bytes of the line before this field",
}
"""Fields of every event."""

_FINDING = {
    "kind": "kind of the finding, see `zerobook.monitor.detector.Finding`",
    "alarm": "true for a spike, damage or a divergence",
    "step": "step at which it was noticed",
    "onset": "step at which it began",
    "points": "logged points since the onset",
    "base": "level of the loss before it, nats per supervised token",
    "peak": "highest loss since the onset",
    "reason": "the reason in words",
}

KINDS: dict[str, EventKind] = {
    "runlog": EventKind("The log is new.", {"format": "version of the log's format"}),
    "run_start": EventKind(
        "An attempt begins.",
        {
            "step": "step that the attempt goes on from; 0 for a new run",
            "config": "every key of the recipe's config with its value",
            "sources": "source of each value: default, a YAML file, a flag, Python",
            "versions": "versions of Python and of the packages that training uses",
            "code": "file of the recipe; commit of the git repository that tracks it, and how many files differ from that",
            "argv": "command line of the process",
            "plan": "resolved launch: strategy, processes, device, precision, DeepSpeed config, notes",
            "live": "strategy as read from the live objects: wrapper, ZeRO stage, master dtype, master weights of rank 0",
            "batch": "micro-batch x accumulation x processes = global batch",
            "total_steps": "optimizer steps of the learning-rate schedule",
            "data": "training rows; of each dataset a report, its format, its ignored columns and its bad samples",
        },
    ),
    "env": EventKind(
        "After run_start.",
        {
            "host": "host name of rank 0",
            "platform": "operating system",
            "cpus": "logical CPU cores",
            "host_memory": "bytes of host memory",
            "gpus": "names of the GPUs",
            "git": "commit of the clone, and whether files differ from it",
        },
    ),
    "config_diff": EventKind("The config differs from that of the last attempt.", {"differing": "key: [before, now]"}),
    "launch_diff": EventKind(
        "The launch differs from that of the last attempt: the strategy, the processes, the device, the precision.",
        {"differing": "key: [before, now]"},
    ),
    "env_diff": EventKind("Machine or versions differ from those of the last attempt.", {"differing": "key: [before, now]"}),
    "resume": EventKind(
        "A checkpoint was loaded at the start of an attempt.",
        {
            "checkpoint": "folder of the checkpoint",
            "step": "its step",
            "cursor": "position in the sample order, over all epochs",
            "samples": "samples seen so far",
            "world_size": "processes before and now",
            "global_batch": "samples of a step before and now",
            "set_aside": "checkpoints of later steps, which were renamed",
            "passed_over": "checkpoints that could not be read, with the reason",
            "bytes_read": "bytes of tensors that each rank read",
            "verified": "names of what the next step uses as the checkpoint recorded it",
            "differing": "name: [recorded, found] of what differs",
        },
    ),
    "verify": EventKind(
        "Steps were done again, after a resume or in a replay.",
        {
            "after": "`steps done again` or `replay`",
            "steps": "first and last step that were compared",
            "largest_relative_difference": "largest relative difference of their losses",
            "first_apart": "first step whose loss is not the same, bit for bit; null where all are",
            "step": "step of the replay that decided",
            "reproduced": "true where the spike came again",
            "loss": "loss now",
            "loss_before": "loss of the step when it was done first",
        },
    ),
    "metrics": EventKind(
        "Every log point (`--logging_steps`).",
        {
            "steps": "first and last step since the last log point",
            "loss": "loss of the last step, nats per supervised token",
            "mean_loss": "mean of these steps' losses",
            "grad_norm": "global gradient norm of the last step, before clipping",
            "learning_rate": "learning rate of the last step",
            "tokens_per_second": "supervised tokens per second, over all ranks",
            "all_tokens_per_second": "tokens of the rows per second, without padding, over all ranks",
            "data_wait": "share of the time spent waiting for data, 0 to 1",
            "mfu": "model FLOPs utilization, 0 to 1; null on a device whose peak is not known",
            "tflops": "10^12 operations of the model per second and device; null where they are not known",
            "seconds": "phase: seconds of rank 0 (of its GPU, if it has one) since the last log point; `reduce` is the log "
            "point itself",
            "waited": "of the seconds in forward, backward and optimizer, those in which rank 0 waited for other ranks or for "
            "a core; null on a GPU, where `--profile` measures it",
            "metrics": "values that hooks and the objective add",
        },
    ),
    "machine": EventKind(
        "Every 30 s.",
        {
            "memory_used": "bytes of host memory in use (of the container, where its limit is lower)",
            "memory_total": "bytes of host memory there are",
            "swap_used": "bytes of swap in use",
            "own": "resident bytes of this process and its children",
            "gpus": "of each GPU: memory used and total (bytes), utilisation (0 to 1), degrees Celsius",
            "allocator": "bytes that torch's CUDA allocator of rank 0 has allocated and reserved, now and at the peak",
        },
    ),
    "memory_warning": EventKind("Host memory is 92 % full.", {"reason": "how full it is, in words"}),
    "anomaly": EventKind("The detector armed, or saw odd data.", _FINDING),
    "spike": EventKind("The detector found a spike, damage, a divergence or another change.", _FINDING),
    "spike_end": EventKind("The loss came back to its level.", _FINDING),
    "decision": EventKind(
        "A measure was chosen against damage or a divergence.",
        {
            "measure": "replay, skip, lower_rate, leave_out, stop or none",
            "rule": "rule that chose it",
            "why": "finding in words",
            "options": "measures that were left",
            "to_step": "step of the checkpoint that the run goes back to",
            "leaves_out_steps": "first and last step whose samples are left out",
            "hardware": "which rank's copy of the weights differs, in words",
            "ladder": "rollbacks so far, and what was tried at this place",
        },
    ),
    "rollback": EventKind(
        "The run goes back to a checkpoint: one event before (`intent`), one after it (`outcome`).",
        {
            "phase": "`intent` or `outcome`",
            "measure": "measure that is carried out",
            "from_step": "step before the rollback",
            "to_step": "step of the checkpoint",
            "why": "finding in words",
            "step": "step after the rollback",
            "steps_given_up": "steps that will be done again",
            "seconds": "seconds of the rollback",
            "bytes_read": "bytes of tensors that each rank read",
            "set_aside": "checkpoints of the branch that was given up, which were renamed",
            "verified": "names of what the next step uses as the checkpoint recorded it",
            "differing": "name: [recorded, found] of what differs",
        },
    ),
    "skip": EventKind(
        "Samples are left out from now on.",
        {
            "ranges": "[start, end) of sample ids",
            "samples": "how many samples these are",
            "steps": "first and last step that took them",
            "why": "finding in words",
        },
    ),
    "lr_change": EventKind(
        "The learning rate is lowered.",
        {"cut": "[step, factor, steps until the rate is back on its schedule]", "why": "finding in words"},
    ),
    "checkpoint": EventKind(
        "The state of a checkpoint changed.",
        {
            "state": "complete, proven_good, pinned, unpinned or not_saved",
            "step": "its step",
            "folder": "its folder",
            "seconds": "seconds of the save",
            "reason": "why it was not saved",
        },
    ),
    "save_failed": EventKind(
        "A save failed.",
        {"step": "step of the save", "reason": "error in words", "last_complete": "newest complete checkpoint"},
    ),
    "eval": EventKind(
        "An evaluation is done.",
        {
            "step": "step of the evaluation",
            "seconds": "seconds it took",
            "loss": "held-out loss, nats per supervised token",
            "perplexity": "e to the loss, where that is a cross-entropy",
            "tokens": "supervised tokens of the held-out data",
            "held_out_fingerprint": "fingerprint of the held-out data; only losses with the same one are comparable",
            "datasets": "loss, perplexity and tokens of each dataset, where there are several",
            "metrics": "values of the scorers",
            "samples": "tables of the scorers, such as generated texts",
        },
    ),
    "early_stop": EventKind(
        "Early stopping ends the run.",
        {
            "step": "last step",
            "evaluations": "evaluations without a lower held-out loss",
            "best": "lowest held-out loss, nats per supervised token",
            "steps_left": "steps that were not done",
        },
    ),
    "shard": EventKind(
        "A stream reached a shard (`--streaming`).",
        {
            "dataset": "number of the dataset",
            "shard": "number of the shard",
            "rows": "rows of the shard",
            "tokens": "tokens of the shard",
            "report": "samples, tokens and lengths of the shard",
            "bad_samples": "samples of it that could not be used",
        },
    ),
    "profile": EventKind(
        "The steps that `--profile` names were done.",
        {
            "steps": "first and last step",
            "ranks": "of each rank: `seconds` of these steps, and the shares of `compute`, of `communication` that no "
            "computation hides, and of `idle`, on its device",
            "folder": "folder of the traces, which chrome://tracing and ui.perfetto.dev open",
        },
    ),
    "memory": EventKind(
        "After the first step.",
        {
            "per_rank_bytes": "of each rank: bytes of weights, gradients and optimizer state",
            "trained_parameters": "number of trained parameters",
        },
    ),
    "preempted": EventKind(
        "A warning signal ended the attempt.",
        {
            "step": "last step",
            "signal": "name of the signal",
            "exit_code": "exit code, 75",
            "saved": "true where the step was saved",
        },
    ),
    "stop": EventKind(
        "The attempt was stopped by Ctrl-C, or by the policy against spikes.",
        {
            "step": "last step",
            "rule": "rule that stopped it",
            "why": "finding in words",
            "reason": "reason, where a person stopped it",
            "exit_code": "exit code, 76",
            "go_on_from": "newest whole checkpoint from before the spike",
            "set_aside": "checkpoints saved since the spike began, at their new paths",
        },
    ),
    "straggler": EventKind(
        "A rank or a link has become slower than the others, at a log point.",
        {
            "what": "data, forward or link",
            "host": "host name",
            "ranks": "ranks that it was measured on",
            "step": "step of the log point",
            "seconds": "seconds of a step that it waits for data or takes for forward passes; seconds of a message over a link",
            "typical": "the same of a typical rank, or of the link's fastest message",
        },
    ),
    "crash": EventKind(
        "The attempt ended with an error, or the attempt before it ended without an event.",
        {
            "reason": "error in words",
            "error": "class of the error",
            "traceback": "last 4,000 characters of the traceback",
            "of_attempt": "attempt that ended without an event",
            "last_event": "seq of that attempt's last event",
            "last_utc": "time of that attempt's last event",
            "machine": "seq of its last machine event",
        },
    ),
    "run_end": EventKind(
        "The run is done, and its model is on the disk.",
        {
            "progress": "progress record, as in a checkpoint",
            "learning_rate_after": "learning rate that a further step would have",
            "eval": "last evaluation",
            "seconds": "seconds of training and of evaluation",
            "far_above_best": "loss: [last value, best], for each loss that ended far above its best",
        },
    ),
    "note": EventKind("A person wrote a note.", {"text": "text", "by": "author", "left": "time at which it was written"}),
    "repaired": EventKind(
        "The end of a file was damaged when the log was opened.",
        {
            "file": "name of the file",
            "torn_bytes": "bytes of the torn last line",
            "kept_as": "file that keeps them",
            "damaged_lines_at_the_end": "lines that could not be read",
        },
    ),
    "written_late": EventKind("A full disk has room again.", {"lost": "lines that did not fit into memory meanwhile"}),
}  # fmt: skip
"""type -> when it is written, and its own fields. Fields that have no value in a case are left out or null."""

STEP_LINE = {
    "attempt": COMMON["attempt"],
    "branch": COMMON["branch"],
    "crc": COMMON["crc"],
}
"""Fields of a line of ``steps.jsonl`` besides those of `zerobook.runlog.records.StepRecord`."""
