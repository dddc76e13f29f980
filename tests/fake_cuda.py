"""One training step on tensors that say they are on GPUs and have no contents, in a group of 8 ranks that is no group.

    fake_cuda.py LIBRARY RESULT CASE...

CASE is STRATEGY:RECIPE:PRECISION, such as ``fsdp:causal_lm:bf16``. For each, RESULT has the tensors that were not on the GPU,
the collectives with the dtypes that they sent, and the dtypes of matrix products. LIBRARY is made of fake_cuda.cpp: torch for
CPUs has no streams and events of CUDA, torch for CUDA has those of a GPU, and this one's do nothing. It changes the whole
process, so this file is a program.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast
from unittest import mock

if __name__ == "__main__":
    # Before torch, which looks for CUDA once.
    LIBRARY = ctypes.CDLL(sys.argv[1], mode=ctypes.RTLD_GLOBAL)

import peft  # noqa: F401  # it looks for GPUs when it is imported, so before any is pretended
import torch
import torch.distributed as dist
import torch.distributed._tools.fake_collectives  # shapes of collectives
import torch.nn.parallel.distributed as ddp
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.distributed import device_mesh
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_init
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from tests.planning import ROOT, made
from tests.tiny import folder
from zerobook.config_sources import ConfigSources
from zerobook.launch import build
from zerobook.launch.resolve import Hardware, resolve
from zerobook.launch.worker_environment import worker_environment
from zerobook.strategy.fsdp_loading import shard_weights

if TYPE_CHECKING:
    from accelerate import Accelerator

RANKS = 8
GPU = torch.device("cuda", 0)
MODELS = {"causal_lm": "llama", "lora_finetune": "llama", "seq2seq_chatbot": "bart"}
LENGTHS = {
    "causal_lm": {"block_size": 48},
    "lora_finetune": {"max_seq_length": 48},
    "seq2seq_chatbot": {"max_source_length": 48, "max_target_length": 24},
}
FACTORS = {"aten::mm": slice(0, 2), "aten::addmm": slice(1, 3)}
"""Matrix product -> the places of its factors."""


class Idle:
    """A stream or an event of a GPU that does nothing."""

    # torch 2.15 passes them to an operation.
    stream_id = device_index = 0
    device_type = 1

    def __init__(self, *args: Any, **options: Any):
        pass

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **options: self


class Watch(TorchDispatchMode):
    """Record the devices and dtypes of what enters operations."""

    def __init__(self) -> None:
        super().__init__()
        self.elsewhere: set[str] = set()
        self.collectives: set[str] = set()
        self.products: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten.addmm.dtype_out:
            # The shape rule of torch 2.11 takes the dtype of the result for a factor.
            result = kwargs["out"]
        else:
            result = func(*args, **kwargs)
        name = func._schema.name
        for tensor in tree_iter((args, kwargs, result)):
            if isinstance(tensor, torch.Tensor):
                if tensor.device != GPU:
                    self.elsewhere.add(f"{name}: {tensor.device} {tensor.dtype} {list(tensor.shape)}")
                if name.startswith(("c10d::", "_c10d_functional::")):
                    self.collectives.add(f"{name.partition('::')[2]} {tensor.dtype}")
        if name in FACTORS:
            self.products |= {str(factor.dtype) for factor in args[FACTORS[name]]}
        return result


def move_to_gpu(model: torch.nn.Module) -> None:
    """Replace the model's fake tensors with those of a GPU. A tensor that modules share stays shared."""
    moved: dict[int, torch.Tensor] = {}
    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is None:
                    continue
                if id(tensor) not in moved:
                    copy: torch.Tensor = torch.empty_like(tensor, device=GPU)
                    if isinstance(tensor, torch.nn.Parameter):
                        copy = torch.nn.Parameter(copy, requires_grad=tensor.requires_grad)
                    moved[id(tensor)] = copy
                tensors[name] = moved[id(tensor)]  # type: ignore[assignment]


def on_real_tensors(function: Any) -> Any:
    """Return ``function``, which reads what tensors hold: the ranks of a mesh."""

    def call(*args: Any, **options: Any) -> Any:
        with unset_fake_temporarily():
            return function(*args, **options)

    return call


def reduce_bucket(state, bucket):  # torch refuses annotations other than its own
    """Reduce a bucket of DDP, which expects a result that the fake group does not give."""
    dist.all_reduce(bucket.buffer())
    future: torch.futures.Future = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


@contextmanager
def gpus(environ: dict[str, str], ranks: int) -> Iterator[None]:
    """Let torch and accelerate see a GPU in this process, the first of ``ranks``."""
    replaced = {
        "Stream": Idle, "Event": Idle, "current_stream": Idle, "stream": nullcontext, "current_device": lambda: 0,
        "device_count": lambda: RANKS, "is_available": lambda: True, "is_initialized": lambda: True,
        "set_device": Idle, "synchronize": Idle, "empty_cache": Idle, "is_bf16_supported": lambda *_, **__: True,
        "get_device_capability": lambda *_: (8, 0), "is_current_stream_capturing": lambda: False,
    }  # fmt: skip
    PartialState._shared_state.clear()
    AcceleratorState._shared_state.clear()
    PartialState._shared_state.update(
        _cpu=False,
        backend="nccl" if ranks > 1 else None,
        device=GPU,
        debug=False,
        distributed_type=DistributedType.MULTI_GPU if ranks > 1 else DistributedType.NO,
        num_processes=ranks,
        process_index=0,
        local_process_index=0,
        fork_launched=False,
    )
    with ExitStack() as stack:
        stack.enter_context(mock.patch.dict(os.environ, environ))
        for name, value in replaced.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, value))
        stack.enter_context(mock.patch.object(torch._C, "_get_accelerator", lambda: GPU))
        # torch 2.11 makes a real tensor there first, so that CUDA is initialized.
        stack.enter_context(mock.patch("torch._subclasses.fake_tensor.init_gpu_context", lambda device: None))
        # Fake tensors have no address, by which accelerate tells parameters apart.
        address = lambda tensor: tensor.untyped_storage()._cdata  # noqa: E731
        stack.enter_context(mock.patch.object(torch.Tensor, "data_ptr", address))
        # The model is on the GPU already, and fake tensors cannot be moved in place.
        stack.enter_context(mock.patch("torch.utils.swap_tensors", lambda first, second: None))
        stack.enter_context(mock.patch.object(ddp, "_verify_param_shape_across_processes", lambda *_: True))
        for owner in (device_mesh, _fsdp_init):
            real = on_real_tensors(owner.init_device_mesh)
            stack.enter_context(mock.patch.object(owner, "init_device_mesh", real))
        for name in ("__init__", "__getitem__", "_flatten", "get_coordinate", "get_local_rank"):
            real = on_real_tensors(getattr(device_mesh.DeviceMesh, name))
            stack.enter_context(mock.patch.object(device_mesh.DeviceMesh, name, real))
        if ranks > 1:
            dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
            stack.callback(dist.destroy_process_group)
        yield


def take_step(name: str, recipe: str, precision: str) -> Watch:
    """Take one step of two micro-batches, and return what was seen of it."""
    ranks = 1 if name == "single" else RANKS
    file = ROOT / "accelerate_configs" / f"{name}.yaml"
    flags = ["--config_file", str(file), "--num_processes", str(ranks), "--mixed_precision", precision]
    environ, typed_precision = worker_environment(flags)
    environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    # Rank 0 would send the weights from a model without a device.
    environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] = "false"
    job = made(recipe, folder() / MODELS[recipe], gradient_accumulation_steps=2, **LENGTHS[recipe])
    sources = ConfigSources(dict.fromkeys(type(job.config).model_fields, "default"))
    plan, config, _ = resolve(environ, Hardware(gpus=RANKS, gpu_name="A100"), job.config, sources, typed_precision)
    assert not plan.problems, plan.problems
    watch = Watch()
    with gpus(environ, ranks):
        strategy = build.build(config, plan)
        with job.build(precision=precision) as (model, batch):
            move_to_gpu(model)
            strategy.prepare(model, config, 10)
            if isinstance(strategy.model, ddp.DistributedDataParallel):
                strategy.model.register_comm_hook(None, reduce_bucket)
            moved = {key: tensor.to(GPU) for key, tensor in batch.items()}
            with watch:
                for last in (False, True):
                    with strategy.micro_batch(last=last):
                        with strategy.split_tokens(dict(moved)) as tokens:
                            loss = job.objective.loss(strategy.model, tokens)
                        strategy.backward(loss[0] if isinstance(loss, tuple) else loss)
                strategy.optimizer_step(1e-3)
    return watch


def load_offloaded() -> dict[str, list[str]]:
    """Shard a module whose weights are offloaded to host memory, and take a forward pass. Return where its weights are."""
    with gpus({"RANK": "0", "WORLD_SIZE": str(RANKS)}, RANKS):
        mesh = init_device_mesh("cuda", (RANKS,))
        with FakeTensorMode():
            with torch.device("meta"):
                module = torch.nn.Linear(16, 16)
            # Fake tensors are not pinned.
            fully_shard(module, mesh=mesh, offload_policy=CPUOffloadPolicy(pin_memory=False))
            whole = {"weight": torch.zeros(16, 16), "bias": torch.zeros(16)}
            shard_weights(cast("Accelerator", SimpleNamespace(is_main_process=True)), module, whole, cpu_offload=True)
            weights = [cast(DTensor, weight) for weight in module.parameters()]
            devices = {"weights": weights, "shards": [weight.to_local() for weight in weights]}
            # torch raises an error here if it finds weights elsewhere than in host memory.
            devices["result"] = [module(torch.zeros(2, 16, device=GPU))]
    return {what: sorted({str(tensor.device) for tensor in tensors}) for what, tensors in devices.items()}


def main() -> None:
    _, _, result, *cases = sys.argv
    LIBRARY.register_guard()
    seen = {}
    for case in cases:
        try:
            if case == "load_offloaded":
                seen[case] = load_offloaded()
                continue
            watch = take_step(*case.split(":"))
            seen[case] = {key: sorted(getattr(watch, key)) for key in ("elsewhere", "collectives", "products")}
        except Exception:
            seen[case] = {"error": traceback.format_exc()}
    Path(result).write_text(json.dumps(seen))


if __name__ == "__main__":
    main()
