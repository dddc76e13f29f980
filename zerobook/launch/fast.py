"""``--fast``: settings that make a run faster without changing its losses, chosen for the hardware and named in notes."""

from typing import Any

from zerobook.config import RecipeConfig
from zerobook.config_sources import ConfigDraft
from zerobook.strategy.launch_plan import LaunchPlan

# In a shorter run on a CPU, compiling takes longer than it saves: it takes half a minute, and saves 5 % of each step.
FEWEST_STEPS_ON_CPU = 500
# Setting that ``--fast`` turns on -> its value.
SETTINGS = {"torch_compile": True, "dataloader_num_workers": 2}
# Source of the values that are set here.
FAST = "flag --fast"


def choose(plan: LaunchPlan, draft: ConfigDraft[Any], missing_compiler: str | None) -> None:
    """Set each of `SETTINGS` that helps in this run and that the user has not set. Add a note on each setting.

    Args:
        missing_compiler: what is missing on this machine to compile models; None if nothing is.
    """
    config = draft.config
    if not config.fast:
        return
    # Setting that does not help in this run, or that the user has set -> the reason for the note.
    reasons = {}
    obstacle = _find_obstacle_to_fast_compiling(plan, config, missing_compiler)
    if obstacle is not None:
        reasons["torch_compile"] = f"it is not used with {obstacle}"
    if plan.device == "cpu":
        reasons["dataloader_num_workers"] = "on a CPU, workers take the cores that train"
    for key, value in SETTINGS.items():
        if draft.sources.is_set(key):
            reasons[key] = "you have set it"
        if key in reasons:
            plan.notes.append(f"fast, left out: {key}: {reasons[key]}")
        else:
            draft.set(FAST, **{key: value})
            plan.notes.append(f"fast: {key} {value}")


def _find_obstacle_to_fast_compiling(plan: LaunchPlan, config: RecipeConfig, missing_compiler: str | None) -> str | None:
    """Return the part of the launch with which compiling is impossible or takes longer than it saves; None without one."""
    obstacle = find_compile_obstacle(plan, config)
    if obstacle is not None:
        return obstacle
    if missing_compiler is not None:
        return f"a machine that lacks {missing_compiler}"
    steps = config.max_train_steps
    if plan.device == "cpu" and steps is not None and steps < FEWEST_STEPS_ON_CPU:
        return f"a run of {steps} steps on a CPU, where compiling takes longer than it saves"
    return None


def find_compile_obstacle(plan: LaunchPlan, config: RecipeConfig) -> str | None:
    """Return the part of the launch with which the layers cannot be compiled; None if they can be compiled."""
    if plan.zero_stage == 3:
        return "ZeRO-3, whose hooks gather the weights of each part of a layer, which ends compiled code there"
    if plan.sequence > 1 or plan.context > 1 or plan.is_loaded_in_parts:
        return f"{plan.name}, which replaces parts of the layers"
    if config.base_format is not None:
        return f"a base in {config.base_format}"
    if config.activation_checkpointing in ("selective", "offload"):
        return f"activation_checkpointing {config.activation_checkpointing}, which chooses operations that compiled code fuses"
    return None
