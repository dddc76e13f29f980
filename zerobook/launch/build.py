"""Build the Accelerator of a launch plan, wrapped as a `Strategy`.

`zerobook.launch.resolve` makes the launch plan. `zerobook.strategy` has a class for each kind of strategy.
"""

import os
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, DeepSpeedPlugin, PartialState
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedDataParallelKwargs, DistributedType, InitProcessGroupKwargs, ProjectConfiguration

from zerobook.config import RecipeConfig
from zerobook.config_sources import ConfigSources, ConfigT
from zerobook.errors import ConfigError
from zerobook.launch import flag_checks, meet, ops
from zerobook.launch.accelerate_cli import (
    describe_unreachable_host,
    has_automatic_threads,
    parent_flags,
    parse_flags,
    read_hidden_settings,
)
from zerobook.launch.accelerate_file import FileCheck
from zerobook.launch.process import launched
from zerobook.launch.resolve import Hardware, merge_problems, resolve
from zerobook.launch.worker_environment import plain_environment
from zerobook.strategy import ReplicatedStrategy, Strategy
from zerobook.strategy.launch_plan import LaunchPlan
from zerobook.utils.attention import prepare_attention
from zerobook.utils.environment import is_true
from zerobook.utils.library_messages import hush, hush_deepspeed_builds
from zerobook.utils.terminal import keep_logs_plain, say
from zerobook.utils.units import counted

# Time that ranks wait for each other before they report a hang.
COLLECTIVE_TIMEOUT = timedelta(hours=1)


def resolve_this_process(
    config: ConfigT,
    sources: ConfigSources,
    *,
    trains: bool = True,
    starts: bool = True,
    config_problems: Sequence[str] = (),
) -> tuple[LaunchPlan, ConfigT, ConfigSources]:
    """Resolve the launch of this process, see `resolve` for the result. Raise `ConfigError` with all problems.

    Args:
        trains: the process will write into ``output_dir``, which must have no other run.
        starts: see `resolve`.
        config_problems: the problems of the config itself, which are reported with those of the launch.
    """
    from zerobook.checkpoint.resume import find_earlier_result, find_earlier_run

    flags = parent_flags()
    environ = dict(os.environ)
    precision = None
    file_check = FileCheck([], is_resolvable=True)
    if flags:
        file_check = flag_checks.check(parse_flags(flags), before_start=False)
    # If the strategy file cannot be resolved, the rest of the command line is checked as a launch without a strategy.
    if not file_check.is_resolvable:
        environ = plain_environment({})
    elif flags:
        precision, hidden_settings = read_hidden_settings(flags)
        environ = hidden_settings | environ
    if is_true(environ.get("ACCELERATE_USE_CPU")):
        # Libraries ask torch, not the config, whether there is a GPU. torch reads this variable when it first looks for GPUs.
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    plan, config, sources = resolve(environ, Hardware.detect(), config, sources, precision, starts=starts)
    _choose_host_threads(plan)
    note = describe_unreachable_host(plan, environ)
    if note:
        plan.notes.append(note)
    if trains:
        problem = find_earlier_run(config) or find_earlier_result(config)
        if problem:
            plan.problems.append(problem)
    # The problems of the config come first, since they may cause later ones.
    plan.problems = merge_problems(config_problems, file_check.problems, plan.problems)
    if plan.problems:
        raise ConfigError(plan.problems)
    return plan, config, sources


def _choose_host_threads(plan: LaunchPlan) -> None:
    """Let an offloaded optimizer use all cores of the machine, unless the user chose a number of threads."""
    if plan.offload_optimizer == "none" or not has_automatic_threads():
        return
    plan.host_threads = max(1, usable_cores() // int(os.environ.get("LOCAL_WORLD_SIZE", 1)))
    plan.notes.append(
        f"the optimizer steps in host memory, with {counted(plan.host_threads, 'thread')} a process: the machine's "
        "cores, shared by its processes. OMP_NUM_THREADS, set before accelerate launch, chooses another number"
    )


def build(config: RecipeConfig, plan: LaunchPlan) -> Strategy:
    """Create the Accelerator that ``plan`` describes, wrapped as a `zerobook.strategy.Strategy`.

    Three things are different on a CPU:

    - The process group is created with the backend gloo. Without a named backend, accelerate assumes one process where
      DeepSpeed runs several, and every rank would read all the data.
    - DeepSpeed is told to use the CPU.
    - accelerate offers FSDP2 for GPUs only, so `_build_fully_sharded` sets the distributed type itself.
    """
    # A script or a notebook may run several times in one process. accelerate would keep the device and the precision of the
    # first run.
    if AcceleratorState._shared_state and not launched():
        AcceleratorState._reset_state(reset_partial_state=True)
    _prepare_process(plan)
    # Rank 0 writes checkpoints and the final model while the others wait; the default of 10 minutes would end a large run.
    group_options = InitProcessGroupKwargs(timeout=COLLECTIVE_TIMEOUT)
    if plan.device == "cpu":
        group_options.backend = "gloo"
    options: dict[str, Any] = {
        "mixed_precision": plan.precision,
        "kwargs_handlers": [group_options] if plan.backend else [],
        "gradient_accumulation_steps": config.gradient_accumulation_steps,
        "log_with": config.report_to or None,
        "project_config": ProjectConfiguration(project_dir=config.output_dir, logging_dir=f"{config.output_dir}/logs"),
    }
    if plan.kind == "deepspeed":
        strategy = _build_zero(plan, options)
    elif plan.kind == "fsdp":
        strategy = _build_fully_sharded(plan, options)
    else:
        # Without views of its buckets, DDP keeps each gradient twice.
        options["kwargs_handlers"].append(DistributedDataParallelKwargs(gradient_as_bucket_view=True, broadcast_buffers=False))
        strategy = ReplicatedStrategy(Accelerator(cpu=plan.device == "cpu", **options), plan)
    # This is the first collective, and it connects NCCL. But under FSDP2, and if torchrun may restart the ranks, the process
    # group also has gloo. The barrier then uses gloo, and NCCL connects at the first collective of tensors on GPUs.
    strategy.barrier()
    meet.stop_listening()
    if plan.kind == "deepspeed" and plan.device == "cpu":
        # By now, every rank has opened the buffers of the others, so their names are not needed.
        remove_buffer_name(os.environ)
    return strategy


def _prepare_process(plan: LaunchPlan) -> None:
    """Set the variables, logging and threads of this process, compile DeepSpeed's ops, and form the process group."""
    from torch.distributed import distributed_c10d
    from transformers.utils import logging as transformers_logging

    # Set the variables before accelerate and DeepSpeed read them.
    set_environment(plan)
    prepare_attention()
    hush()
    if plan.kind == "deepspeed":
        hush_deepspeed_builds()
    transformers_logging.disable_progress_bar()
    keep_logs_plain("transformers")
    # DeepSpeed and device meshes make process groups without a timeout. Such groups do not inherit the timeout of the default
    # group: they would have 10 minutes (NCCL) or 30 (gloo).
    distributed_c10d.default_pg_timeout = COLLECTIVE_TIMEOUT
    distributed_c10d.default_pg_nccl_timeout = COLLECTIVE_TIMEOUT
    if plan.host_threads:
        torch.set_num_threads(plan.host_threads)
        # An op of DeepSpeed may be linked to another OpenMP library than torch, which reads this variable.
        os.environ["OMP_NUM_THREADS"] = str(plan.host_threads)
    if plan.kind == "deepspeed":
        _compile_ops(plan)
    if plan.device == "cuda" and meet.shares_refusals(os.environ):
        # Use the GPU once. If it is busy or broken, this process fails now, and can still tell the other hosts the reason.
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)) % torch.cuda.device_count())
        torch.zeros(1, device="cuda")
    meet.wait_for_hosts()
    meet.form_process_group(plan.device == "cpu", COLLECTIVE_TIMEOUT)


def _compile_ops(plan: LaunchPlan) -> None:
    """Compile the ops that DeepSpeed needs, in the first process of each host."""
    ops.use_own_tools()
    is_first_of_host = int(os.environ.get("LOCAL_RANK", 0)) == 0
    ops.clear_stale_locks(lambda line: say(line) if is_first_of_host else None)
    # The other ranks wait for torch's lock of the compile when they load the ops.
    if is_first_of_host:
        ops.compile_needed_ops(plan)


def _build_zero(plan: LaunchPlan, options: dict[str, Any]) -> Strategy:
    """Create the Accelerator with DeepSpeed's plugin."""
    from zerobook.strategy.zero import ZeroStrategy

    # Pass a copy, since accelerate writes into the config, and the run records the plan as it is.
    options["deepspeed_plugin"] = DeepSpeedPlugin(hf_ds_config=deepcopy(plan.deepspeed_config))
    return ZeroStrategy(Accelerator(**options), plan)


def remove_buffer_name(environ: Mapping[str, str]) -> None:
    """Remove the name of this rank's buffer in shared memory, through which DeepSpeed reduces on a CPU.

    DeepSpeed never removes it. So each rank would leave 66 MiB in /dev/shm after its end, and a later launch at the same port
    could open the buffer of an earlier one. Without a name, the memory is freed when the last process that uses it ends.
    """
    address = f"{environ.get('MASTER_ADDR')}_{environ.get('MASTER_PORT')}"
    # This is the name in DeepSpeed's csrc/cpu/comm/shm.cpp.
    name = f"deepspeed_allreduce_buffer_{os.getuid()}_{address}_{environ.get('RANK')}"
    Path("/dev/shm", name).unlink(missing_ok=True)


def _build_fully_sharded(plan: LaunchPlan, options: dict[str, Any]) -> Strategy:
    """Create the Accelerator with FSDP2's plugin, and change some settings of the plugin."""
    from zerobook.strategy.fsdp import FullyShardedStrategy
    from zerobook.strategy.model_parallel import ModelParallelStrategy

    if plan.device == "cpu":
        # accelerate chooses FSDP only for accelerators' distributed types, though FSDP2 itself runs on gloo.
        PartialState(cpu=True, timeout=COLLECTIVE_TIMEOUT)
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    accelerator = Accelerator(**options)
    plugin = accelerator.state.fsdp_plugin
    policy = plugin.mixed_precision_policy
    if policy is not None:
        # accelerate would reduce gradients in half precision. They are reduced in fp32, as under DDP. It would also cast what
        # the model returns, which may be the loss (see `zerobook.head`).
        plugin.mixed_precision_policy = replace(policy, reduce_dtype=torch.float32, output_dtype=None)
    if plan.device == "cpu" and plan.offload_param != "none":
        from torch.distributed.fsdp import CPUOffloadPolicy

        # accelerate's plugin always asks for pinned memory, which needs a GPU driver.
        plugin.cpu_offload = CPUOffloadPolicy(pin_memory=False)
    strategy_class = ModelParallelStrategy if plan.is_loaded_in_parts else FullyShardedStrategy
    return strategy_class(accelerator, plan)


def usable_cores() -> int:
    """Return the number of CPU cores that this process may use, without hyper-threads and within its container's quota."""
    import psutil

    logical = psutil.cpu_count() or 1
    physical = psutil.cpu_count(logical=False) or logical
    # The affinity counts hyper-threads, so it is scaled to physical cores.
    cores = len(os.sched_getaffinity(0)) * physical // logical
    try:
        # The first number is the microseconds of CPU time in each period, or max if there is no limit.
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
    except (OSError, ValueError):
        return max(1, cores)
    if quota != "max":
        cores = min(cores, int(quota) // int(period))
    return max(1, cores)


def set_environment(plan: LaunchPlan) -> None:
    """Set the variables that accelerate, DeepSpeed and torch read, as the plan says."""
    # torch's flight recorder keeps this number of collectives. `zerobook.training.watching` writes them into files.
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "1000")
    if plan.device == "cpu":
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
        # Without LOCAL_SIZE, DeepSpeed starts the program numactl at each reduction of ZeRO-3, to count the memory nodes.
        os.environ.setdefault("LOCAL_SIZE", os.environ.get("LOCAL_WORLD_SIZE", "1"))
        # If this variable is set, accelerate uses neither DeepSpeed nor FSDP, without a message.
        os.environ.pop("ACCELERATE_USE_CPU", None)
    if plan.is_loaded_in_parts:
        # transformers makes the process groups instead of accelerate, and each process reads its weights from the files.
        os.environ.pop("ACCELERATE_USE_PARALLELISM_CONFIG", None)
        os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] = "false"
    if plan.kind == "fsdp":
        # The recipe recomputes activations, see `fsdp_settings.read_checkpointing`.
        os.environ["FSDP_ACTIVATION_CHECKPOINTING"] = "false"
        os.environ["FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD"] = "false"
        # accelerate reads this variable only with a parallelism config.
        os.environ["PARALLELISM_CONFIG_DP_SHARD_SIZE"] = str(plan.shard // plan.context)
    elif plan.kind == "deepspeed":
        # accelerate computes the batch size from these variables.
        os.environ["PARALLELISM_CONFIG_DP_REPLICATE_SIZE"] = "1"
        os.environ["PARALLELISM_CONFIG_DP_SHARD_SIZE"] = str(plan.data_parallel_size)
    # The plan has the values of these variables already. accelerate must neither refuse nor apply them a second time.
    os.environ.pop("ACCELERATE_CONFIG_DS_FIELDS", None)
    os.environ.pop("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", None)
