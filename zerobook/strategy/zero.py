"""DeepSpeed ZeRO-1 to 3, with CPU and NVMe offload."""

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
from zerobook.strategy.launch_plan import format_zero_name
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
    """DeepSpeed ZeRO-1 to 3, with CPU or NVMe offload. A launch refuses stage 0."""

    def __init__(self, accelerator: Accelerator, plan: LaunchPlan):
        super().__init__(accelerator, plan)
        # Only ZeRO-3 shards the weights, which `generate` then has to gather on all ranks together.
        self.shards_parameters = plan.zero_stage == 3
        self.generation_in_step = plan.zero_stage == 3
        self.owns_schedule = bool((plan.deepspeed_config or {}).get("scheduler"))
        self._has_loaded_model = False
        # `prepare` sets this attribute.
        self.deepspeed_optimizer = None

    def prepare(self, model: nn.Module, config: RecipeConfig, total_steps: int) -> None:
        self._record_loaded(model)
        # DeepSpeed itself clips, by the value in its config, into which the launch has written this one.
        self.max_grad_norm = config.max_grad_norm
        # If the JSON describes an optimizer, DeepSpeed makes it, and accelerate takes a placeholder.
        if "optimizer" in (self.plan.deepspeed_config or {}):
            groups = self._parameter_groups(model, config.weight_decay)
            optimizer: Any = DummyOptim(groups, lr=config.learning_rate, weight_decay=config.weight_decay)
        else:
            optimizer = self._build_optimizer(model, config)
        objects = [model, optimizer]
        if self.owns_schedule:
            objects.append(self._make_schedule(optimizer, config, total_steps))
        self._fill_auto_sizes(model)
        if self.plan.sequence > 1:
            self.model, self.optimizer, *_ = self._prepare_split(objects)
        else:
            self.model, self.optimizer, *_ = self.accelerator.prepare(*objects)
        # `self.optimizer` is accelerate's wrapper, which lacks the methods of DeepSpeed's optimizer.
        self.deepspeed_optimizer = self.model.optimizer
        # The engine of DeepSpeed 0.19.8 calls ``train`` and ``eval`` of the model inside it, and does not change its own
        # ``training``. An objective that reads it would train in every evaluation.
        self.model.train = MethodType(nn.Module.train, self.model)
        self.model.eval = MethodType(nn.Module.eval, self.model)
        if self.plan.precision == "bf16" and self.plan.zero_stage in (1, 2):
            # In these stages, DeepSpeed applies gradients that are not finite unless this is set.
            self.deepspeed_optimizer.check_grad_overflow = True

    def _distribute_frozen(self, model: nn.Module) -> nn.Module:
        """Distribute a frozen model: each rank holds all of it, except under ZeRO-3, which shards its weights."""
        if self.plan.zero_stage != 3:
            # DeepSpeed casts the trained model in the same way.
            self._cast_frozen(model)
            return model.to(self.mesh.device)
        from deepspeed.runtime.zero.parameter_offload import DeepSpeedZeRoOffload
        from deepspeed.utils.timer import NoopTimer

        # A second engine would share DeepSpeed's global state with the first. This object installs only the hooks that gather
        # and release the weights. The hooks refer to it, so it needs no other reference.
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

    def _fill_auto_sizes(self, model: nn.Module) -> None:
        """Replace ``auto`` by sizes in DeepSpeed's config. accelerate cannot do so for composite models."""
        section = self.accelerator.state.deepspeed_plugin.deepspeed_config["zero_optimization"]
        for key, size in automatic_zero_sizes(getattr(model, "config", None)).items():
            if section.get(key) == "auto":
                section[key] = size

    def prepare_to_load(self, new_model: Callable[[], nn.Module]) -> None:
        if self.plan.zero_stage != 3 or self.plan.offload_param != "nvme":
            return
        # While a model is loaded to NVMe, every shard passes through a buffer of DeepSpeed, which has to fit the largest shard.
        with self.initialising_complete_weights(), torch.device("meta"):
            largest_weight = max(parameter.numel() for parameter in new_model().parameters())
        plugin = self.accelerator.state.deepspeed_plugin
        # transformers reads the second of these configs while it loads a model.
        for config in (plugin.deepspeed_config, plugin.dschf.config):
            section = config["zero_optimization"]["offload_param"]
            chosen = section.get("buffer_size", "auto")
            section["buffer_size"] = nvme_buffer_elements(chosen, largest_weight, self.world_size)

    def load(self, load_model: Callable[[dict[str, Any]], PreTrainedModel], options: dict[str, Any]) -> PreTrainedModel:
        if self.plan.zero_stage != 3:
            return super().load(load_model, options)
        # DeepSpeed 0.19.8 empties the folder of swapped weights whenever it begins to shard a model.
        if self.plan.offload_param == "nvme" and self._has_loaded_model:
            raise ConfigError(
                f"{self.plan.config_file}: offload_param is on nvme, where DeepSpeed deletes the weights of the first model "
                "when a second one is loaded. Set its device to cpu to train with a reference model."
            )
        self._has_loaded_model = True
        with _mend_loading_of_shards():
            model = super().load(load_model, options)
        # When transformers 5.23 saves a model, it reverses the renamings of weights that it recorded while loading. Under
        # ZeRO-3, it also records renamings that matched no weight in the file. They would give saved weights names that no
        # program knows.
        renamings = getattr(model, "_weight_conversions", None)
        if renamings is not None:
            model._weight_conversions = [renaming for renaming in renamings if renaming.was_used()]  # type: ignore[assignment]
        return model

    def _prepare_split(self, objects: list[Any]) -> tuple[Any, ...]:
        """Prepare ``objects`` (model, optimizer, ...) for rows that are split by DeepSpeed's sequence parallelism.

        accelerate replaces transformers' attention by Ulysses. Here the original is put back, see `Ulysses`.
        """
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        unsplit_attention = ALL_ATTENTION_FUNCTIONS[ATTENTION]
        self.accelerator.parallelism_config.sp_handler.sp_attn_implementation = ATTENTION
        config = objects[0].config.get_text_config()
        # `head_dim` is None in Mixtral's config, and DeepSpeed takes it for a number.
        lacks_head_dim = getattr(config, "head_dim", 0) is None
        if lacks_head_dim:
            config.head_dim = config.hidden_size // config.num_attention_heads
        prepared = self.accelerator.prepare(*objects)
        # The saved model gets the original config.
        if lacks_head_dim:
            config.head_dim = None
        self.token_split = Ulysses(ALL_ATTENTION_FUNCTIONS[ATTENTION])
        ALL_ATTENTION_FUNCTIONS[ATTENTION] = unsplit_attention
        return prepared

    def finish(self) -> None:
        if not self.plan.swap_folders:
            return
        # Wait until no rank reads its files.
        self.barrier()
        self.once_per_node(self._delete_swap_folders)

    def _delete_swap_folders(self) -> None:
        # The files can be larger than the checkpoints, and no other run can use them. Delete only the folder that DeepSpeed
        # makes.
        for folder in self.plan.swap_folders:
            shutil.rmtree(Path(folder) / "zero_stage_3", ignore_errors=True)

    def micro_batch(self, *, last: bool) -> AbstractContextManager[None]:
        # Otherwise DeepSpeed would count micro-batches to find the last one of a step.
        self.model.set_gradient_accumulation_boundary(is_boundary=last)
        return nullcontext()

    def backward(self, loss: torch.Tensor) -> None:
        # accelerate's `backward` also takes the optimizer step. The engine's does not, so gradients can be read before the
        # step. DeepSpeed 0.19.8 averages gradients, over all ranks in stage 3, and over the groups that read different rows in
        # the other stages. The gradients have to be added, so multiply the loss by the same number.
        ranks = self.mesh.data_parallel_size
        if self.plan.zero_stage == 3:
            ranks = self.mesh.token_parallel_size
        with self.split_attention():
            self.model.backward(loss * ranks, scale_wrt_gas=False)

    def gradient_norm(self) -> torch.Tensor:
        from deepspeed.runtime.utils import combine_grad_norm_groups

        # DeepSpeed's gradients are multiplied by its loss scale. Its optimizer of stage 3 has no `scaled_global_norm`.
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
            # Without the padding at the end of the last rank's partition.
            start, stop = self._partition_bounds(parameter)
            return zero.get_local_fp32_grad_for_param(parameter)[: stop - start] / zero.loss_scale
        # Wait for the gradients of an offloaded optimizer, which are copied to the host asynchronously.
        if parameter.is_cuda and zero.cpu_offload:
            torch.cuda.synchronize()
        zero_parameter = cast("ZeroParameter", parameter)
        mapping = zero_parameter._hp_mapping
        # This rank's partition has no part of the weight.
        if mapping is None:
            return None
        gradient = mapping.get_lp_grad_fragment(zero_parameter._index_in_param_group).reshape(-1)
        address = mapping.lp_fragment_address
        # DeepSpeed returns the gradient of this rank's part or of the complete weight. From the latter, cut out the part.
        if gradient.numel() == parameter.numel():
            gradient = gradient[address.start :]
        return gradient[: address.numel] / zero.loss_scale

    def optimizer_step(self, learning_rate: float) -> torch.Tensor | float:
        groups = self.deepspeed_optimizer.param_groups
        # The rate that a schedule of the strategy file has set. ``learning_rate`` may differ from it.
        scheduled_rate = self.learning_rate()
        for group in groups:
            group["lr"] = learning_rate
        self.model.step()
        applied = self.model.was_step_applied()
        self._applied = self._applied + int(applied)
        if self.owns_schedule and not applied:
            # DeepSpeed moves its schedule, and sets the next rate, only after a step that was applied.
            for group in groups:
                group["lr"] = scheduled_rate
        return self.model.get_global_grad_norm()

    @contextmanager
    def inference(self) -> Iterator[None]:
        """Return a context that also gathers weights which a module reads without calling the module that holds them.

        Recurrent models read the weights of their convolutions so. DeepSpeed gathers such weights only in the engine's
        ``forward``.
        """
        from deepspeed.runtime.zero.parameter_offload import ZeROOrderedDict

        # Under ZeRO-3, each module keeps its weights in such a dictionary. In other stages there is none.
        dictionaries = []
        for module in self.unwrapped.modules():
            if isinstance(module._parameters, ZeROOrderedDict):
                dictionaries.append(module._parameters)
        # A dictionary gathers a weight that is read from it, if it has this mark.
        for dictionary in dictionaries:
            dictionary._in_forward = True
        try:
            yield
        finally:
            for dictionary in dictionaries:
                dictionary._in_forward = False

    def release_gathered_parameters(self) -> None:
        if self.plan.zero_stage == 3:
            # DeepSpeed records the order of modules in the first forward and backward pass, and with it, which weights it can
            # keep gathered between uses. If the first pass is an evaluation, it records no backward pass. Then it would release
            # every weight after its forward pass and gather it again for the backward pass, for the rest of the run. So delete
            # the record (the trace) and the cached result of the method that reads it: an lru_cache inside of a wrapper.
            coordinator = self.deepspeed_optimizer.parameter_offload.get_param_coordinator()
            cached_method = type(coordinator)._PartitionedParameterCoordinator__params_to_release
            inspect.getclosurevars(cached_method).nonlocals["func"].cache_clear()
            if not coordinator.is_invalid_trace():
                coordinator._invalidate_trace()

    # Replace ``auto`` in the JSON's schedule, and return accelerate's placeholder for this schedule.
    def _make_schedule(
        self, optimizer: torch.optim.Optimizer | DummyOptim, config: RecipeConfig, total_steps: int
    ) -> DummyScheduler:
        params = self.accelerator.state.deepspeed_plugin.deepspeed_config["scheduler"].setdefault("params", {})
        # DeepSpeed refuses a warm-up of 0 steps.
        warmup = max(1, config.warmup_steps(total_steps))
        # accelerate would divide the steps by the number of processes. The steps of a run do not depend on it.
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
            # DeepSpeed counts steps from 0.
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
        return super().describe() | {
            "strategy": format_zero_name(
                stage,
                world_size=self.mesh.world_size,
                secondary=secondary,
                sequence=sequence,
                optimizer_device=offload["optimizer"],
                parameter_device=offload["parameters"],
            ),
            "zero_stage": stage,
            "sequence": sequence,
            "master_dtype": str(masters[0].dtype).removeprefix("torch."),
            "masters": sum(master.numel() for master in masters),
            "optimizer_class": type(self._torch_optimizer()).__name__,
            "sub_groups": len(masters),
            "offload": offload,
        }

    def _optimizer_device(self, stage: int) -> str:
        """Return where DeepSpeed keeps the optimizer's state: ``cpu``, ``nvme``, or ``none`` for the device that computes."""
        zero = self.deepspeed_optimizer
        if stage != 3:
            return "cpu" if zero.cpu_offload else "none"
        if zero.optimizer_swapper is not None:
            return "nvme"
        return "cpu" if zero.offload_optimizer else "none"

    def _parameter_device(self, stage: int) -> str:
        """Return where DeepSpeed keeps unused weights: ``cpu``, ``nvme``, or ``none`` for the device that computes."""
        if stage != 3:
            return "none"
        if any(getattr(parameter, "nvme_swapper", None) is not None for parameter in self.model.parameters()):
            return "nvme"
        return "cpu" if self.deepspeed_optimizer.offload_param else "none"


@contextmanager
def _mend_loading_of_shards() -> Iterator[None]:
    """Return a context that mends two steps of transformers 5.23 under ZeRO-3, where loaded weights have no elements.

    - Initialisation: transformers also calls it for modules whose weights are loaded, where it changes nothing. But Pegasus
      computes its positions from the shape of the weight. In this context, only modules with a weight that the file lacks are
      initialised.
    - Ties: transformers compares weights that the config ties, and does not tie them if the file has different values, as that
      of Flan-T5. Weights without elements are all equal. In this context, they are gathered for the comparison.
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
            # Values are compared only if the file has both weights.
            if missing_keys is not None and missing_keys.isdisjoint(names):
                compared += map(model.get_parameter, names)
        with deepspeed.zero.GatheredParameters(compared):
            original_tie(model, missing_keys, recompute_mapping)

    with (
        replaced(PreTrainedModel, "_initialize_weights", initialise),
        replaced(PreTrainedModel, "tie_weights", tie),
    ):
        yield
