"""FSDP2, full and hybrid."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import nn

from zerobook.strategy.base import Strategy, local, whole

if TYPE_CHECKING:
    from accelerate import Accelerator

    from zerobook.resolve import LaunchPlan


class FullyShardedStrategy(Strategy):
    """FSDP2, full or hybrid: parameters, gradients and moments are DTensors.

    Gradients are reduce-scattered at every micro-batch, so they stay sharded while accumulating.
    """

    shards_parameters = True
    generation_in_step = True

    def __init__(self, accelerator: Accelerator, plan: LaunchPlan):
        super().__init__(accelerator, plan)
        if not accelerator.is_fsdp2:
            raise RuntimeError(
                f"accelerate chose {accelerator.distributed_type} where the file asks for FSDP2; sharding would be dropped"
            )

    def apply(self, learning_rate: float | None) -> torch.Tensor | float:
        return whole(super().apply(learning_rate))

    def trainable(self) -> Iterator[tuple[str, nn.Parameter]]:
        from torch.distributed.fsdp import FSDPModule

        # A forward without a backward (evaluation) leaves the last group gathered, as plain parameters that
        # are not the optimizer's.
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
        yield from super().trainable()

    def set_tensor(self, parameter: nn.Parameter, value: torch.Tensor, key: str | None = None) -> None:
        from torch.distributed.tensor import DTensor, distribute_tensor

        target = parameter if key is None else self._state_of(parameter)[key]
        with torch.no_grad():
            if isinstance(target, DTensor):
                # every rank holds the value, so each cuts its own piece and nothing is sent
                mesh = target.device_mesh
                whole = value.to(mesh.device_type)
                piece = distribute_tensor(whole, mesh, target.placements, src_data_rank=None)
                target.to_local().copy_(piece.to_local())
            else:
                target.copy_(value)

    def _held(self) -> dict[str, list[torch.Tensor]]:
        return {name: [local(t) for t in tensors] for name, tensors in super()._held().items()}
