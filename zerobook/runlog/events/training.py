"""Events of training: log points, evaluations, the machine and the data."""

from __future__ import annotations

from zerobook.health.stragglers import Slow
from zerobook.health.stragglers import describe as describe_slow
from zerobook.runlog.events.event_type import Event, declare
from zerobook.runlog.formatting import figure

declare(
    "metrics",
    when="Written at every log point (`--logging_steps`).",
    fields={
        "steps": "first and last step since the last log point",
        "loss": "loss of the last step, nats per supervised token",
        "mean_loss": "mean of these steps' losses",
        "grad_norm": "global gradient norm of the last step, before clipping",
        "learning_rate": "learning rate of the last step",
        "tokens_per_second": "supervised tokens per second, over all ranks",
        "all_tokens_per_second": "tokens of the rows per second, without padding, over all ranks",
        "data_wait": "share of the time spent waiting for data, 0 to 1",
        "mfu": "model FLOPs utilization, 0 to 1; null on a device whose peak is not known",
        "tflops": "10^12 operations of the model per second and device; null if they are not known",
        "seconds": "for each phase of a step, the seconds that rank 0 (its GPU, if it has one) spent in it since the last log "
        "point. The phase `reduce` is the work at the log point",
        "metrics": "values that hooks and the objective add",
    },
    is_quiet=True,
)


@declare(
    "eval",
    when="An evaluation is done.",
    fields={
        "step": "step of the evaluation",
        "seconds": "seconds it took",
        "loss": "held-out loss, nats per supervised token",
        "perplexity": "e to the loss, if the loss is a cross-entropy",
        "tokens": "supervised tokens of the held-out data",
        "held_out_fingerprint": "fingerprint of the held-out data; only losses with the same one are comparable",
        "datasets": "loss, perplexity and tokens of each dataset, if there are several",
        "metrics": "values of the scorers",
        "samples": "tables of the scorers, such as generated texts",
    },
)
def _eval(event: Event) -> str:
    values = [f"held-out loss {figure(event['loss'], '.4f')}"] if "loss" in event else []
    for name, value in (event.get("metrics") or {}).items():
        values.append(f"{name} {figure(value, '.4g')}")
    return f"Step {event['step']}: {', '.join(values)}."


declare(
    "memory",
    when="Written after the first step.",
    fields={
        "per_rank_bytes": "of each rank: bytes of weights, gradients and optimizer state, and of files of NVMe offload",
        "trained_parameters": "number of trained parameters",
    },
    is_quiet=True,
)


declare(
    "machine",
    when="Written every 30 s, and at the end of the run.",
    fields={
        "memory_used": "bytes of host memory in use (of the container, if its limit is lower)",
        "memory_total": "bytes of host memory in all",
        "swap_used": "bytes of swap in use",
        "own": "resident bytes of this run's process on rank 0 and of its child processes",
        "gpus": "of each GPU: memory used and total (bytes), utilisation (0 to 1), degrees Celsius",
        "allocator": "bytes that torch's CUDA allocator of rank 0 has allocated and reserved, now and at the peak",
    },
    is_quiet=True,
)


@declare(
    "memory_warning",
    when="Host memory is 92 % full.",
    fields={"reason": "how full it is, in words"},
    style="bad",
)
def _memory_warning(event: Event) -> str:
    return f"WARNING: {event['reason']} in use."


@declare(
    "straggler",
    when="A rank has become slower than the others, at a log point.",
    fields={
        "what": "data or forward",
        "host": "host name",
        "ranks": "its ranks that are slow",
        "step": "step of the log point",
        "seconds": "seconds per step that the slowest of these ranks waits for data (`what`: data) or spends in forward passes "
        "(forward)",
        "typical": "the same of a typical rank",
    },
    style="warn",
)
def _straggler(event: Event) -> str:
    # The event has all fields of `Slow`.
    slow = Slow(**{field: event[field] for field in Slow._fields})
    return f"Step {event['step']}: {describe_slow(slow)}."


declare(
    "shard",
    when="A stream reached a shard (`--streaming`).",
    fields={
        "dataset": "number of the dataset",
        "shard": "number of the shard",
        "rows": "rows of the shard",
        "tokens": "tokens of the shard",
        "report": "samples, tokens and lengths of the shard",
        "bad_samples": "samples of it that could not be used",
    },
    is_quiet=True,
)


@declare(
    "profile",
    when="The steps that `--profile` names were done.",
    fields={
        "steps": "first and last step",
        "folder": "folder of the traces, which chrome://tracing and ui.perfetto.dev open",
    },
)
def _profile(event: Event) -> str:
    first, last = event["steps"]
    return f"Steps {first} to {last} were profiled. Traces: {event['folder']}."
