"""``--fast``: settings that make a run faster and compute the same, chosen for the hardware and named in a note."""

from typing import Any

from zerobook.config import RecipeConfig
from zerobook.config_sources import ConfigDraft
from zerobook.strategy.launch_plan import LaunchPlan

SHORT = 500
"""Steps under which compiling takes longer than it saves on a CPU: half a minute, against 5 % of each step."""
WORKERS = 2
FAST = "flag --fast"
"""Source of the values that are set here."""


def choose(plan: LaunchPlan, draft: ConfigDraft[Any], missing_compiler: str | None) -> None:
    """Set what ``--fast`` turns on, unless the user has set it, and add notes that say so."""
    config = draft.config
    if not config.fast:
        return
    obstacle = _obstacle_to_compiling(plan, config, missing_compiler)
    # Setting -> its value, and why it is left out where it is.
    candidates: dict[str, tuple[Any, str | None]] = {
        "torch_compile": (True, None),
        "dataloader_num_workers": (WORKERS, None),
    }
    if obstacle is not None:
        candidates["torch_compile"] = (True, f"it is not used with {obstacle}")
    if plan.device == "cpu":
        candidates["dataloader_num_workers"] = (WORKERS, "on a CPU, workers take the cores that train")
    for key, (value, obstacle_to_key) in candidates.items():
        reason = "you have set it" if draft.sources.is_set(key) else obstacle_to_key
        if reason is None:
            draft.set(FAST, **{key: value})
            plan.notes.append(f"fast: {key} {value}")
        else:
            plan.notes.append(f"fast, left out: {key}: {reason}")


def _obstacle_to_compiling(plan: LaunchPlan, config: RecipeConfig, missing_compiler: str | None) -> str | None:
    """Return with what the layers cannot be compiled, or compiling does not pay; None if it does."""
    obstacle = not_compiled(plan, config)
    if obstacle is not None:
        return obstacle
    if missing_compiler is not None:
        return f"a machine that lacks {missing_compiler}"
    steps = config.max_train_steps
    if plan.device == "cpu" and steps is not None and steps < SHORT:
        return f"a run of {steps} steps on a CPU, where compiling takes longer than it saves"
    return None


def not_compiled(plan: LaunchPlan, config: RecipeConfig) -> str | None:
    """Return what the layers cannot be compiled with; None if they can."""
    if plan.zero_stage == 3:
        return "ZeRO-3, whose hooks gather the weights of each part of a layer, which ends compiled code there"
    if plan.sequence > 1 or plan.context > 1 or plan.loaded_in_parts:
        return f"{plan.name}, which replaces parts of the layers"
    if config.base_format is not None:
        return f"a base in {config.base_format}"
    if config.activation_checkpointing in ("selective", "offload"):
        return f"activation_checkpointing {config.activation_checkpointing}, which chooses operations that compiled code fuses"
    return None
