"""Translate how another trainer spreads a run over devices, by a DeepSpeed JSON or FSDP settings, into a strategy file."""

import json
import re
from pathlib import Path
from typing import Any, NamedTuple

from zerobook.interop.configs.foreign import Foreign, NoCounterpart
from zerobook.interop.configs.translations import translate_precision
from zerobook.utils.reading import read_json, read_text
from zerobook.utils.shipped import shipped
from zerobook.utils.yaml_text import load_bounded

DDP = "ddp"
# Name of a strategy file that `choose_strategy` writes, since none is shipped: FSDP2 that keeps the gathered weights until the
# backward pass has used them, as SHARD_GRAD_OP of FSDP 1 does.
GRADIENTS = "fsdp_gradients"
JSON = "deepspeed.json"
# Keys of a DeepSpeed JSON that change nothing in the training. Models are saved by Zerobook itself.
_WITHOUT_EFFECT = (
    "steps_per_print",
    "wall_clock_breakdown",
    "zero_allow_untested_optimizer",
    "zero_force_ds_cpu_optimizer",
    "stage3_gather_16bit_weights_on_model_save",
    "stage3_gather_fp16_weights_on_model_save",
)
_NO_FILE = "The file is not there, neither from the working folder nor beside the config. Copy it there."
# Sharding strategy of FSDP 1 or its number, or reshard_after_forward -> a shipped strategy file, or `GRADIENTS`.
_SHARDING = {
    "full_shard": "fsdp",
    "1": "fsdp",
    "shard_grad_op": GRADIENTS,
    "2": GRADIENTS,
    "false": GRADIENTS,
    "no_shard": DDP,
    "3": DDP,
    "hybrid_shard": "fsdp_hybrid",
    "4": "fsdp_hybrid",
    "hybrid_shard_zero2": "fsdp_hybrid",
    "5": "fsdp_hybrid",
}


class Strategy(NamedTuple):
    """A strategy file: a shipped one by its name, or another one by its path. If it has ``content``, it must be written."""

    name: str
    content: dict[str, Any] | None = None


def translate_deepspeed(foreign: Foreign, value: Any) -> dict[str, Any]:
    """Set the strategy to that of a DeepSpeed config. ``value`` is the path of a file, or the content itself."""
    config = value
    if isinstance(value, str):
        path = foreign.locate(value)
        if path is None or not path.is_file():
            return _choose_by_name(foreign, value)
        # Read the file as JSON: YAML would read 1e9 as text.
        config = read_json(path)
    stage = int((config.get("zero_optimization") or {}).get("stage", 0))
    foreign.strategy = {"deepspeed": config}
    if not stage:
        foreign.strategy = {"name": DDP}
        foreign.sentence = "Stage 0 is DDP."
    return {}


def _choose_by_name(foreign: Foreign, name: str) -> dict[str, Any]:
    """Set the strategy to a shipped one, by the name of a DeepSpeed JSON that does not exist."""
    stage = re.search(r"(?:zero|z|stage)[-_]?([0-3])", name.lower())
    if stage is None:
        raise NoCounterpart(_NO_FILE)
    file = DDP if stage[1] == "0" else f"zero{stage[1]}"
    # Stage 1 has no shipped file with offload.
    if "offload" in name.lower() and stage[1] in "23":
        file += "_offload"
    foreign.strategy = {"name": file}
    foreign.sentence = (
        f"The file is not there. accelerate_configs/{file}.yaml is chosen by its name; losses do not depend on it."
    )
    return {}


def translate_fsdp(foreign: Foreign, _value: Any) -> dict[str, Any]:
    """Set the strategy to FSDP2, or to DDP for ``no_shard``. The config has settings of FSDP 1, of FSDP 2, or of torchtune."""
    config = foreign.config.get("fsdp_config") or {}
    if isinstance(config, str):
        path = foreign.locate(config)
        if path is None:
            raise NoCounterpart(_NO_FILE)
        config = load_bounded(read_text(path))
    settings = {str(key).removeprefix("fsdp_"): setting for key, setting in config.items()}
    # transformers' key ``fsdp`` has words, such as ``full_shard auto_wrap offload``.
    words = str(foreign.config.get("fsdp") or "").lower()
    # FSDP 1 has sharding_strategy or reshard_after_forward, with the same values. In FSDP 2, the latter is true or false.
    sharding = str(settings.get("sharding_strategy", settings.get("reshard_after_forward", ""))).lower()
    # The last match counts: ``hybrid_shard_zero2`` also contains ``2``, which means SHARD_GRAD_OP.
    for name in _SHARDING:
        if name in words:
            sharding = name
    file = _SHARDING.get(sharding, "fsdp")
    offloads = True in (settings.get("offload_params"), foreign.config.get("fsdp_cpu_offload"), "offload" in words)
    # No file both offloads and keeps the gathered weights. Prefer offload: without it a model may not fit, and keeping the
    # weights only saves time. No file both offloads and shards in the hybrid way; there, offload is left out.
    if file in ("fsdp", GRADIENTS) and offloads:
        file = "fsdp_offload"
    foreign.strategy = {"name": file}
    if settings.get("activation_checkpointing") is True:
        return {"activation_checkpointing": "full"}
    return {}


def translate_launcher(foreign: Foreign, value: Any) -> dict[str, Any]:
    """Set the number of processes and accelerate's config from the settings of a launcher, and return its precision.

    Args:
        value: a mapping with the settings. If it is not one, they are keys of the config itself, as in TRL and Axolotl.
    """
    settings = value if isinstance(value, dict) else foreign.config
    name = str(settings.get("accelerate_config") or settings.get("config_file") or "")
    # TRL ships its configs of accelerate under these names.
    shipped_names = {"single_gpu": "single", "multi_gpu": DDP, "fsdp1": "fsdp", "fsdp2": "fsdp"}
    stem = Path(name).stem.removeprefix("deepspeed_")
    stem = shipped_names.get(stem, stem)
    path = foreign.locate(name)
    if path is not None:
        # A config of accelerate is a strategy file. It counts unless the trainer's own settings have set the strategy. Flags of
        # the launcher override its settings.
        foreign.strategy = foreign.strategy or {"name": str(path)}
        settings = load_bounded(read_text(path)) | settings
    elif shipped(f"accelerate_configs/{stem}.yaml").is_file():
        foreign.strategy = {"name": stem}
    elif name:
        raise NoCounterpart(_NO_FILE)
    foreign.processes = int(settings.get("num_processes") or settings.get("nproc_per_node") or settings.get("num_gpus") or 1)
    launched_precision = settings.get("mixed_precision")
    # Use the launcher's precision only if the trainer sets none.
    if launched_precision in ("bf16", "fp16") and translate_precision(foreign, None) == {"mixed_precision": "no"}:
        return {"mixed_precision": launched_precision}
    return {}


def choose_strategy(foreign: Foreign) -> Strategy:
    """Return the strategy file of a config; DDP if the config has no strategy.

    If no shipped strategy file has the settings of the config's DeepSpeed JSON, add this JSON to ``foreign.files``.
    """
    config = foreign.strategy.get("deepspeed")
    if config is None:
        name = foreign.strategy.get("name", DDP)
        if name != GRADIENTS:
            return Strategy(name)
        # Change the shipped file of FSDP so that it keeps the gathered weights until the backward pass has used them.
        content = _load_shipped("fsdp")
        content["fsdp_config"]["fsdp_reshard_after_forward"] = False
        return Strategy("strategy", content)
    # Prefer a shipped strategy file whose JSON has all settings of the config.
    settings = _list_settings(config)
    for file in sorted(shipped("ds_configs").glob("*.json")):
        shipped_settings = _list_settings(read_json(file))
        additional = " ".join(shipped_settings - settings)
        # Additional settings of a shipped file change only the speed, unless they offload, or shard in another way (hpZ).
        if settings <= shipped_settings and "device" not in additional and "hpz" not in additional:
            return Strategy(file.stem)
    # There is none, so write the config's JSON beside a strategy file for it.
    foreign.files[JSON] = json.dumps(config, indent=2) + "\n"
    content = _load_shipped(f"zero{config['zero_optimization']['stage']}")
    content["deepspeed_config"]["deepspeed_config_file"] = JSON
    return Strategy("strategy", content)


def _load_shipped(name: str) -> dict[str, Any]:
    return load_bounded(read_text(shipped(f"accelerate_configs/{name}.yaml")))


def _list_settings(config: dict[str, Any], prefix: str = "") -> set[str]:
    """Return the settings of a DeepSpeed config, each as the text ``PATH VALUE``, such as ``zero_optimization.stage 2``.

    Settings that are off, ``auto`` or without effect are left out.
    """
    settings = set()
    for key, value in config.items():
        path = f"{prefix}{key}"
        if isinstance(value, dict) and value.get("device") != "none":
            settings |= _list_settings(value, f"{path}.")
        elif value not in ("auto", None, False) and key not in _WITHOUT_EFFECT and not isinstance(value, dict):
            settings.add(f"{path} {value}")
    return settings
