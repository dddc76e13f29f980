"""Weights that rank 0 has loaded, sharded over the ranks of FSDP2 one at a time."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import cast

import numpy as np
import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from zerobook.utils.replaced import replaced


def weights_freed_as_sharded() -> AbstractContextManager[None]:
    """Return a context in which accelerate shards a model with `shard_weights`.

    accelerate's own function keeps rank 0's whole model until every weight has been sharded, so that the host holds the model
    twice, and it sends every weight twice.
    """
    from accelerate.utils import fsdp_utils

    return replaced(fsdp_utils, "fsdp2_load_full_state_dict", shard_weights)


def zeros(shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
    """Return zeros in host memory of which the system provides no page before it is written."""
    size = shape.numel() * dtype.itemsize
    return torch.from_numpy(np.zeros(size, np.uint8)).view(dtype).view(shape)


def replace_parameter(model: nn.Module, old: nn.Parameter, new: nn.Parameter) -> None:
    """Put ``new`` in the place of ``old``, under all of its names."""
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            if parameter is old:
                setattr(module, name, new)


def shard_weights(
    accelerator: Accelerator, model: nn.Module, full_sd: dict[str, torch.Tensor], cpu_offload: bool = False
) -> nn.Module:
    """Broadcast rank 0's weights, and keep each rank's shard of them. Collective.

    Args:
        model: sharded, on the meta device.
        full_sd: the weights, of which rank 0's are read. It is emptied: a weight is freed when it has been sharded.
        cpu_offload: keep shards in host memory.
    """
    shards_by_id: dict[int, torch.Tensor] = {}
    # It also has the versions of the modules, without which BatchNorm adds a counter that the model does not take.
    state = model.state_dict(keep_vars=True)
    for name, target in state.items():
        full = full_sd.pop(name) if accelerator.is_main_process else full_sd.pop(name, None)
        # Tied weights are one parameter under several names.
        if id(target) not in shards_by_id:
            shards_by_id[id(target)] = _shard(full, cast("DTensor", target), cpu_offload)
        state[name] = shards_by_id[id(target)]
        del full
    model.load_state_dict(state, assign=True)
    return model


def _shard(full: torch.Tensor | None, target: DTensor, cpu_offload: bool) -> DTensor:
    """Return this rank's shard of a weight that rank 0 has. Collective."""
    mesh = target.device_mesh
    if dist.get_rank() == 0:
        assert full is not None
        weight = full.detach().to(mesh.device_type, target.dtype).contiguous()
    else:
        weight = torch.empty(target.shape, dtype=target.dtype, device=mesh.device_type)
    dist.broadcast(weight, src=0)
    # Without a source rank, nothing is sent: each rank takes its shard of what it has.
    shard = distribute_tensor(weight, mesh, target.placements, src_data_rank=None).to_local()
    # A view would keep the whole weight in memory.
    shard = shard.clone(memory_format=torch.contiguous_format)
    sharded = DTensor.from_local(shard, mesh, target.placements, run_check=False, shape=target.shape, stride=target.stride())
    # Only the DTensor itself can leave the device of its mesh: `from_local` moves every shard to that device.
    return cast("DTensor", sharded.to("cpu")) if cpu_offload else sharded
