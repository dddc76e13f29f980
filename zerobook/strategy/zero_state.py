"""The training state under DeepSpeed ZeRO, whose optimizer updates flat fp32 partitions of the weights."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import nn

from zerobook.strategy.pieces import Read
from zerobook.strategy.state import TrainingState

if TYPE_CHECKING:
    from deepspeed.runtime.engine import DeepSpeedEngine
    from deepspeed.utils.tensor_fragment import tensor_fragment

    class ZeroParameter(nn.Parameter):
        """A weight with what DeepSpeed attaches to it: fragments under ZeRO-1 and 2, the ``ds_`` names under ZeRO-3."""

        _hp_mapping: tensor_fragment | None
        _index_in_param_group: int
        ds_tensor: torch.Tensor
        ds_secondary_tensor: torch.Tensor | None
        ds_shape: torch.Size
        ds_numel: int
        ds_process_group: dist.ProcessGroup | None


class ZeroState(TrainingState):
    """Weights and optimizer state as ZeRO-1 to 3 partition them, in memory or on NVMe.

    The optimizer updates fp32 copies of the weights, the masters. Under ZeRO-1 and 2, every rank holds all weights for the
    forward pass. The masters of a parameter group are joined to one flat tensor, of which each rank holds a partition. So a
    rank has a range of some masters (a fragment) and nothing of the others. Under ZeRO-3, each weight and its master are cut
    into one partition for each rank.
    """

    model: DeepSpeedEngine
    deepspeed_optimizer: Any
    """DeepSpeed's optimizer, whose class depends on the stage; None before `prepare`"""

    def shape(self, parameter: nn.Parameter) -> torch.Size:
        return getattr(parameter, "ds_shape", parameter.shape)

    def _torch_optimizer(self) -> torch.optim.Optimizer:
        return self.deepspeed_optimizer.optimizer

    def _masters(self) -> list[torch.Tensor]:
        """Return this rank's flat fp32 partitions: the tensors that the torch optimizer updates."""
        zero = self.deepspeed_optimizer
        if self.plan.zero_stage == 3:
            return zero.fp32_partitioned_groups_flat
        return zero.single_partition_of_fp32_groups

    @contextmanager
    def initialising_complete_weights(self) -> Iterator[None]:
        from transformers.integrations.deepspeed import set_hf_deepspeed_config, unset_hf_deepspeed_config

        # While transformers has this config, it shards new models.
        unset_hf_deepspeed_config()
        try:
            yield
        finally:
            set_hf_deepspeed_config(self.accelerator.state.deepspeed_plugin.dschf)

    def materialise_optimizer(self) -> None:
        zero = self.deepspeed_optimizer
        if not any(self._states()):
            self._make_states()
        if self.plan.zero_stage != 3:
            # DeepSpeed links states to parameters once, in the step of its first group, when a second group has no state yet.
            # So let it link them again.
            zero._hp_optimizer_states_linked = False
            zero._lazy_init_hp_params_optimizer_state()

    def _make_states(self) -> None:
        """Create optimizer state of zeros for every master, as the first step would."""
        if self.plan.zero_stage == 3 and self.deepspeed_optimizer.swap_optimizer:
            # DeepSpeed makes the files of swapped-out state only when the optimizer runs.
            self._step_without_change()
        else:
            for master in self._masters():
                self._init_state(self._torch_optimizer(), master)

    # Take an optimizer step at rate 0 with gradients of 0.
    def _step_without_change(self) -> None:
        zero = self.deepspeed_optimizer
        rates = [group["lr"] for group in zero.optimizer.param_groups]
        for group in zero.optimizer.param_groups:
            group["lr"] = 0.0
        # DeepSpeed's own step makes the same calls for each of its groups.
        for index in range(len(zero.fp16_groups)):
            zero._prepare_sub_group(index, set())
            master = zero.fp32_partitioned_groups_flat[index]
            master.grad = torch.zeros_like(master)
            zero._optimizer_step(index)
            zero._reassign_or_swap_out_partitioned_parameters(index)
            zero._release_sub_group(index, set())
        for group, rate in zip(zero.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate

    def get_tensor(self, parameter: nn.Parameter, key: str | None = None) -> torch.Tensor:
        from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

        if not parameter.requires_grad:
            return self._get_frozen(parameter)
        if key is None:
            return safe_get_full_fp32_param(parameter).detach()
        return safe_get_full_optimizer_state(parameter, key).detach()

    def _get_frozen(self, parameter: nn.Parameter) -> torch.Tensor:
        """Return a complete frozen weight, which has no fp32 master. Collective under ZeRO-3."""
        if self.plan.zero_stage != 3:
            return parameter.detach().float()
        import deepspeed

        with deepspeed.zero.GatheredParameters([parameter]):
            # Copy the weight, since the gathered one is freed when the context ends.
            return parameter.detach().to(torch.float32, copy=True)

    def shard(self, parameter: nn.Parameter, key: str | None = None) -> torch.Tensor:
        if self.plan.zero_stage != 3:
            mapping = cast("ZeroParameter", parameter)._hp_mapping
            # This rank's partition may have no part of this weight.
            return torch.empty(0) if mapping is None else mapping.get_hp_fragment(key).detach()
        # DeepSpeed's public functions copy every partition to the GPU, also if it is in host memory, and a save would copy it
        # back. True releases the buffers into which a swapped-out state was read.
        partition, _ = self.deepspeed_optimizer._get_fp32_opt_state_partition(parameter, True, key)
        start, stop = self._partition_bounds(parameter)
        return partition[: stop - start].detach()

    def set_shard(self, parameter: nn.Parameter, values: torch.Tensor) -> None:
        if self.plan.zero_stage != 3:
            return super().set_shard(parameter, values)
        self._set_partition(parameter, None, values)

    def refresh_copies(self) -> None:
        zero = self.deepspeed_optimizer
        if self.plan.zero_stage != 3:
            # Copy the fp32 partitions into the model's weights, and gather these.
            zero.update_lp_params()
            return
        # Make the calls of DeepSpeed's own step in the same order, without the optimizer's step.
        zero.parameter_offload.partition_all_parameters()
        for index in range(len(zero.fp16_groups)):
            if zero.swap_optimizer:
                zero._optimizer_states_and_gradient_swap_in(index)
            zero._reassign_or_swap_out_partitioned_parameters(index)
            if zero.swap_optimizer:
                zero._optimizer_states_and_gradient_swap_out(index)
        if zero.persistent_parameters:
            # Small weights always stay gathered, so gather them again with the new numbers.
            zero.persistent_parameters[0].all_gather(zero.persistent_parameters)
        # The secondary partition (hpZ) still holds the old weights.
        zero.invalidate_secondary_tensor()

    def _written_part(
        self, index: int, parameter: nn.Parameter, shard: torch.Tensor
    ) -> tuple[tuple[int, ...], torch.Tensor] | None:
        return (self._find_start(parameter),), shard

    def read_shard(self, parameter: nn.Parameter, read: Read) -> torch.Tensor:
        shard = torch.empty_like(self.shard(parameter))
        start = self._find_start(parameter)
        if shard.numel():
            shard.copy_(read(start, start + shard.numel()))
        return shard

    def _find_start(self, parameter: nn.Parameter) -> int:
        """Return where this rank's shard begins in the flattened weight; 0 for an empty one under ZeRO-1 and 2."""
        if self.plan.zero_stage == 3:
            return self._partition_bounds(parameter)[0]
        mapping = cast("ZeroParameter", parameter)._hp_mapping
        return 0 if mapping is None else mapping.lp_fragment_address.start

    def restore(self, parameter: nn.Parameter, key: str | None, read: Read) -> None:
        if self.plan.zero_stage != 3:
            return self._restore_fragment(parameter, key, read)
        # ``read`` returns a range of the flattened tensor: of the weight if ``key`` is None, or of its optimizer state ``key``.
        start, stop = self._partition_bounds(parameter)
        values = read(start, stop) if stop > start else torch.empty(0)
        self._set_partition(parameter, key, values)
        if key is None:
            import deepspeed

            # `_set_partition` changes the fp32 master only. Rank 0 also writes the weight that forward passes read. All ranks
            # have to enter the context, at whose end each keeps its partition of the weight.
            sharded = cast("ZeroParameter", parameter)
            with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0):
                if self.mesh.rank == 0:
                    parameter.data.copy_(read(0, sharded.ds_numel).view(sharded.ds_shape))

    def _set_partition(self, parameter: nn.Parameter, key: str | None, values: torch.Tensor) -> None:
        """Write this rank's partition of a weight or its state under ZeRO-3."""
        # All partitions of a weight have one size, and the last ones are padded. DeepSpeed takes values of this size
        # only.
        partition = torch.zeros(cast("ZeroParameter", parameter).ds_tensor.numel(), dtype=torch.float32)
        partition[: values.numel()] = values
        self.deepspeed_optimizer.set_local_hp_param(partition, parameter, key)

    def _restore_fragment(self, parameter: nn.Parameter, key: str | None, read: Read) -> None:
        """Restore a weight or its state under ZeRO-1 and 2. Collective."""
        mapping = cast("ZeroParameter", parameter)._hp_mapping
        value = None
        if key is None:
            # Every rank holds the complete weight for forward passes, also a rank without a fragment of its master. Collective.
            value = self._read_by_main(self.shape(parameter), read)
            with torch.no_grad():
                parameter.data.copy_(value)
        if mapping is not None:
            start = mapping.lp_fragment_address.start
            stop = start + mapping.lp_fragment_address.numel
            fragment = read(start, stop) if value is None else value.flatten()[start:stop]
            mapping.get_hp_fragment(key).data.copy_(fragment)

    def _partition_bounds(self, parameter: nn.Parameter) -> tuple[int, int]:
        """Return (start, stop) of this rank's partition of the flattened weight under ZeRO-3, without its padding."""
        sharded = cast("ZeroParameter", parameter)
        group = sharded.ds_process_group
        rank = self.mesh.rank if group is None else dist.get_rank(group=group)
        # All partitions have this size. The last ones may end, or even begin, after the end of the weight.
        size = sharded.ds_tensor.numel()
        total = self.shape(parameter).numel()
        return min(size * rank, total), min(size * (rank + 1), total)

    def scaler_state(self) -> dict[str, Any] | None:
        scaler = getattr(self.deepspeed_optimizer, "loss_scaler", None)
        if self.plan.precision != "fp16" or scaler is None:
            return None
        state = {key: value for key, value in vars(scaler).items() if isinstance(value, int | float | bool)}
        return {"kind": type(scaler).__name__, "scale": scaler.cur_scale, "state": state}

    def load_scaler_state(self, saved: dict[str, Any] | None) -> None:
        scaler = getattr(self.deepspeed_optimizer, "loss_scaler", None)
        # If the scale is not dynamic, the JSON has fixed it.
        if not saved or scaler is None or not scaler.dynamic:
            return
        # Of another kind of scaler, only the scale means the same.
        state = saved["state"] if saved["kind"] == type(scaler).__name__ else {"cur_scale": saved["scale"]}
        # Load the numbers that change during a run. The state also has settings of the JSON, which may now have other values.
        for key in state.keys() & {"cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis"}:
            setattr(scaler, key, state[key])

    def memory(self) -> dict[str, int]:
        sizes = super().memory()
        if self.plan.swap_folders:
            # Bytes of this rank's tensors that are in files.
            sizes["swapped_out"] = 0
            for folder in self.plan.swap_folders:
                files = Path(folder).glob(f"zero_stage_3/*/rank{dist.get_rank()}/**/*.swp")
                sizes["swapped_out"] += sum(file.stat().st_size for file in files)
        return sizes

    def live_tensors(self) -> dict[str, list[torch.Tensor]]:
        tensors = super().live_tensors()
        zero = self.deepspeed_optimizer
        for parameter in self.model.parameters():
            if hasattr(parameter, "ds_tensor"):
                tensors["parameters"].append(parameter.ds_tensor.data)
            # hpZ's second copy of the weights.
            if getattr(parameter, "ds_secondary_tensor", None) is not None:
                tensors["parameters"].append(parameter.ds_secondary_tensor)
        for gradients in (getattr(zero, "averaged_gradients", None) or {}).values():
            tensors["gradients"] += [gradient for gradient in gradients or [] if gradient is not None]
        # DeepSpeed's flat masters are not the parameters of the model, which were counted above.
        masters = self._masters()
        tensors["gradients"] += [master.grad for master in masters if master.grad is not None]
        # ZeRO-3 has a buffer for the gradients of all weights, also with offload. Without offload, ``averaged_gradients`` are
        # slices of it. `memory` counts each storage once.
        buffer = getattr(zero, "grad_partitions_flat_buffer", None)
        if buffer is not None:
            tensors["gradients"].append(buffer)
        tensors["optimizer"] += [master.data for master in masters]
        return tensors
