"""The interface of all strategies, so that the training code does not depend on how a run is distributed.

A `Strategy` owns the prepared model and optimizer. One optimizer step is

    for micro-batch:
        with strategy.micro_batch(last=...): loss = ...; strategy.backward(loss)
    #  <- gradients are reduced and ready, no update is applied yet: `gradients` and `gradient_norm` may be called
    norm = strategy.optimizer_step(learning_rate)

under every strategy, DeepSpeed included. `Strategy` inherits the steps from `zerobook.strategy.engine`, and reading and writing
the state for checkpoints from `zerobook.strategy.state`. `zerobook.strategy.mesh` describes the processes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import torch
from accelerate import Accelerator
from torch import nn

from zerobook.optimizer import optimizer_spec
from zerobook.strategy.engine import Engine
from zerobook.strategy.launch_plan import LaunchPlan
from zerobook.strategy.mesh import Mesh
from zerobook.strategy.replicas import ReplicaDifference, compare_replicas
from zerobook.strategy.swap import SwappedWeights
from zerobook.strategy.weights import get_local_shard, unwrapped_name
from zerobook.utils.units import counted

T = TypeVar("T")


class Strategy(Engine):
    """Base class of all strategies. Subclasses override the methods that differ."""

    shards_parameters = False
    """Each rank holds a part of the weights only."""
    generation_in_step = False
    """``generate`` gathers weights, so all ranks must call it together (``synced_gpus=True``)."""
    owns_schedule = False
    """The strategy file brings a learning-rate schedule of its own."""

    def __init__(self, accelerator: Accelerator, plan: LaunchPlan):
        self.accelerator = accelerator
        self.mesh = Mesh(accelerator, plan.data_parallel_size, plan.tensor)
        self.plan = plan
        # Both are set by `prepare`.
        self.model: nn.Module = None  # type: ignore[assignment]
        self.optimizer: torch.optim.Optimizer = None  # type: ignore[assignment]
        self.max_grad_norm = 0.0
        self.optimizer_spec = optimizer_spec(plan.optimizer)
        self.loaded_dtypes = {}
        self._loaded_buffers = {}
        self._skips_on_device = self.optimizer_spec.skips_nonfinite
        if accelerator.num_processes != plan.world_size:
            raise RuntimeError(
                f"accelerate formed {counted(accelerator.num_processes, 'process')} where the launcher started "
                f"{plan.world_size}; every rank would read all the data"
            )

    # --- shortcuts to the mesh
    @property
    def rank(self) -> int:
        return self.mesh.rank

    @property
    def world_size(self) -> int:
        return self.mesh.world_size

    @property
    def is_main(self) -> bool:
        return self.mesh.is_main

    @property
    def device(self) -> torch.device:
        return self.mesh.device

    def barrier(self) -> None:
        self.mesh.barrier()

    def sum_over_ranks(self, values: torch.Tensor) -> torch.Tensor:
        return self.mesh.sum_over_ranks(values)

    def from_main(self, value: T | None) -> T:
        return self.mesh.from_main(value)

    def gather(self, value: T) -> list[T]:
        return self.mesh.gather(value)

    @property
    def nodes(self) -> int:
        return self.mesh.nodes

    def on_main(self, work: Callable[[], T], *, takes_long: bool = False) -> T:
        return self.mesh.on_main(work, takes_long=takes_long)

    def once_per_node(self, work: Callable[[], T]) -> T:
        return self.mesh.once_per_node(work)

    def swapped_weights(self, weights: Mapping[str, torch.Tensor]) -> AbstractContextManager[None]:
        """Return a context in which the model has ``weights``, in evaluations and for `get_tensor`. Collective.

        Nothing may be trained and no checkpoint may be saved inside. Afterwards, the training continues exactly as without the
        context. The numbers are exchanged: inside the context, ``weights`` holds the trained ones. So the only additional
        memory is that of one shard.

        Args:
            weights: name -> fp32 tensor of the shape of this rank's shard, for every weight that `shards` yields.

        Raises:
            ValueError: on entering, if a tensor is missing, unknown, or of another shape or dtype.
        """
        return SwappedWeights(self, weights)

    def find_differing_replicas(self) -> ReplicaDifference | None:
        """Return the difference between the ranks' copies of the weights. Collective.

        Returns:
            None if all copies are equal, or if there are none, as under ZeRO-3 and under FSDP2 without replicas.
        """
        groups = self.plan.replica_groups
        if not groups:
            return None
        named = [(unwrapped_name(name), get_local_shard(parameter)) for name, parameter in self.model.named_parameters()]
        return compare_replicas(self.mesh, groups, named)

    def finish(self) -> None:
        """Delete files that only the training needs. Collective. Call it when the model will not be used again."""

    def describe(self) -> dict[str, Any]:
        """Return facts about the strategy that runs, read from the live objects and not from the plan or files.

        ``strategy`` has the form of `LaunchPlan.name`. ``wrapper`` is the class that wraps the model, or ``none``. ``masters``
        is the number of weight elements that this rank's optimizer updates, without those that are swapped out.
        """
        trained = [parameter for _, parameter in self.trainable()]
        wrapper = "none" if self.model is self.unwrapped else type(self.model).__name__
        display_names = {"none": "one process", "DistributedDataParallel": "DDP"}
        return {
            "strategy": display_names.get(wrapper, wrapper),
            "wrapper": wrapper,
            # `ZeroStrategy` replaces this value.
            "zero_stage": None,
            "world_size": self.mesh.world_size,
            "master_dtype": str(trained[0].dtype).removeprefix("torch."),
            "masters": sum(get_local_shard(parameter).numel() for parameter in trained),
        }
