"""DeepSpeed ZeRO-0 to 3, with CPU and NVMe offload."""

from __future__ import annotations

import inspect
import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from types import MethodType
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from accelerate.utils import DummyOptim, DummyScheduler
from torch import nn

from zerobook.errors import ConfigError
from zerobook.strategy.base import Strategy
from zerobook.strategy.launch_plan import zero_name
from zerobook.strategy.token_split import ATTENTION, Ulysses
from zerobook.strategy.zero_state import ZeroState
from zerobook.utils.model_config import automatic_zero_sizes, nvme_buffer_elements
from zerobook.utils.replaced import replaced

if TYPE_CHECKING:
    from accelerate import Accelerator
    from transformers import PreTrainedModel

    from zerobook.config import RecipeConfig
    from zerobook.strategy.launch_plan import LaunchPlan
    from zerobook.strategy.zero_state import ZeroParameter


class ZeroStrategy(ZeroState, Strategy):
    """DeepSpeed ZeRO-0 to 3, with CPU or NVMe offload."""

    def __init__(self, accelerator: Accelerator, plan: LaunchPlan):
        super().__init__(accelerator, plan)
        # Only ZeRO-3 shards the weights, so that `generate` has to gather them on all ranks together.
        self.shards_parameters = plan.zero_stage == 3
        self.generation_in_step = plan.zero_stage == 3
        self.owns_schedule = bool((plan.deepspeed_config or {}).get("scheduler"))
        self._has_loaded_model = False
        # DeepSpeed makes it in `prepare`.
        self.deepspeed_optimizer = None

    def prepare(self, model: nn.Module, config: RecipeConfig, total_steps: int) -> None:
        self._remember(model)
        # Clipping itself was written into the DeepSpeed config.
        self.max_grad_norm = config.max_grad_norm
        # accelerate takes a placeholder for an optimizer that the JSON describes, which DeepSpeed then makes.
        objects: list[Any] = [model]
        if "optimizer" in (self.plan.deepspeed_config or {}):
            groups = self._groups(model, config.weight_decay)
            objects.append(DummyOptim(groups, lr=config.learning_rate, weight_decay=config.weight_decay))
        else:
            objects.append(self._build_optimizer(model, config))
        if self.owns_schedule:
            objects.append(self._schedule(objects[1], config, total_steps))
        self._fill_sizes(model)
        if self.plan.sequence > 1:
            self.model, self.optimizer, *_ = self._prepare_split(objects)
        else:
            self.model, self.optimizer, *_ = self.accelerator.prepare(*objects)
        # `optimizer` is accelerate's wrapper, without the methods of DeepSpeed's own.
        self.deepspeed_optimizer = self.model.optimizer
        # DeepSpeed 0.19.8 passes ``train`` and ``eval`` on to the model inside only. An objective that reads the engine's
        # ``training`` would then train in every evaluation.
        self.model.train = MethodType(nn.Module.train, self.model)
        self.model.eval = MethodType(nn.Module.eval, self.model)
        if self.plan.precision == "bf16" and self.plan.zero_stage in (1, 2):
            # In these stages, DeepSpeed applies gradients that are not finite unless this is set.
            self.deepspeed_optimizer.check_grad_overflow = True

    def _spread_frozen(self, model: nn.Module) -> nn.Module:
        """Distribute a frozen model: whole on each rank, except under ZeRO-3, which shards its weights."""
        if self.plan.zero_stage != 3:
            # DeepSpeed casts the trained model in the same way.
            self._cast_frozen(model)
            return model.to(self.mesh.device)
        from deepspeed.runtime.zero.parameter_offload import DeepSpeedZeRoOffload
        from deepspeed.utils.timer import NoopTimer

        # A second engine would share DeepSpeed's global state with the first. This object alone installs the hooks that gather
        # and release the weights, and the hooks keep it alive.
        engine = self.model
        DeepSpeedZeRoOffload(
            model,
            timers=NoopTimer(),
            ds_config=engine.config,
            overlap_comm=engine.zero_overlap_comm(),
            prefetch_bucket_size=engine.zero_prefetch_bucket_size(),
            max_reuse_distance=engine.zero_max_reuse_distance(),
            max_live_parameters=engine.zero_max_live_parameters(),
            param_persistence_threshold=engine.zero_param_persistence_threshold(),
            model_persistence_threshold=engine.zero_model_persistence_threshold(),
            offload_param_config=engine.zero_offload_param(),
        )
        return model

    def _fill_sizes(self, model: nn.Module) -> None:
        """Put numbers in place of ``auto``, which accelerate cannot do for the composite configs of some models."""
        section = self.accelerator.state.deepspeed_plugin.deepspeed_config["zero_optimization"]
        for key, size in automatic_zero_sizes(getattr(model, "config", None)).items():
            if section.get(key) == "auto":
                section[key] = size

    def prepare_to_load(self, new_model: Callable[[], nn.Module]) -> None:
        if self.plan.zero_stage != 3 or self.plan.offload_param != "nvme":
            return
        with self.initialising_whole(), torch.device("meta"):
            largest_weight = max(parameter.numel() for parameter in new_model().parameters())
        plugin = self.accelerator.state.deepspeed_plugin
        # transformers reads the second one while it loads a model.
        for config in (plugin.deepspeed_config, plugin.dschf.config):
            section = config["zero_optimization"]["offload_param"]
            chosen = section.get("buffer_size", "auto")
            section["buffer_size"] = nvme_buffer_elements(chosen, largest_weight, self.world_size)

    def load(self, load: Callable[[dict[str, Any]], PreTrainedModel], options: dict[str, Any]) -> PreTrainedModel:
        if self.plan.zero_stage != 3:
            return super().load(load, options)
        # DeepSpeed 0.19.8 empties the folder of swapped weights whenever it begins to shard a model.
        if self.plan.offload_param == "nvme" and self._has_loaded_model:
            raise ConfigError(
                f"{self.plan.config_file}: offload_param is on nvme, where DeepSpeed deletes the weights of the first model "
                "when a second one is loaded. Set its device to cpu to train with a reference model."
            )
        self._has_loaded_model = True
        with _loads_shards():
            model = super().load(load, options)
        # transformers 5.23 reverses its renamings of weights when it saves a model. It keeps those that matched no name in the
        # model's file under ZeRO-3 only. They would give the saved weights names that other programs do not know.
        renamings = getattr(model, "_weight_conversions", None)
        if renamings is not None:
            model._weight_conversions = [renaming for renaming in renamings if renaming.was_used()]  # type: ignore[assignment]
        return model

    def _prepare_split(self, objects: list[Any]) -> tuple[Any, ...]:
        """Prepare the model and the optimizer, and take Ulysses out of transformers, where accelerate registers it."""
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        unsplit_attention = ALL_ATTENTION_FUNCTIONS[ATTENTION]
        self.accelerator.parallelism_config.sp_handler.sp_attn_implementation = ATTENTION
        config = objects[0].config.get_text_config()
        # It is None in Mixtral's config, and DeepSpeed takes it for a number.
        lacks_head_dim = getattr(config, "head_dim", 0) is None
        if lacks_head_dim:
            config.head_dim = config.hidden_size // config.num_attention_heads
        prepared = self.accelerator.prepare(*objects)
        # The saved model gets the config as it was.
        if lacks_head_dim:
            config.head_dim = None
        self.token_split = Ulysses(ALL_ATTENTION_FUNCTIONS[ATTENTION])
        ALL_ATTENTION_FUNCTIONS[ATTENTION] = unsplit_attention
        return prepared

    def finish(self) -> None:
        if not self.plan.swap_folders:
            return
        # No rank may still read its files.
        self.barrier()
        self.once_per_node(self._delete_swap_folders)

    def _delete_swap_folders(self) -> None:
        # They can be larger than the checkpoints, and another run cannot use them. Only what DeepSpeed writes is deleted.
        for folder in self.plan.swap_folders:
            shutil.rmtree(Path(folder) / "zero_stage_3", ignore_errors=True)

    def micro_batch(self, *, last: bool) -> AbstractContextManager[None]:
        # Without this, DeepSpeed would count micro-batches to find the last one of a step.
        self.model.set_gradient_accumulation_boundary(is_boundary=last)
        return nullcontext()

    def backward(self, loss: torch.Tensor) -> None:
        # accelerate's wrapper steps inside backward; the engine does not, so gradients can be read before the step.
        # DeepSpeed 0.19.8 averages over all ranks in stage 3, and over groups that share rows in the others.
        ranks = self.mesh.data_parallel_size
        if self.plan.zero_stage == 3:
            ranks = self.mesh.token_parallel_size
        with self.split_attention():
            self.model.backward(loss * ranks, scale_wrt_gas=False)

    def gradient_norm(self) -> torch.Tensor:
        from deepspeed.runtime.utils import combine_grad_norm_groups

        zero = self.deepspeed_optimizer
        if self.plan.zero_stage == 3:
            scaled_norm = combine_grad_norm_groups(zero._get_norm_groups())
        else:
            scaled_norm = zero.scaled_global_norm()
        return scaled_norm / zero.loss_scale

    def _unscale(self) -> None:
        """Do nothing: DeepSpeed divides by the loss scale in its step, and `_gradient` divides what it returns."""

    def _gradient(self, index: int, parameter: nn.Parameter) -> torch.Tensor | None:
        zero = self.deepspeed_optimizer
        if self.plan.zero_stage == 3:
            # The last rank's partition ends with padding, which is cut off.
            start, stop = self._bounds(parameter)
            return zero.get_local_fp32_grad_for_param(parameter)[: stop - start] / zero.loss_scale
        # Gradients of an offloaded optimizer are still being copied to the host.
        if parameter.is_cuda and zero.cpu_offload:
            torch.cuda.synchronize()
        fragment = cast("ZeroParameter", parameter)
        mapping = fragment._hp_mapping
        # This rank's partition has no part of the weight.
        if mapping is None:
            return None
        gradient = mapping.get_lp_grad_fragment(fragment._index_in_param_group).reshape(-1)
        address = mapping.lp_fragment_address
        if gradient.numel() == parameter.numel():
            # DeepSpeed gives the gradient of the whole weight, of which this rank's part is wanted.
            gradient = gradient[address.start :]
        return gradient[: address.numel] / zero.loss_scale

    def optimizer_step(self, learning_rate: float) -> torch.Tensor | float:
        groups = self.deepspeed_optimizer.param_groups
        # The schedule's own rate, from which that of this step may differ.
        scheduled = self.learning_rate()
        for group in groups:
            group["lr"] = learning_rate
        self.model.step()
        applied = self.model.was_step_applied()
        self._applied = self._applied + int(applied)
        if self.owns_schedule and not applied:
            # DeepSpeed moves its schedule, and sets the next rate, only after a step that was applied.
            for group in groups:
                group["lr"] = scheduled
        return self.model.get_global_grad_norm()

    @contextmanager
    def inference(self) -> Iterator[None]:
        """Gather weights that a module reads without calling the module that holds them, as recurrent models read those of
        their convolutions. DeepSpeed does so in the engine's ``forward`` only."""
        from deepspeed.runtime.zero.parameter_offload import ZeROOrderedDict

        gathering = []
        for module in self.unwrapped.modules():
            # In stages below 3, modules keep plain dictionaries.
            if isinstance(module._parameters, ZeROOrderedDict):
                gathering.append(module._parameters)
        for container in gathering:
            container._in_forward = True
        try:
            yield
        finally:
            for container in gathering:
                container._in_forward = False

    def release_gathered_parameters(self) -> None:
        if self.plan.zero_stage == 3:
            # DeepSpeed learns the order of modules from the first pass. If that has no backward pass, weights are released
            # after each forward pass and gathered again in the backward pass, for the rest of the run. An lru_cache inside a
            # wrapper remembers the weights to release separately, so both are cleared.
            coordinator = self.deepspeed_optimizer.parameter_offload.get_param_coordinator()
            to_give_up = type(coordinator)._PartitionedParameterCoordinator__params_to_release
            inspect.getclosurevars(to_give_up).nonlocals["func"].cache_clear()
            if not coordinator.is_invalid_trace():
                coordinator._invalidate_trace()

    def _schedule(
        self, optimizer: torch.optim.Optimizer | DummyOptim, config: RecipeConfig, total_steps: int
    ) -> DummyScheduler:

        params = self.accelerator.state.deepspeed_plugin.deepspeed_config["scheduler"].setdefault("params", {})
        # DeepSpeed refuses a warm-up of 0 steps.
        warmup = max(1, config.warmup_steps(total_steps))
        # accelerate would divide the total by the number of processes; steps here do not depend on it.
        values = {
            "warmup_min_lr": 0.0,
            "warmup_max_lr": config.learning_rate,
            "warmup_num_steps": warmup,
            "total_num_steps": max(total_steps, warmup + 1),
        }
        for key, value in values.items():
            if params.get(key) == "auto":
                params[key] = value
        return DummyScheduler(optimizer, total_num_steps=total_steps, warmup_num_steps=warmup)

    def set_schedule_step(self, step: int) -> None:
        if self.model.lr_scheduler is not None:
            self.model.lr_scheduler.step(step - 1)

    def describe(self) -> dict[str, Any]:
        zero = self.deepspeed_optimizer
        masters = self._masters()
        stage = int(self.model.zero_optimization_stage())
        sequence = int(self.model.sequence_parallel_size)
        # Processes that share hpZ's second copy of the weights.
        secondary = 1
        if stage == 3 and zero.parameter_offload.zero_param_parallel_group is not None:
            secondary = dist.get_world_size(zero.parameter_offload.zero_param_parallel_group)
        offload = {"optimizer": self._optimizer_device(stage), "parameters": self._parameter_device(stage)}
        name = zero_name(
            stage,
            world_size=self.mesh.world_size,
            secondary=secondary,
            sequence=sequence,
            optimizer_device=offload["optimizer"],
            parameter_device=offload["parameters"],
        )
        return super().describe() | {
            "strategy": name,
            "zero_stage": stage,
            "sequence": sequence,
            "master_dtype": str(masters[0].dtype).removeprefix("torch."),
            "masters": sum(master.numel() for master in masters),
            "optimizer_class": type(self._torch_optimizer()).__name__,
            "sub_groups": len(masters),
            "offload": offload,
        }

    def _optimizer_device(self, stage: int) -> str:
        """Return where DeepSpeed keeps the optimizer's state: ``none`` is the device of the weights."""
        zero = self.deepspeed_optimizer
        if stage != 3:
            return "cpu" if zero.cpu_offload else "none"
        if zero.optimizer_swapper is not None:
            return "nvme"
        return "cpu" if zero.offload_optimizer else "none"

    def _parameter_device(self, stage: int) -> str:
        """Return where DeepSpeed keeps the weights between their uses: ``none`` is the device that computes."""
        if stage != 3:
            return "none"
        if any(getattr(parameter, "nvme_swapper", None) is not None for parameter in self.model.parameters()):
            return "nvme"
        return "cpu" if self.deepspeed_optimizer.offload_param else "none"


@contextmanager
def _loads_shards() -> Iterator[None]:
    """Mend two steps of transformers 5.23 that look at weights which it has loaded: with ZeRO-3, each has no elements.

    - It also calls the initialisation of modules with loaded weights, which then changes nothing. That of Pegasus computes
      positions from the shape of the weight. So only modules with a weight that the file lacks are initialised.
    - Weights that the config ties are not tied if the file has both with different values, as that of Flan-T5 has. Without
      elements all are equal, so they are gathered to be compared.
    """
    import deepspeed
    from transformers import PreTrainedModel

    original_initialise = PreTrainedModel._initialize_weights
    original_tie = PreTrainedModel.tie_weights

    def initialise(model: PreTrainedModel, module: nn.Module, is_custom_code: bool = False) -> None:
        tensors = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
        if not tensors or not all(getattr(tensor, "_is_hf_initialized", False) for tensor in tensors):
            original_initialise(model, module, is_custom_code)

    def tie(model: PreTrainedModel, missing_keys: set[str] | None = None, recompute_mapping: bool = True) -> None:
        compared: list[nn.Parameter] = []
        for names in model.all_tied_weights_keys.items():
            # Only if the file has both are their values compared.
            if missing_keys is not None and missing_keys.isdisjoint(names):
                compared += map(model.get_parameter, names)
        with deepspeed.zero.GatheredParameters(compared):
            original_tie(model, missing_keys, recompute_mapping)

    initialises_rest = replaced(PreTrainedModel, "_initialize_weights", initialise)
    with initialises_rest, replaced(PreTrainedModel, "tie_weights", tie):
        yield
