"""The training state by parameter name, for checkpoints and for memory counts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import nn

from zerobook.optimizer import OptimizerSpec
from zerobook.strategy.launch_plan import LaunchPlan
from zerobook.strategy.mesh import Mesh
from zerobook.strategy.pieces import Piece, Read
from zerobook.strategy.weights import (
    gather_full,
    get_local_shard,
    persistent_buffers,
    quantisation_state,
    storage_bytes,
    unwrapped_name,
)

# A tensor with fewer elements is written by one rank.
_SPLIT = 1 << 18


class TrainingState:
    """Weights, optimizer state and buffers of a prepared model, as this rank holds them.

    Tensors are read and written by parameter name, complete (`get_tensor`) or in pieces (`pieces`, `restore`). So a checkpoint
    does not depend on the strategy that wrote it.
    """

    mesh: Mesh
    accelerator: Accelerator
    plan: LaunchPlan
    model: nn.Module
    optimizer: torch.optim.Optimizer
    optimizer_spec: OptimizerSpec
    loaded_dtypes: dict[str, torch.dtype]
    """dtype of each weight as the model was loaded, by name"""
    _loaded_buffers: dict[str, torch.Tensor]
    _applied: torch.Tensor | int = 0
    """Number of steps that changed the weights, for an optimizer that does not count them."""

    def _record_loaded(self, model: nn.Module) -> None:
        """Record the dtypes of the loaded model, and copy its buffers. Call it before anything is cast."""
        self.loaded_dtypes = {name: parameter.dtype for name, parameter in model.named_parameters()}
        self._loaded_buffers = {}
        for name, buffer in persistent_buffers(model):
            if not buffer.is_meta:
                self._loaded_buffers[name] = buffer.detach().to("cpu", copy=True)

    @property
    def unwrapped(self) -> nn.Module:
        """The model as the recipe made it (its parameters may still be sharded)."""
        return self.accelerator.unwrap_model(self.model)

    def trainable(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield (name, parameter) of every trained weight, in the same order on all ranks and strategies."""
        for name, parameter in self.model.named_parameters():
            if parameter.requires_grad:
                yield unwrapped_name(name), parameter

    def saved(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield (name, parameter) of every weight that the saved model holds: with adapters, of the trained ones only."""
        adapts = hasattr(self.unwrapped, "peft_config")
        for name, parameter in self.model.named_parameters():
            if parameter.requires_grad or not adapts:
                yield unwrapped_name(name), parameter

    def shape(self, parameter: nn.Parameter) -> torch.Size:
        """Return the shape of the whole parameter, also if this rank holds a part."""
        return parameter.shape

    def _torch_optimizer(self) -> torch.optim.Optimizer:
        # accelerate's wrapper has torch's optimizer as its attribute `optimizer`.
        inner = self.optimizer
        while hasattr(inner, "optimizer"):
            inner = inner.optimizer
        return inner

    def initialising_complete_weights(self) -> AbstractContextManager[None]:
        """Return a context in which new models have complete weights on this process, under every strategy."""
        return nullcontext()

    def materialise_optimizer(self) -> None:
        """Create the state that the optimizer otherwise creates at its first step, as zeros."""
        for _, parameter in self.trainable():
            self._init_state(self._torch_optimizer(), parameter)

    def _init_state(self, optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> None:
        if not optimizer.state[parameter]:
            self.optimizer_spec.init_state(optimizer, parameter)

    def state_shapes(self, parameter: nn.Parameter) -> dict[str, torch.Size]:
        """Return name -> shape of the state that the optimizer keeps for a complete weight."""
        return self.optimizer_spec.state_shapes(self.shape(parameter))

    def get_tensor(self, parameter: nn.Parameter, key: str | None = None) -> torch.Tensor:
        """Return the complete weight (``key`` None) or its optimizer state ``key``, such as ``exp_avg``, in fp32. Collective.

        Each rank needs memory for one complete tensor.
        """
        return gather_full(self._tensor(parameter, key).detach()).float()

    def shards(self, key: str | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (name, this rank's shard) of every trained weight, or of its optimizer state ``key``. No collective.

        A shard is the fp32 tensor that the optimizer updates: the complete weight in one process and under DDP, some of its
        rows under FSDP2, and a flat part, which may be empty, under ZeRO. Its shape is the same during the complete run. The
        tensor is live and may be in host memory. It is valid until the next one is yielded, and must not be changed.
        """
        if key is not None:
            self.materialise_optimizer()
        for name, parameter in self.trainable():
            yield name, self.shard(parameter, key)

    def shard(self, parameter: nn.Parameter, key: str | None = None) -> torch.Tensor:
        """Return this rank's shard of a trained weight, see `shards`."""
        return get_local_shard(self._tensor(parameter, key).detach())

    def set_shard(self, parameter: nn.Parameter, values: torch.Tensor) -> None:
        """Write this rank's shard of a trained weight. Call `refresh_copies` before the next forward pass."""
        self.shard(parameter).copy_(values)

    def refresh_copies(self) -> None:
        """Write the fp32 weights to the copies that forward passes read, where there are any. Collective."""

    def release_gathered_parameters(self) -> None:
        """Re-shard parameters that forward-only passes (evaluation, generation) left gathered. Call on every rank."""

    def pieces(self, more: Mapping[str, Mapping[str, torch.Tensor]] | None = None) -> Iterator[Piece]:
        """Yield this rank's part of all weights and optimizer state. All ranks together yield each element once.

        Nothing is sent between ranks. Values may be live: they are valid until the next piece is yielded.

        Args:
            more: key -> name of a weight -> tensor of the shape of this rank's shard. These tensors are yielded, too.
        """
        more = more or {}
        for index, (name, parameter) in enumerate(self.trainable()):
            # None stands for the weight itself.
            for key in (None, *self.state_shapes(parameter), *more):
                if key is not None and key in more:
                    shard = more[key][name]
                else:
                    shard = self.shard(parameter, key)
                part = self._written_part(index, parameter, shard)
                if part is None:
                    continue
                offset, values = part
                if values.numel():
                    yield Piece(name, key, offset, values)

    def _written_part(
        self, index: int, parameter: nn.Parameter, shard: torch.Tensor
    ) -> tuple[tuple[int, ...], torch.Tensor] | None:
        """Return ``offset`` and ``values`` of the `Piece` that this rank writes; None if it writes nothing.

        In this class every rank holds all tensors. Each rank writes a part of every large tensor. A small tensor is written by
        one rank, in turn.

        Args:
            index: the weight's position in `trainable`.
            shard: this rank's shard of the weight or of its state.
        """
        flat = shard.reshape(-1)
        if flat.numel() < _SPLIT:
            # The ranks take turns.
            return ((0,), flat) if index % self.mesh.world_size == self.mesh.rank else None
        # The size of a part is rounded up, so the last ranks' parts may be shorter or empty.
        length = -(-flat.numel() // self.mesh.world_size)
        start = min(length * self.mesh.rank, flat.numel())
        return (start,), flat[start : start + length]

    def read_shard(self, parameter: nn.Parameter, read: Read) -> torch.Tensor:
        """Return this rank's shard of a tensor like ``parameter`` from a checkpoint, as a new tensor. Collective."""
        return self._read_by_main(self.shape(parameter), read).clone()

    def restore(self, parameter: nn.Parameter, key: str | None, read: Read) -> None:
        """Restore a weight (``key`` None) or optimizer state. Collective.

        Args:
            read: reads the tensor in the checkpoint. If all ranks need the complete tensor, rank 0 reads and sends it.
                Otherwise each rank reads its part.
        """
        with torch.no_grad():
            shape = self.shape(parameter) if key is None else self.state_shapes(parameter)[key]
            value = self._read_by_main(torch.Size(shape), read)
            if key is None:
                parameter.copy_(value)
            else:
                self.optimizer_spec.set_state(self._torch_optimizer(), parameter, key, value)

    def buffers(self) -> dict[str, torch.Tensor]:
        """Return copies of the `persistent_buffers` on the CPU, in the dtypes in which they were loaded.

        DeepSpeed rounds floating-point buffers to the dtype that it computes in. If a buffer has not changed since, the value
        before rounding is returned.
        """
        copies = {}
        for name, buffer in persistent_buffers(self.unwrapped):
            copy = buffer.detach().to("cpu", copy=True).contiguous()
            # A buffer that was on the meta device has no loaded value.
            loaded = self._loaded_buffers.get(name)
            if loaded is not None and loaded.dtype != copy.dtype:
                is_unchanged = torch.equal(loaded.to(copy.dtype), copy)
                copy = loaded.clone() if is_unchanged else copy.to(loaded.dtype)
            copies[name] = copy
        return copies

    def restore_buffers(self, values: dict[str, torch.Tensor]) -> None:
        """Set the buffers of this rank to what `buffers` returned."""
        with torch.no_grad():
            for name, buffer in persistent_buffers(self.unwrapped):
                buffer.copy_(values[name])
                # `buffers` compares with these values. With the old ones, it would return rounded values.
                self._loaded_buffers[name] = values[name]

    # Return the weight itself (``key`` None) or its optimizer state, as this rank's optimizer holds it.
    def _tensor(self, parameter: nn.Parameter, key: str | None) -> torch.Tensor:
        return parameter if key is None else self.optimizer_spec.get_state(self._torch_optimizer(), parameter, key)

    def _read_by_main(self, shape: torch.Size, read: Read) -> torch.Tensor:
        """Return the complete tensor of ``shape``, which rank 0 reads and sends, on every rank's device. Collective."""
        if self.mesh.is_main:
            value = read(0, shape.numel()).view(shape).to(self.mesh.device)
        else:
            value = torch.empty(shape, dtype=torch.float32, device=self.mesh.device)
        if self.mesh.world_size > 1:
            dist.broadcast(value, src=0)
        return value

    def _states(self) -> Iterable[dict[str, Any]]:
        return self._torch_optimizer().state.values()

    def optimizer_steps(self) -> int:
        """Return the optimizer's count of steps, such as the exponent of AdamW's bias correction; 0 before the first."""
        counted = self.optimizer_spec.get_step(self._torch_optimizer())
        return int(self._applied) if counted is None else counted

    # Set the count that `optimizer_steps` returns.
    def set_optimizer_steps(self, steps: int) -> None:
        self._applied = steps
        self.optimizer_spec.set_step(self._torch_optimizer(), steps)

    def scaler_state(self) -> dict[str, Any] | None:
        """Return the fp16 loss scaler's ``kind``, ``scale`` and complete ``state``; None if the loss is not scaled."""
        scaler = self.accelerator.scaler
        if scaler is None:
            return None
        return {"kind": type(scaler).__name__, "scale": scaler.get_scale(), "state": scaler.state_dict()}

    def load_scaler_state(self, saved: dict[str, Any] | None) -> None:
        """Load what `scaler_state` returned; if that was another kind of scaler, load its scale only."""
        scaler = self.accelerator.scaler
        if saved and scaler is not None:
            state = saved["state"]
            if saved["kind"] != type(scaler).__name__:
                # The scale means the same in both kinds. The other numbers of the state do not.
                state = scaler.state_dict() | {"scale": saved["scale"]}
            scaler.load_state_dict(state)

    def set_schedule_step(self, step: int) -> None:
        """Set a schedule that the strategy owns to ``step`` applied steps. Steps skipped for an overflow do not count."""

    def memory(self) -> dict[str, int]:
        """Return the bytes of the tensors that this rank holds now, on all devices together. Each storage counts once.

        The keys are ``parameters`` (with the scales of quantised ones), ``gradients`` (0 after a step has dropped them), and
        ``optimizer`` (fp32 masters and state).
        """
        return {name: storage_bytes(tensors) for name, tensors in self.live_tensors().items()}

    def live_tensors(self) -> dict[str, list[torch.Tensor]]:
        """Return the tensors that `memory` counts, by the same names. Some may share storages."""
        parameters = list(self.model.parameters())
        optimizer_state: list[torch.Tensor] = []
        for state in self._states():
            optimizer_state += [value for value in state.values() if isinstance(value, torch.Tensor)]
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        return {
            "parameters": [*(parameter.data for parameter in parameters), *quantisation_state(self.model)],
            "gradients": gradients,
            "optimizer": optimizer_state,
        }
