"""A job with the weights of its model and the traces of its micro-batch, each of which is made once."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

from zerobook.plan.job import Job, UnplannableModelError
from zerobook.plan.repetition import Repetition, find_repetitions
from zerobook.plan.sharding import ShardingSpec
from zerobook.plan.state_bytes import ModelWeights
from zerobook.plan.trace import Trace, trace_evaluation, trace_step

log = logging.getLogger(__name__)


@dataclass
class TracedJob:
    """Weights of a job, and the traces of a micro-batch that its strategies need."""

    job: Job
    model: ModelWeights
    # the device whose kernels are simulated, as `Cluster.kernels` names it
    device: str
    # on the meta device
    module: nn.Module
    # (shapes of micro-batch and evaluation, cast, autocast, ranks that share a row) -> the trace, or why there is none
    _traces: dict[tuple[Any, ...], Trace | UnplannableModelError] = field(default_factory=dict)

    # Nothing is traced until `trace` is called.
    @classmethod
    def of(cls, job: Job, device: str) -> TracedJob:
        module = job.build_on_meta()
        return cls(job, job.weights(module), device, module)

    def trace(self, sharding: ShardingSpec) -> Trace:
        """Return the trace of a rank's part of a micro-batch with the casts of ``sharding``.

        Raises:
            UnplannableModelError: the model's step cannot be traced with these casts.
        """
        token_ranks = sharding.token_ranks
        key = (self.job.shape, self.job.evaluation_shape(keeps_logits=False), sharding.cast, sharding.autocast, token_ranks)
        if key not in self._traces:
            try:
                job = replace(self.job, token_ranks=token_ranks)
                trace = trace_job(job, sharding.cast, sharding.autocast, self.device, self.module)
                # The trace is of a rank's tokens alone. In attention, the rank's queries see the keys of the complete row, or
                # a part of its heads computes the complete row. Both are as many operations.
                attention = {}
                for (length, flops), times in trace.work.attention.items():
                    attention[length * token_ranks, flops * token_ranks] = times
                trace.work.attention = Counter(attention)
                self._traces[key] = trace
            except UnplannableModelError as error:
                self._traces[key] = error
        result = self._traces[key]
        if isinstance(result, UnplannableModelError):
            raise result
        return result

    @property
    def failure(self) -> UnplannableModelError | None:
        """The error of the first trace if every trace that was needed failed; otherwise None."""
        failures = [trace for trace in self._traces.values() if isinstance(trace, UnplannableModelError)]
        return failures[0] if failures and len(failures) == len(self._traces) else None


def trace_job(
    job: Job, cast: str, autocast: str, device: str, module: nn.Module | None = None, *, all_layers: bool = False
) -> Trace:
    """Return the trace of a job's largest micro-batch, with the memory of its evaluation.

    Args:
        cast: the precision that the whole model is cast to.
        autocast: the precision that autocast casts single operations to.
        device: the device whose kernels are simulated, as `Cluster.kernels` names it.
        module: the job's model on the meta device; None builds it.
        all_layers: run all of many equal layers, which takes longer and gives the same trace.

    Raises:
        UnplannableModelError: the model's step cannot be traced.
    """
    module = module or job.build_on_meta()
    job = job.on_device(device)
    try:
        if not all_layers:
            try:
                return _trace(job, cast, autocast, device, module, find_repetitions(module))
            except Exception as error:
                # Layers may differ, or the model may fail in any case. Then the error of the complete model is raised.
                log.debug("%s is traced with all layers: %s", job.name, error)
        return _trace(job, cast, autocast, device, module, None)
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        reason: Exception = ValueError(f"its code reads the values of tensors, as a loop over experts does ({error})")
    except Exception as error:  # some kernels do not accept fake tensors
        reason = error
    raise UnplannableModelError(
        job.name, job.model_config.to_dict(), reason, "its step cannot be traced on tensors without contents"
    )


def _trace(
    job: Job, cast: str, autocast: str, device: str, module: nn.Module, repetitions: Sequence[Repetition] | None
) -> Trace:
    """Return the trace of a step and an evaluation.

    Args:
        repetitions: equal layers, of which few run; None runs all layers.
    """
    loss = job.objective.loss
    with job.build(cast=cast, model=module, repetitions=repetitions or ()) as (model, batch):
        trace = trace_step(model, batch, loss, autocast, device=device, repetitions=repetitions)
        # `zerobook.head` computes the loss in chunks, if the objective allows it, and keeps no logits.
        has_chunked_loss = hasattr(model, "loss_head") and job.objective.takes_positions
        shape = job.evaluation_shape(keeps_logits=not has_chunked_loss)
        if shape is not None:
            batch = job.recipe.example_batch(shape)
            trace.evaluation_bytes = trace_evaluation(model, batch, loss, autocast, device=device, repetitions=repetitions)
        return trace
