"""FSDP2, full and hybrid."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from zerobook.strategy.base import Strategy, local, whole

if TYPE_CHECKING:
    from accelerate import Accelerator

    from zerobook.config import RecipeConfig
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

    def prepare(self, model: nn.Module, config: RecipeConfig, total_steps: int) -> None:
        if not getattr(model.config, "is_encoder_decoder", False):
            return super().prepare(model, config, total_steps)
        from torch.distributed.fsdp import register_fsdp_forward_method

        with _encoder_decoder(model, self.device):
            super().prepare(model, config, total_steps)
        # it calls the encoder by itself, and what encoder and decoder share is gathered by the whole model's hooks
        register_fsdp_forward_method(self.model, "generate")

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

    def describe(self) -> dict[str, Any]:
        from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule

        mesh = list(next(p for _, p in self.trainable()).device_mesh.shape)
        # what lies outside the layers may stay gathered, whatever the file says: the root does so by itself
        _, *inner = self.model.modules()
        groups = [m._get_fsdp_state()._fsdp_param_group for m in inner if isinstance(m, FSDPModule)]
        groups = [group for group in groups if group is not None]
        offload = "cpu" if all(isinstance(group.offload_policy, CPUOffloadPolicy) for group in groups) else "none"
        name = "FSDP2" if len(mesh) == 1 else f"FSDP2 hybrid {'x'.join(map(str, mesh))}"
        return super().describe() | {
            "strategy": name + (" (cpu offload)" if offload == "cpu" else ""),
            "wrapper": FSDPModule.__name__,
            "mesh": mesh,
            "offload": {"optimizer": offload, "parameters": offload},
            "reshard_after_forward": any(group._reshard_after_forward for group in groups),
        }


@contextmanager
def _encoder_decoder(model: nn.Module, device: torch.device) -> Iterator[None]:
    """What accelerate does not know of encoder-decoder models while it shards them.

    It would give the embedding and the head a group of their own, without the encoder's and decoder's views of the same
    weight, which torch refuses; unseen, all of them stay with the root. It takes every tensor of the state dict for a
    sharded parameter; BART and its kin keep a buffer there. And BlenderBot and Pegasus do not name their layers' classes.
    """
    import torch.distributed as dist

    if not model._no_split_modules:
        parts = [child for part in (model.get_encoder(), model.get_decoder()) for child in part.children()]
        lists = [child for child in parts if isinstance(child, nn.ModuleList)]
        model._no_split_modules = {type(layer).__name__ for layers in lists for layer in layers}
    state = model.state_dict(keep_vars=True)
    hidden = []
    for name, buffer in model.named_buffers():
        if name in state:
            path, _, leaf = name.rpartition(".")
            module = model.get_submodule(path)
            value = torch.empty_like(buffer, device=device) if buffer.is_meta else buffer.to(device)
            dist.broadcast(value, src=0)  # where the file lacks it, only rank 0 has made one
            setattr(module, leaf, value)
            hidden.append((module, leaf))
    for module, leaf in hidden:
        module._non_persistent_buffers_set.add(leaf)
    model.get_input_embeddings = model.get_output_embeddings = lambda: None
    try:
        yield
    finally:
        del model.get_input_embeddings, model.get_output_embeddings
        for module, leaf in hidden:
            module._non_persistent_buffers_set.discard(leaf)
