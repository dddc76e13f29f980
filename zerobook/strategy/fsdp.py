"""FSDP2, full and hybrid."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, register_fsdp_forward_method

from zerobook.strategy.base import Strategy
from zerobook.strategy.fsdp_loading import make_zeros, replace_parameter, weights_freed_as_sharded
from zerobook.strategy.pieces import Read
from zerobook.strategy.token_split import Ring
from zerobook.strategy.weights import get_local_shard, owners_of_buffers

if TYPE_CHECKING:
    from accelerate import Accelerator
    from torch.distributed.tensor import DTensor
    from transformers import PreTrainedModel

    from zerobook.config import RecipeConfig
    from zerobook.strategy.engine import FlaggedOptimizer
    from zerobook.strategy.launch_plan import LaunchPlan


class FullyShardedStrategy(Strategy):
    """FSDP2, full or hybrid: parameters, gradients and optimizer state are DTensors.

    Gradients are reduce-scattered at every micro-batch, so they stay sharded while accumulating. The replicas of hybrid
    sharding all-reduce them in the last micro-batch of a step only.
    """

    shards_parameters = True
    generation_in_step = True
    _awaits_weights = False
    """This rank's weights are zeros until `prepare`, which sends those of rank 0."""

    def __init__(self, accelerator: Accelerator, plan: LaunchPlan):
        super().__init__(accelerator, plan)
        if not accelerator.is_fsdp2:
            raise RuntimeError(
                f"accelerate chose {accelerator.distributed_type} where the file asks for FSDP2; sharding would be dropped"
            )

    def load(self, load_model: Callable[[dict[str, Any]], PreTrainedModel], options: dict[str, Any]) -> PreTrainedModel:
        """Load the weights on rank 0. On the other ranks, they are zeros until `prepare` sends and shards rank 0's."""
        # Each rank loads quantised weights itself.
        is_quantised = "quantization_config" in options or getattr(options["config"], "quantization_config", None)
        if not self.plan.rank_0_loads or is_quantised:
            return super().load(load_model, options)
        self._awaits_weights = not self.is_main
        if self._awaits_weights:
            # In the dtype of the file, weights are views of the mapped file, and nothing is read.
            options = options | {"dtype": "auto"}
        model = load_model(options)
        dtypes = {name: tensor.dtype for name, tensor in (*model.named_parameters(), *model.named_buffers())}
        # The other ranks have the dtypes of the file. Rank 0 has those that the recipe chose. Collective.
        dtypes, model.config.dtype = self.from_main((dtypes, model.config.dtype))
        if self._awaits_weights:
            _fill_with_zeros(model, dtypes)
        return model

    def _cast(self, weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return make_zeros(weight.shape, dtype) if self._awaits_weights else super()._cast(weight, dtype)

    def _build_optimizer(self, model: nn.Module, config: RecipeConfig) -> torch.optim.Optimizer:
        optimizer = super()._build_optimizer(model, config)
        if isinstance(optimizer, torch.optim.SGD):
            # torch 2.13 has no fused SGD for DTensors, and its other kernels do not read the flag by which a step is skipped on
            # the device.
            for group in optimizer.param_groups:
                group["fused"] = False
            self._skips_on_device = False
            cast("FlaggedOptimizer", optimizer)._step_supports_amp_scaling = False
        return optimizer

    def _distribute(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[nn.Module, torch.optim.Optimizer]:
        if self.plan.context > 1:
            from torch.distributed.tensor.experimental._attention import set_rotate_method

            # accelerate's hooks for context parallelism drop the mask of every forward pass, also in generation. So they are
            # not installed. Only the strategy file's way to pass keys and values on is set here.
            self.accelerator._prepare_cp = lambda *objects: objects
            set_rotate_method(self.accelerator.parallelism_config.cp_handler.cp_comm_strategy)
        with self._sharding(model):
            prepared_model, prepared_optimizer = super()._distribute(model, optimizer)
        # `generate` calls parts of the model directly (an encoder, the base inside of adapters). Weights outside of all sharded
        # layers are gathered only by hooks of the complete model, which are then also called around `generate`.
        register_fsdp_forward_method(prepared_model, "generate")
        if self.plan.context > 1:
            self.token_split = Ring(self.accelerator.torch_device_mesh["cp"])
        if self.accelerator.scaler is not None and self.plan.offload_optimizer != "none":
            # Offloaded gradients are in host memory, so keep fp16's loss scale there, too. From the GPU, torch would copy it
            # without waiting, and could multiply gradients before it has arrived.
            self.accelerator.scaler._lazy_init_scale_growth_tracker(torch.device("cpu"))
        return prepared_model, prepared_optimizer

    def _distribute_frozen(self, model: nn.Module) -> nn.Module:
        from accelerate.utils.fsdp_utils import fsdp2_prepare_model

        # The model computes in this dtype. Shards in fp32 would take twice the memory for the same results.
        self._cast_frozen(model)
        # `Accelerator.prepare` refuses a model without an optimizer, so call what it would call.
        self.accelerator.state.fsdp_plugin.set_auto_wrap_policy(model)
        with self._sharding(model):
            return fsdp2_prepare_model(self.accelerator, model)

    @contextmanager
    def _sharding(self, model: nn.Module) -> Iterator[None]:
        """Return a context in which accelerate can shard ``model``."""
        is_encoder_decoder = getattr(model.config, "is_encoder_decoder", False)
        with (
            _hide_buffers(model, self.mesh.device),
            _prepare_encoder_decoder(model) if is_encoder_decoder else nullcontext(),
            _hide_absent_layers(model),
            _keep_ties(model),
            weights_freed_as_sharded(),
        ):
            yield

    @contextmanager
    def _accumulating(self) -> Iterator[None]:
        # The replicas of hybrid sharding add their gradients once a step. Without replicas this changes nothing.
        sharded = cast("FSDPModule", self.model)
        sharded.set_requires_all_reduce(False)
        try:
            yield
        finally:
            sharded.set_requires_all_reduce(True)

    def release_gathered_parameters(self) -> None:
        # Gathered parameters are plain tensors, and not the optimizer's DTensors. If only some ranks re-sharded them, ranks
        # would call different collectives in the next forward pass.
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def _written_part(
        self, index: int, parameter: nn.Parameter, shard: torch.Tensor
    ) -> tuple[tuple[int, ...], torch.Tensor] | None:
        offset = shard_offset(parameter)
        if offset is None:
            return super()._written_part(index, parameter, shard)
        if self._is_copy(cast("DTensor", parameter)):
            return None
        if len(offset) == 1:
            # A shard of rows is a range of the flattened tensor, see `shard_offset`.
            shard = shard.reshape(-1)
        return offset, shard

    def read_shard(self, parameter: nn.Parameter, read: Read) -> torch.Tensor:
        offset = shard_offset(parameter)
        if offset is None:
            return super().read_shard(parameter, read)
        shard = torch.empty_like(get_local_shard(parameter.detach()))
        _read_into(shard, offset, read)
        return shard

    def restore(self, parameter: nn.Parameter, key: str | None, read: Read) -> None:
        tensor = self._tensor(parameter, key).detach()
        offset = shard_offset(tensor)
        # The tensor is not sharded.
        if offset is None:
            return super().restore(parameter, key, read)
        _read_into(cast("DTensor", tensor).to_local(), offset, read)

    def _gradient(self, index: int, parameter: nn.Parameter) -> torch.Tensor | None:
        if not hasattr(parameter.grad, "device_mesh"):
            return super()._gradient(index, parameter)
        gradient = cast("DTensor", parameter.grad)
        return None if self._is_copy(gradient) else gradient.to_local()

    def _is_copy(self, tensor: DTensor) -> bool:
        """Return whether another rank writes this shard: the groups of hybrid sharding hold copies of each other."""
        for dimension, placement in enumerate(tensor.placements):
            if placement.is_replicate() and tensor.device_mesh.get_local_rank(dimension) > 0:
                return True
        return False

    def live_tensors(self) -> dict[str, list[torch.Tensor]]:
        tensors = super().live_tensors()
        for name in tensors:
            tensors[name] = list(map(get_local_shard, tensors[name]))
        return tensors

    def describe(self) -> dict[str, Any]:
        # The first module is the model itself. It keeps the weights outside of the layers gathered, whatever the file says, so
        # it is left out.
        _, *modules = self.model.modules()
        states = [module._get_fsdp_state() for module in modules if isinstance(module, FSDPModule)]
        groups = [state._fsdp_param_group for state in states if state._fsdp_param_group is not None]
        is_offloaded = all(isinstance(group.offload_policy, CPUOffloadPolicy) for group in groups)
        device = "none"
        context = self.token_split.size if self.token_split else 1
        words = ["FSDP2", *self._live_groups()]
        if context > 1:
            words.append(f"context {context}")
        if is_offloaded:
            device = "cpu"
            words.append("(cpu offload)")
        return super().describe() | {
            "strategy": " ".join(words),
            "wrapper": FSDPModule.__name__,
            "mesh": self._live_mesh(),
            "context": context,
            "offload": {"optimizer": device, "parameters": device},
            "reshard_after_forward": any(group._reshard_after_forward for group in groups),
        }

    def _live_mesh(self) -> list[int]:
        """Return the sizes of the mesh of the first trained weight."""
        _, parameter = next(iter(self.trainable()))
        return list(cast("DTensor", parameter).device_mesh.shape)

    def _live_groups(self) -> list[str]:
        """Return the groups of processes, as they are written in the strategy's name."""
        # A mesh of two dimensions is that of hybrid sharding: replicas x ranks of a replica.
        mesh = self._live_mesh()
        return [] if len(mesh) == 1 else [f"hybrid {'x'.join(map(str, mesh))}"]


# Set the model's weights to zeros, and cast its buffers. ``dtypes`` has the dtype of each by name.
def _fill_with_zeros(model: nn.Module, dtypes: dict[str, torch.dtype]) -> None:
    for name, parameter in dict(model.named_parameters()).items():
        zeros = make_zeros(parameter.shape, dtypes[name])
        if parameter.is_meta:
            # The file lacks this weight, and transformers initialises it on rank 0 only. The data of a
            # parameter on the meta device cannot be set, so the parameter is replaced.
            replace_parameter(model, parameter, nn.Parameter(zeros))
        else:
            parameter.data = zeros
    for name, buffer in model.named_buffers():
        buffer.data = buffer.data.to(dtypes[name])


def shard_offset(tensor: torch.Tensor) -> tuple[int, ...] | None:
    """Return the ``offset`` of this rank's shard of a tensor, as in `Piece`; None for a tensor that is not sharded.

    A shard of rows is a range of the flattened tensor, so its offset has one number. A shard of another dimension has an offset
    in each dimension.
    """
    from torch.distributed.tensor import DTensor, Shard
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    if not isinstance(tensor, DTensor):
        return None
    _, offsets = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    if all(placement == Shard(0) or placement.is_replicate() for placement in tensor.placements):
        # The index of the first row, times the size of a row.
        return (int(offsets[0]) * torch.Size(tensor.shape[1:]).numel(),)
    return tuple(map(int, offsets))


def _read_into(shard: torch.Tensor, offset: tuple[int, ...], read: Read) -> None:
    """Read a shard from a checkpoint into ``shard``. ``offset`` says where it begins, as in `Piece`."""
    if shard.numel() == 0:
        return
    if len(offset) == 1:
        start = offset[0]
        shard.copy_(read(start, start + shard.numel()).view(shard.shape))
    else:
        shard.copy_(read.block(offset, tuple(shard.shape)))


@contextmanager
def _prepare_encoder_decoder(model: nn.Module) -> Iterator[None]:
    """Help accelerate to shard an encoder-decoder model.

    accelerate puts the embedding and the head into a group of their own. The encoder and the decoder use the same weight, and
    are not in this group, which torch refuses. In this context, accelerate does not see embedding and head, so all of these
    stay in the group of the complete model. BlenderBot and Pegasus do not name the classes of their layers, which accelerate
    needs, so these are set here.
    """
    model = cast("PreTrainedModel", model)
    if not model._no_split_modules:
        layer_classes = set()
        for child in (*model.get_encoder().children(), *model.get_decoder().children()):
            if isinstance(child, nn.ModuleList):
                layer_classes |= {type(layer).__name__ for layer in child}
        model._no_split_modules = layer_classes
    for getter in ("get_input_embeddings", "get_output_embeddings"):
        setattr(model, getter, lambda: None)
    try:
        yield
    finally:
        del model.get_input_embeddings, model.get_output_embeddings


@contextmanager
def _hide_absent_layers(model: nn.Module) -> Iterator[None]:
    """Hide layer classes that the model's class names and this model does not have, since accelerate refuses them.

    A composite class names the layer classes of all models that it can be composed of.
    """
    model = cast("PreTrainedModel", model)
    original_names = getattr(model, "_no_split_modules", None)
    class_names = {type(module).__name__ for module in model.modules()}
    model._no_split_modules = class_names & set(original_names or ())
    try:
        yield
    finally:
        model._no_split_modules = original_names


@contextmanager
def _keep_ties(model: nn.Module) -> Iterator[None]:
    """Let the model's ``tie_weights`` tie all weights that are tied now.

    accelerate calls it when the weights are on the meta device. transformers' own method does not know the copies of modules
    that peft trains.
    """
    # Store the weights' ids, since references would keep the weights in memory.
    names_by_id: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names_by_id.setdefault(id(parameter), []).append(name)

    def tie_weights() -> None:
        for first, *tied in names_by_id.values():
            for name in tied:
                module, _, attribute = name.rpartition(".")
                setattr(model.get_submodule(module), attribute, model.get_parameter(first))

    model.tie_weights = tie_weights  # type: ignore[assignment]
    try:
        yield
    finally:
        del model.tie_weights


@contextmanager
def _hide_buffers(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Keep persistent buffers out of the state dict, since accelerate treats every tensor in it as a sharded parameter.

    The buffers get rank 0's values on ``device``. Collective.
    """
    import torch.distributed as dist

    hidden = list(owners_of_buffers(model))
    for _, module, buffer_name in hidden:
        buffer = getattr(module, buffer_name)
        value = torch.empty_like(buffer, device=device) if buffer.is_meta else buffer.to(device)
        # If the model's file lacks the buffer, only rank 0 has its value.
        dist.broadcast(value, src=0)
        setattr(module, buffer_name, value)
        module._non_persistent_buffers_set.add(buffer_name)
    try:
        yield
    finally:
        for _, module, buffer_name in hidden:
            module._non_persistent_buffers_set.discard(buffer_name)
