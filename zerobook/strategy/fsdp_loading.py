"""Shard the weights that rank 0 has loaded over the ranks of FSDP2, one weight at a time."""

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
    """Return a context in which accelerate shards a model with `shard_weights`, which frees each weight as it is sharded.

    accelerate's own function keeps rank 0's complete model until every weight has been sharded, so that the host holds the
    model twice, and it sends every weight twice.
    """
    from accelerate.utils import fsdp_utils

    return replaced(fsdp_utils, "fsdp2_load_full_state_dict", shard_weights)


def make_zeros(shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
    """Return zeros in host memory. They take no memory until they are written."""
    # numpy asks the operating system for zeros, which provides a page only when it is written. `torch.zeros` writes all pages.
    return torch.from_numpy(np.zeros(shape.numel() * dtype.itemsize, np.uint8)).view(dtype).view(shape)


def replace_parameter(model: nn.Module, old: nn.Parameter, new: nn.Parameter) -> None:
    """Replace the parameter ``old`` by ``new``, under all of its names."""
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            if parameter is old:
                setattr(module, name, new)


def shard_weights(
    accelerator: Accelerator, model: nn.Module, full_sd: dict[str, torch.Tensor], cpu_offload: bool = False
) -> nn.Module:
    """Broadcast rank 0's weights, and keep each rank's shard of them. Collective.

    The names of the arguments are those of accelerate's function, which this one replaces.

    Args:
        model: sharded, on the meta device.
        full_sd: name -> complete weight, of which rank 0's are read. It is emptied: a weight is freed when it has been sharded.
        cpu_offload: keep shards in host memory.
    """
    shards_by_id: dict[int, torch.Tensor] = {}
    # Fill the model's own state dict: it also has the versions of the modules, without which BatchNorm would add a counter that
    # the model does not take.
    state = model.state_dict(keep_vars=True)
    for name, target in state.items():
        # The other ranks may lack a weight, and need none.
        full = full_sd.pop(name) if accelerator.is_main_process else full_sd.pop(name, None)
        # Tied weights are one parameter under several names.
        if id(target) not in shards_by_id:
            shards_by_id[id(target)] = _shard(full, cast("DTensor", target), cpu_offload)
        state[name] = shards_by_id[id(target)]
        del full
    model.load_state_dict(state, assign=True)
    return model


def _shard(full: torch.Tensor | None, target: DTensor, cpu_offload: bool) -> DTensor:
    """Return this rank's shard of the weight ``full`` of rank 0, distributed like ``target``. Collective."""
    mesh = target.device_mesh
    if dist.get_rank() == 0:
        assert full is not None
        weight = full.detach().to(mesh.device_type, target.dtype).contiguous()
    else:
        weight = torch.empty(target.shape, dtype=target.dtype, device=mesh.device_type)
    dist.broadcast(weight, src=0)
    # Without a source rank, nothing is sent: each rank takes its shard of what it has.
    shard = distribute_tensor(weight, mesh, target.placements, src_data_rank=None).to_local()
    # A view would keep the complete weight in memory.
    shard = shard.clone(memory_format=torch.contiguous_format)
    sharded = DTensor.from_local(shard, mesh, target.placements, run_check=False, shape=target.shape, stride=target.stride())
    # `from_local` moves every shard to the device of the mesh, so an offloaded shard is moved back afterwards.
    return cast("DTensor", sharded.to("cpu")) if cpu_offload else sharded
