"""Read the settings of an FSDP launch, and check them by accelerate's own plugin."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from zerobook.launch import recompute
from zerobook.utils.environment import is_true

if TYPE_CHECKING:
    from zerobook.config_sources import ConfigDraft
    from zerobook.strategy.launch_plan import LaunchPlan

FILE = "the Accelerate YAML's fsdp_config"
SHARDING = (
    "FSDP2 has fsdp_reshard_after_forward in its place, and for HYBRID_SHARD parallelism_config_dp_replicate_size, see "
    "accelerate_configs/fsdp_hybrid.yaml"
)
# Keys of FSDP 1 -> why they have no effect under FSDP2.
VERSION_1 = {
    "fsdp_sharding_strategy": SHARDING,
    "fsdp_backward_prefetch": "FSDP2 prefetches by itself",
    "fsdp_forward_prefetch": "FSDP2 prefetches by itself",
    "fsdp_use_orig_params": "FSDP2 always keeps the model's own parameters",
    "fsdp_sync_module_states": "FSDP2 has fsdp_cpu_ram_efficient_loading in its place",
}


def read(plan: LaunchPlan, environ: Mapping[str, str]) -> None:
    """Read the settings of FSDP into ``plan``, and add problems for those that the recipes do not run with."""
    if environ.get("FSDP_VERSION", "1") != "2":
        plan.problems.append(
            f"fsdp_version: the Accelerate YAML asks for FSDP {environ.get('FSDP_VERSION', '1')}; the recipes "
            "run FSDP2 (FSDP1 does not start on a CPU and is deprecated in PyTorch). Set fsdp_version: 2. Of "
            f"fsdp_sharding_strategy: {SHARDING}."
        )
    elif environ.get("FSDP_AUTO_WRAP_POLICY", "").upper() == "SIZE_BASED_WRAP":
        plan.problems.append(
            f"{FILE}: fsdp_auto_wrap_policy is SIZE_BASED_WRAP; accelerate then shards lists of layers, which FSDP2 refuses. "
            "Write TRANSFORMER_BASED_WRAP, which shards each layer."
        )
    else:
        _check_plugin_values(plan, environ)
    plan.offload_param = "cpu" if is_true(environ.get("FSDP_OFFLOAD_PARAMS")) else "none"
    # FSDP2 keeps the optimizer state where it keeps the parameters.
    plan.offload_optimizer = plan.offload_param
    plan.reshards = is_true(environ.get("FSDP_RESHARD_AFTER_FORWARD", "true"))
    plan.rank_0_loads = is_true(environ.get("FSDP_CPU_RAM_EFFICIENT_LOADING"))
    # Without a parallelism config, one copy of the weights is sharded over all processes.
    plan.shard = plan.world_size
    if is_true(environ.get("ACCELERATE_USE_PARALLELISM_CONFIG")):
        _read_hybrid_sharding(plan, environ)


def _read_hybrid_sharding(plan: LaunchPlan, environ: Mapping[str, str]) -> None:
    """Read how many replicas the processes hold, and over how many processes each replica is sharded."""
    plan.replicate = int(environ.get("PARALLELISM_CONFIG_DP_REPLICATE_SIZE", 1))
    shard_in_file = int(environ.get("PARALLELISM_CONFIG_DP_SHARD_SIZE", 1))
    if plan.replicate < 1 or plan.world_size % plan.replicate:
        plan.problems.append(
            f"parallelism_config_dp_replicate_size: {plan.replicate} replicas do not divide {plan.world_size} "
            "processes. Change --num_processes or the size."
        )
        return
    # The size of a shard follows from the number of processes. The file may have a size for another number.
    plan.shard = plan.world_size // plan.replicate
    if plan.replicate == 1:
        return
    if plan.shard == 1:
        plan.problems.append(
            f"parallelism_config_dp_replicate_size: {plan.replicate} replicas on {plan.world_size} processes leave nothing to "
            f"shard inside one. Pass --num_processes {2 * plan.replicate} or more, or launch with accelerate_configs/fsdp.yaml "
            "(one copy, sharded) or ddp.yaml (copies only)."
        )
    elif shard_in_file != plan.shard:
        plan.notes.append(
            f"hybrid sharding: {plan.replicate} replicas x {plan.shard} shards, to fit {plan.world_size} processes "
            f"(the file says {plan.replicate} x {shard_in_file})"
        )


def _check_plugin_values(plan: LaunchPlan, environ: Mapping[str, str]) -> None:
    """Add a problem if accelerate's plugin, which the launched process will build, refuses the values."""
    from accelerate import FullyShardedDataParallelPlugin
    from accelerate.utils import patch_environment

    # The plugin warns of keys of FSDP 1, which the account of the launch has already: see `VERSION_1`.
    logging.getLogger("accelerate.utils.dataclasses").setLevel(logging.ERROR)
    settings = {key: value for key, value in environ.items() if key.startswith("FSDP_")}
    # Check with the default, also if the environment of this process has another value.
    settings.setdefault("FSDP_CPU_RAM_EFFICIENT_LOADING", "false")
    try:
        with patch_environment(**settings):
            FullyShardedDataParallelPlugin()
    except (ValueError, KeyError, TypeError) as error:
        plan.problems.append(f"{FILE}: accelerate refuses a value of it: {str(error).rstrip('.')}.")


def read_checkpointing(plan: LaunchPlan, environ: Mapping[str, str], draft: ConfigDraft[Any]) -> None:
    """Let the recipe recompute activations if the file turns this on.

    It is turned off for accelerate (see `build.set_environment`), which would wrap each layer a second time.
    """
    if is_true(environ.get("FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD")):
        recompute.request(plan, FILE, "fsdp_activation_checkpointing_offload", "offload", draft)
    elif is_true(environ.get("FSDP_ACTIVATION_CHECKPOINTING")):
        recompute.request(plan, FILE, "fsdp_activation_checkpointing", "full", draft)
