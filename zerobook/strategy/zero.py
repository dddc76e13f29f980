"""DeepSpeed ZeRO-0 to 3, with CPU and NVMe offload."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from zerobook.strategy.base import Strategy
from zerobook.strategy.pieces import Read

if TYPE_CHECKING:
    from accelerate import Accelerator

    from zerobook.config import RecipeConfig
    from zerobook.resolve import LaunchPlan


class ZeroStrategy(Strategy):
    """DeepSpeed ZeRO-0 to 3, with CPU or NVMe offload."""

    def __init__(self, accelerator: Accelerator, plan: LaunchPlan):
        super().__init__(accelerator, plan)
        self.shards_parameters = plan.zero_stage == 3
        self.generation_in_step = plan.zero_stage == 3
        self.owns_schedule = bool((plan.deepspeed_config or {}).get("scheduler"))
        self.deepspeed_optimizer: Any = None

    def prepare(self, model: nn.Module, config: RecipeConfig, total_steps: int) -> None:
        self._remember(model)
        self.max_grad_norm = config.max_grad_norm  # clipping itself was written into the DeepSpeed config
        objects: list[Any] = [model]
        if "optimizer" in (self.plan.deepspeed_config or {}):
            from accelerate.utils import DummyOptim

            groups = self._groups(model, config.weight_decay)
            objects.append(DummyOptim(groups, lr=config.learning_rate, weight_decay=config.weight_decay))
        else:
            objects.append(self._build_optimizer(model, config))
        if self.owns_schedule:
            objects.append(self._schedule(objects[1], config, total_steps))
        self.model, self.optimizer, *_ = self.accelerator.prepare(*objects)
        self.deepspeed_optimizer = self.model.optimizer
        if self.plan.precision == "bf16" and self.plan.zero_stage in (1, 2):
            # there, DeepSpeed applies what is not finite unless it is asked to look
            self.deepspeed_optimizer.check_grad_overflow = True
        stage = self.model.zero_optimization_stage()
        if stage != self.plan.zero_stage:
            raise RuntimeError(f"DeepSpeed runs ZeRO-{stage} where {self.plan.config_file} asks for {self.plan.zero_stage}")

    @contextmanager
    def micro_batch(self, *, last: bool) -> Iterator[None]:
        self.model.set_gradient_accumulation_boundary(is_boundary=last)
        yield

    def backward(self, loss: torch.Tensor) -> None:
        # accelerate's own wrapper steps inside backward; the engine itself does not, and that opens the seam
        self.model.backward(loss * self.world_size, scale_wrt_gas=False)

    def gradient_norm(self) -> torch.Tensor:
        from deepspeed.runtime.zero.utils import combine_grad_norm_groups

        zero = self.deepspeed_optimizer
        norm = combine_grad_norm_groups(zero._get_norm_groups()) if self.plan.zero_stage == 3 else zero.scaled_global_norm()
        return norm / zero.loss_scale

    def apply(self, learning_rate: float) -> torch.Tensor | float:
        groups = self.deepspeed_optimizer.param_groups
        scheduled = self.learning_rate()
        for group in groups:
            group["lr"] = learning_rate
        self.model.step()
        applied = self.model.was_step_applied()
        self._applied = self._applied + int(applied)
        if self.owns_schedule and not applied:
            # DeepSpeed moves its schedule, and sets the next rate, only after a step that was applied
            for group in groups:
                group["lr"] = scheduled
        return self.model.get_global_grad_norm()

    def after_forwards(self) -> None:
        if self.plan.zero_stage == 3:
            # It learns the order of modules from the first pass it sees. Learnt from one without a backward pass, it gives
            # up weights behind the forward pass and gathers all of them again in the backward one, for the rest of the run.
            # What to give up where is remembered apart from the order, by an lru_cache inside of a wrapper, and outlives it.
            coordinator = self.deepspeed_optimizer.parameter_offload.get_param_coordinator()
            to_give_up = type(coordinator)._PartitionedParameterCoordinator__params_to_release
            inspect.getclosurevars(to_give_up).nonlocals["func"].cache_clear()
            if not coordinator.is_invalid_trace():
                coordinator._invalidate_trace()

    def learning_rate(self) -> float:
        return float(self.deepspeed_optimizer.param_groups[0]["lr"])

    def shape(self, parameter: nn.Parameter) -> torch.Size:
        return getattr(parameter, "ds_shape", parameter.shape)

    def _torch_optimizer(self) -> torch.optim.Optimizer:
        return self.deepspeed_optimizer.optimizer

    def _masters(self) -> list[torch.Tensor]:
        """This rank's flat fp32 partitions, which the torch optimizer really steps."""
        zero = self.deepspeed_optimizer
        return zero.fp32_partitioned_groups_flat if self.plan.zero_stage == 3 else zero.single_partition_of_fp32_groups

    @contextmanager
    def initialising_whole(self) -> Iterator[None]:
        from transformers.integrations.deepspeed import set_hf_deepspeed_config, unset_hf_deepspeed_config

        unset_hf_deepspeed_config()  # with it set, transformers makes ZeRO-3's pieces
        try:
            yield
        finally:
            set_hf_deepspeed_config(self.accelerator.state.deepspeed_plugin.dschf)

    def materialise_optimizer(self) -> None:
        zero = self.deepspeed_optimizer
        if not any(state for state in self._states()):
            self._make_states()
        if self.plan.zero_stage != 3:
            # DeepSpeed links states to parameters once, in its first group's step, when a second group has none yet.
            zero._hp_optimizer_states_linked = False
            zero._lazy_init_hp_params_optimizer_state()

    def _make_states(self) -> None:
        """State of zeros for every master, as the first step would make it."""
        zero = self.deepspeed_optimizer
        if self.plan.zero_stage == 3 and zero.swap_optimizer:
            # Swapped-out state exists only once the optimizer has run: one step at rate 0 on zero gradients.
            rates = [group["lr"] for group in zero.optimizer.param_groups]
            for group in zero.optimizer.param_groups:
                group["lr"] = 0.0
            for index in range(len(zero.fp16_groups)):
                zero._prepare_sub_group(index, set())
                master = zero.fp32_partitioned_groups_flat[index]
                master.grad = torch.zeros_like(master)
                zero._optimizer_step(index)
                zero._reassign_or_swap_out_partitioned_parameters(index)
                zero._release_sub_group(index, set())
            for group, rate in zip(zero.optimizer.param_groups, rates, strict=True):
                group["lr"] = rate
            return
        for master in self._masters():
            self._init_state(zero.optimizer, master)

    def get_tensor(self, parameter: nn.Parameter, key: str | None = None) -> torch.Tensor:
        from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

        if key is None:
            return safe_get_full_fp32_param(parameter).detach()
        return safe_get_full_optimizer_state(parameter, key).detach()

    def _piece(self, index: int, parameter: nn.Parameter, key: str | None) -> tuple[tuple[int, ...], torch.Tensor] | None:
        if self.plan.zero_stage != 3:
            mapping = parameter._hp_mapping
            return None if mapping is None else ((mapping.lp_fragment_address.start,), mapping.get_hp_fragment(key))
        # DeepSpeed's own getters copy every piece to the GPU, also one in host memory, which the save would copy back
        mine, _ = self.deepspeed_optimizer._get_fp32_opt_state_partition(parameter, True, key)
        start, stop = self._bounds(parameter)
        return (start,), mine[: stop - start]

    def restore(self, parameter: nn.Parameter, key: str | None, read: Read) -> None:
        if self.plan.zero_stage != 3:
            return self._restore_fragment(parameter, key, read)
        # ZeRO-3 cuts equal pieces, the last one padded; its setter narrows without asking
        start, stop = self._bounds(parameter)
        mine = torch.zeros(parameter.ds_tensor.numel(), dtype=torch.float32)
        if stop > start:
            mine[: stop - start] = read(start, stop)
        self.deepspeed_optimizer.set_local_hp_param(mine, parameter, key)
        if key is None:
            import deepspeed

            # the setter reaches the fp32 master only; the copies that forwards read are written by their owner
            with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0):
                if self.rank == 0:
                    parameter.data.copy_(read(0, parameter.ds_numel).view(parameter.ds_shape))

    def _restore_fragment(self, parameter: nn.Parameter, key: str | None, read: Read) -> None:
        """ZeRO-1 and 2: every rank holds the weight that forwards read, and some a stretch of the fp32 master."""
        mapping = parameter._hp_mapping
        value = None
        if key is None:
            value = self._read_by_main(self.shape(parameter), read)
            with torch.no_grad():
                parameter.data.copy_(value)
        if mapping is not None:
            start = mapping.lp_fragment_address.start
            stop = start + mapping.lp_fragment_address.numel
            mine = read(start, stop) if value is None else value.flatten()[start:stop]
            mapping.get_hp_fragment(key).data.copy_(mine)

    def _bounds(self, parameter: nn.Parameter) -> tuple[int, int]:
        """Which numbers of the flattened weight are this rank's under ZeRO-3, without the padding."""
        piece, group = parameter.ds_tensor.numel(), parameter.ds_process_group
        rank = self.rank if group is None else dist.get_rank(group=group)
        whole = self.shape(parameter).numel()
        return min(piece * rank, whole), min(piece * (rank + 1), whole)

    def scaler_state(self) -> dict[str, Any] | None:
        scaler = getattr(self.deepspeed_optimizer, "loss_scaler", None)
        if self.plan.precision != "fp16" or scaler is None:
            return None
        state = {k: v for k, v in vars(scaler).items() if isinstance(v, int | float | bool)}
        return {"kind": type(scaler).__name__, "scale": scaler.cur_scale, "state": state}

    def load_scaler_state(self, saved: dict[str, Any] | None) -> None:
        scaler = getattr(self.deepspeed_optimizer, "loss_scaler", None)
        if not saved or scaler is None or not scaler.dynamic:  # one that the JSON fixes stays as it says
            return
        same = saved["kind"] == type(scaler).__name__
        for key, value in (saved["state"] if same else {"cur_scale": saved["scale"]}).items():
            setattr(scaler, key, value)

    def _schedule(self, optimizer: Any, config: RecipeConfig, total_steps: int) -> Any:
        from accelerate.utils import DummyScheduler

        params = self.accelerator.state.deepspeed_plugin.deepspeed_config["scheduler"].setdefault("params", {})
        warmup = max(1, config.num_warmup_steps)  # DeepSpeed refuses 0
        # accelerate would divide the total by the number of processes; a step is a step on any number
        for key, value in (("warmup_min_lr", 0.0), ("warmup_max_lr", config.learning_rate),
                           ("warmup_num_steps", warmup), ("total_num_steps", max(total_steps, warmup + 1))):  # fmt: skip
            if params.get(key) == "auto":
                params[key] = value
        return DummyScheduler(optimizer, total_num_steps=total_steps, warmup_num_steps=warmup)

    def set_schedule_step(self, step: int) -> None:
        if self.model.lr_scheduler is not None:
            self.model.lr_scheduler.step(step - 1)

    def held(self) -> dict[str, list[torch.Tensor]]:
        held = super().held()
        zero = self.deepspeed_optimizer
        masters = self._masters()
        for p in self.model.parameters():
            if hasattr(p, "ds_tensor"):
                held["parameters"].append(p.ds_tensor.data)
            if getattr(p, "ds_secondary_tensor", None) is not None:
                held["parameters"].append(p.ds_secondary_tensor)
        for tensors in (getattr(zero, "averaged_gradients", None) or {}).values():
            held["gradients"] += [t for t in tensors or [] if t is not None]
        held["gradients"] += [m.grad for m in masters if m.grad is not None]
        buffer = getattr(zero, "grad_partitions_flat_buffer", None)  # ZeRO-3's gradients lie in it, before they are swapped out
        held["gradients"] += [buffer] if buffer is not None else []
        held["optimizer"] += [m.data for m in masters]
        return held

    def describe(self) -> dict[str, Any]:
        zero, masters = self.deepspeed_optimizer, self._masters()
        stage = int(self.model.zero_optimization_stage())
        offload = {"optimizer": "none", "parameters": "none"}
        if zero.offload_optimizer if stage == 3 else zero.cpu_offload:
            offload["optimizer"] = "cpu"
        if stage == 3:
            if zero.optimizer_swapper is not None:
                offload["optimizer"] = "nvme"
            if any(getattr(p, "nvme_swapper", None) is not None for p in self.model.parameters()):
                offload["parameters"] = "nvme"
            elif zero.offload_param:
                offload["parameters"] = "cpu"
        parts = [f"{what}: {where}" for what, where in offload.items() if where != "none"]
        second = zero.parameter_offload.zero_param_parallel_group if stage == 3 else None
        size = dist.get_world_size(second) if second is not None else 1
        groups = f" hpZ {self.world_size // size}x{size}" if size > 1 else ""
        return super().describe() | {
            "strategy": f"ZeRO-{stage}{groups}" + (f" ({', '.join(parts)} offload)" if parts else ""),
            "zero_stage": stage,
            "master_dtype": str(masters[0].dtype).removeprefix("torch."),
            "masters": sum(master.numel() for master in masters),
            "optimizer_class": type(self._torch_optimizer()).__name__,
            "sub_groups": len(masters),
            "offload": offload,
        }
