"""Tensor and expert parallelism, with FSDP2 over the other processes, as transformers distributes a model."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method

from zerobook.strategy.fsdp import FullyShardedStrategy

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor
    from transformers import PreTrainedModel
    from transformers.distributed.utils import TransformersDeviceMesh

# The dimension of transformers' mesh that tensor parallelism divides weights over.
_TENSOR = "tp"


class ModelParallelStrategy(FullyShardedStrategy):
    """Each process keeps and computes with its own part of the weights, which is never gathered.

    Under tensor parallelism, the processes of a group hold parts of every weight matrix, and exchange activations. They compute
    the same samples. Under expert parallelism, they hold whole experts, and exchange tokens. They compute different samples.
    transformers reads each process's parts from the files, and shards them with FSDP2 over the processes that compute
    different samples. accelerate is not used for this, since its own tensor parallelism does not work with transformers 5.23.
    """

    def load(self, load_model: Callable[[dict[str, Any]], PreTrainedModel], options: dict[str, Any]) -> PreTrainedModel:
        from transformers.distributed import DistributedConfig

        plan = self.plan
        is_bf16 = plan.precision == "bf16"
        distributed_config = DistributedConfig(
            tp_size=plan.tensor, ep_size=plan.experts, fsdp_size=plan.shard, fsdp_mixed_precision=is_bf16
        )
        # Weights are trained in fp32. They are loaded in fp32, since they cannot be cast once they are sharded.
        model = load_model(options | {"dtype": torch.float32, "distributed_config": distributed_config})
        # A second model shows the dtypes that the recipe chose. On the meta device, no weights are read.
        unread_model = load_model(options | {"device_map": "meta"})
        model.config.dtype = unread_model.config.dtype
        # mypy takes every attribute of a module for a tensor or a module.
        model.chosen_dtypes = {name: weight.dtype for name, weight in unread_model.named_parameters()}  # type: ignore[assignment]
        # With this setting, save_pretrained would gather weights, but it gets them gathered.
        del model.config.distributed_config
        if plan.device == "cpu":
            # A shard in the dtype of the file is a view of the mapped file. Give it memory of its own.
            model._apply(torch.clone)
        if plan.shard == 1:
            self._shard_alone(model, is_bf16=is_bf16)
        return model

    def _shard_alone(self, model: PreTrainedModel, *, is_bf16: bool) -> None:
        """Put the model under FSDP2 on this process alone, which casts weights to bf16 and collects gradients in fp32."""
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if is_bf16 else MixedPrecisionPolicy()
        mesh = cast("TransformersDeviceMesh", model._mesh_manager).get_mesh("fsdp")
        for module in model.modules():
            if type(module).__name__ in (model._no_split_modules or ()):
                fully_shard(module, mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh, mp_policy=policy)

    def _record_loaded(self, model: nn.Module) -> None:
        super()._record_loaded(model)
        # The weights were loaded in fp32, which is not the dtype that the recipe chose.
        self.loaded_dtypes = cast("Any", model).chosen_dtypes

    def _parameter_groups(self, model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
        """Return the optimizer's groups, each with weights of one mesh only: torch's fused kernels take no others."""
        groups: list[dict[str, Any]] = []
        for group in super()._parameter_groups(model, weight_decay):
            by_mesh: dict[Any, list[nn.Parameter]] = {}
            for parameter in group["params"]:
                by_mesh.setdefault(cast("DTensor", parameter).device_mesh, []).append(parameter)
            # The parts keep the group's options, such as its weight decay.
            groups += [{**group, "params": parameters} for parameters in by_mesh.values()]
        return groups

    def _distribute(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[nn.Module, torch.optim.Optimizer]:
        register_fsdp_forward_method(model, "generate")
        return model, self.accelerator.prepare_optimizer(optimizer)

    def _distribute_frozen(self, model: nn.Module) -> nn.Module:
        # `load` has already distributed the model.
        return model

    def _is_copy(self, tensor: DTensor) -> bool:
        # The processes of a tensor-parallel group hold copies of weights that are not divided, such as norm gains.
        is_divided = _TENSOR in (tensor.device_mesh.mesh_dim_names or ())
        return super()._is_copy(tensor) or (not is_divided and self.mesh.rank % self.plan.tensor > 0)

    def _live_groups(self) -> list[str]:
        """Return the forms of parallelism that the distributed weights really have, with the sizes of their groups."""
        sizes: dict[str, int] = {}
        for _, parameter in self.trainable():
            mesh = cast("DTensor", parameter).device_mesh
            # A mesh with one dimension is that of FSDP alone.
            if mesh.ndim > 1 and mesh.mesh_dim_names:
                sizes |= zip(mesh.mesh_dim_names, mesh.shape, strict=True)
        groups = []
        if sizes.get(_TENSOR, 1) > 1:
            groups.append(f"tensor {sizes[_TENSOR]}")
        if sizes.get("ep", 1) > 1:
            groups.append(f"experts {sizes['ep']}")
        return groups
