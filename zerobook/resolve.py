"""Where a strategy file leads: from environment, hardware and config to a `LaunchPlan`, without starting anything.

A launched run, ``--dry-run`` and ``zerobook doctor`` all call `resolve`, so what doctor prints is what a run does. Every
disagreement between the Accelerate YAML, the DeepSpeed JSON and the flags is gathered here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from zerobook.config import RecipeConfig, Resolved


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """What this machine offers. ``gpus`` is a count; ``flash_attention`` means the package imports."""

    gpus: int = 0
    gpu_name: str | None = None
    bf16: bool = True
    flash_attention: bool = False

    @property
    def device(self) -> str:
        return "cuda" if self.gpus else "cpu"

    @classmethod
    def detect(cls) -> Hardware:
        """Look at the machine. Imports torch; initialises no CUDA context beyond a device query."""
        import importlib.util

        import torch

        if not torch.cuda.is_available():
            return cls()
        return cls(
            gpus=torch.cuda.device_count(),
            gpu_name=torch.cuda.get_device_name(0),
            bf16=torch.cuda.is_bf16_supported(including_emulation=False),
            flash_attention=importlib.util.find_spec("flash_attn") is not None,
        )


@dataclass(kw_only=True)
class LaunchPlan:
    """Where a strategy file leads on this machine. Everything here is known before any process group."""

    kind: str  # "single", "ddp", "deepspeed" or "fsdp"
    world_size: int
    device: str
    backend: str | None
    precision: str
    precision_source: str
    zero_stage: int | None = None
    offload_optimizer: str = "none"
    offload_param: str = "none"
    replicate: int = 1  # FSDP: groups that hold copies of each other (hybrid sharding)
    shard: int = 1  # FSDP: processes that share one copy
    config_file: str | None = None
    deepspeed_config: dict[str, Any] | None = None
    asked: dict[str, Any] = field(default_factory=dict)  # the config before anything was taken over into it
    notes: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        """A short name for people: ``ZeRO-3 (optimizer: cpu)``, ``FSDP2 2x2``, ``DDP``."""
        if self.kind == "deepspeed":
            parts = [f"{what}: {where}" for what, where in
                     (("optimizer", self.offload_optimizer), ("parameters", self.offload_param))
                     if where != "none"]  # fmt: skip
            return f"ZeRO-{self.zero_stage}" + (f" ({', '.join(parts)} offload)" if parts else "")
        if self.kind == "fsdp":
            offload = " (cpu offload)" if self.offload_param != "none" else ""
            return ("FSDP2" if self.replicate == 1 else f"FSDP2 hybrid {self.replicate}x{self.shard}") + offload
        return {"single": "one process", "ddp": "DDP"}[self.kind]

    @property
    def line(self) -> str:
        """The one line a run prints about itself."""
        where = f"{self.world_size} x {self.device}" + (f" over {self.backend}" if self.backend else "")
        return f"strategy {self.name} | {where} | precision {self.precision} ({self.precision_source})"

    def record(self) -> dict[str, Any]:
        """JSON-ready facts for the runlog and doctor; ``deepspeed_config`` is as resolved in memory."""
        return {"name": self.name, **asdict(self)}


def resolve(
    environ: Mapping[str, str],
    hardware: Hardware,
    config: RecipeConfig,
    sources: Resolved,
    explicit_precision: str | None = None,
) -> LaunchPlan:
    """Work out the strategy from what the launcher put into the environment.

    Args:
        environ: the environment of a worker process.
        hardware: what the machine has.
        config: the recipe's config. Values that a person did not set and that the YAML or JSON
            fixes (accumulation, clipping, rate, decay) are taken over into it.
        sources: where each config value came from; updated with what is taken over.
        explicit_precision: ``--mixed_precision`` as typed to the launcher. The environment alone
            cannot tell ``--mixed_precision no`` from silence.

    Returns:
        The plan. ``problems`` holds every disagreement; nothing is raised here.
    """
    world = int(environ.get("WORLD_SIZE", 1))
    launched = int(environ.get("LOCAL_RANK", -1)) >= 0
    on_cpu = hardware.gpus == 0
    backend = None if not launched else ("gloo" if on_cpu else "nccl")
    plan = LaunchPlan(
        kind="ddp" if launched else "single",
        world_size=world,
        device=hardware.device,
        backend=backend,
        precision="no",
        precision_source="default",
    )
    if _true(environ.get("ACCELERATE_USE_DEEPSPEED")):
        plan.kind = "deepspeed"
        _read_deepspeed(plan, environ)
    elif _true(environ.get("ACCELERATE_USE_FSDP")):
        plan.kind = "fsdp"
        _read_fsdp(plan, environ)
    if _true(environ.get("ACCELERATE_USE_CPU")) and hardware.gpus:
        plan.device, plan.backend, on_cpu = "cpu", "gloo" if launched else None, True
    if on_cpu and launched:
        plan.notes.append(f"no GPU is used: {plan.name} runs on {world} CPU process(es) over gloo")

    _take_accumulation(plan, environ, config, sources)
    _choose_precision(plan, environ, config, sources, explicit_precision, on_cpu)
    if plan.deepspeed_config is not None:
        _fill_deepspeed(plan, config, sources)
    _check_model_choices(plan, config, hardware, on_cpu)
    return plan


def _true(value: Any) -> bool:
    return str(value).lower() in ("1", "true", "yes")


def _read_deepspeed(plan: LaunchPlan, environ: Mapping[str, str]) -> None:
    """Load the JSON, or write down what the YAML's inline ``deepspeed_config`` says."""
    path = environ.get("ACCELERATE_DEEPSPEED_CONFIG_FILE", "none")
    if path == "none":
        zero: dict[str, Any] = {"stage": int(environ.get("ACCELERATE_DEEPSPEED_ZERO_STAGE", 2))}
        for what in ("optimizer", "param"):
            device = environ.get(f"ACCELERATE_DEEPSPEED_OFFLOAD_{what.upper()}_DEVICE", "none")
            if device not in ("none", ""):
                zero[f"offload_{what}"] = {"device": device}
        config: dict[str, Any] = {"zero_optimization": zero, "gradient_clipping": "auto"}
        clipping = environ.get("ACCELERATE_GRADIENT_CLIPPING", "auto")
        if clipping not in ("auto", "none"):
            config["gradient_clipping"] = float(clipping)
        plan.config_file = "the Accelerate YAML's deepspeed_config"
    else:
        plan.config_file = path
        config = _load_json(path, plan.problems)
    plan.deepspeed_config = config
    zero = config.get("zero_optimization")
    if not isinstance(zero, dict):
        if config:
            plan.problems.append(
                f"{path}: zero_optimization is missing. Add a section with a stage, 0 to 3, or pick a file from ds_configs/."
            )
        zero = config["zero_optimization"] = {"stage": 0}
    plan.zero_stage = int(zero.get("stage", 0))
    for what in ("optimizer", "param"):
        setattr(plan, f"offload_{what}", str((zero.get(f"offload_{what}") or {}).get("device", "none")))
    if plan.offload_param != "none" and plan.zero_stage != 3:
        plan.problems.append(
            f"{plan.config_file}: zero_optimization.offload_param is set with stage {plan.zero_stage}; "
            "parameters can be offloaded only under stage 3. Set stage 3 or remove offload_param."
        )


def _load_json(path: str, problems: list[str]) -> dict[str, Any]:
    try:
        loaded = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        problems.append(
            f"{path}: the DeepSpeed config cannot be read ({error.strerror}). Paths in an Accelerate YAML "
            f"are relative to the folder you launch from, here {Path.cwd()}."
        )
    except ValueError as error:
        problems.append(f"{path}: not valid JSON: {error}.")
    else:
        if isinstance(loaded, dict):
            return loaded
        problems.append(f"{path}: expected a JSON object, found a {type(loaded).__name__}.")
    return {}


def _read_fsdp(plan: LaunchPlan, environ: Mapping[str, str]) -> None:
    if environ.get("FSDP_VERSION", "1") != "2":
        plan.problems.append(
            f"fsdp_version: the Accelerate YAML asks for FSDP {environ.get('FSDP_VERSION', '1')}; the recipes "
            "run FSDP2 (FSDP1 does not start on a CPU and is deprecated in PyTorch). Set fsdp_version: 2."
        )
    plan.offload_param = "cpu" if _true(environ.get("FSDP_OFFLOAD_PARAMS")) else "none"
    plan.offload_optimizer = plan.offload_param  # FSDP2 keeps moments beside the parameters
    plan.shard = plan.world_size
    if not _true(environ.get("ACCELERATE_USE_PARALLELISM_CONFIG")):
        return
    sizes = {k: int(environ.get(f"PARALLELISM_CONFIG_{k.upper()}_SIZE", 1)) for k in ("tp", "cp", "sp")}
    for key, size in sizes.items():
        if size > 1:
            plan.problems.append(
                f"parallelism_config.parallelism_config_{key}_size: {size}; the recipes spread data only. Set it to 1."
            )
    plan.replicate = int(environ.get("PARALLELISM_CONFIG_DP_REPLICATE_SIZE", 1))
    asked = int(environ.get("PARALLELISM_CONFIG_DP_SHARD_SIZE", 1))
    if plan.world_size % plan.replicate:
        plan.problems.append(
            f"parallelism_config_dp_replicate_size: {plan.replicate} replicas do not divide {plan.world_size} "
            "processes. Change --num_processes or the size."
        )
        return
    plan.shard = plan.world_size // plan.replicate
    if asked != plan.shard:
        plan.notes.append(
            f"hybrid sharding: {plan.replicate} replicas x {plan.shard} shards, to fit {plan.world_size} processes "
            f"(the file says {plan.replicate} x {asked})"
        )


def _take_accumulation(plan: LaunchPlan, environ: Mapping[str, str], config: RecipeConfig, sources: Resolved) -> None:
    """Accumulation may be said in three places; they must agree, and one that stands alone is taken."""
    said: dict[str, int] = {}
    from_yaml = environ.get("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "")
    if from_yaml.isdigit() and int(from_yaml) != 1:
        said["the Accelerate YAML or launcher"] = int(from_yaml)
    ds = plan.deepspeed_config or {}
    from_json = ds.get("gradient_accumulation_steps", "auto")
    # A fixed 1 in a JSON is the files' way of saying nothing: Accelerate writes it where it is missing.
    if isinstance(from_json, int) and from_json != 1:
        said[str(plan.config_file)] = from_json
    if sources.given("gradient_accumulation_steps"):
        said[sources["gradient_accumulation_steps"]] = config.gradient_accumulation_steps
    if len(set(said.values())) > 1:
        plan.problems.append(
            "gradient_accumulation_steps: "
            + ", ".join(f"{value} in {where}" for where, value in said.items())
            + '. Keep one; in the JSON write "auto".'
        )
    elif said:
        where, value = next(iter(said.items()))
        if value != config.gradient_accumulation_steps:
            config.gradient_accumulation_steps, sources["gradient_accumulation_steps"] = value, where


def _choose_precision(
    plan: LaunchPlan,
    environ: Mapping[str, str],
    config: RecipeConfig,
    sources: Resolved,
    explicit: str | None,
    on_cpu: bool,
) -> None:
    """The recipe's flag, then the launcher's or YAML's, then a JSON that fixes it, then full fp32."""
    ds = plan.deepspeed_config
    fixed = None
    for dtype in ("fp16", "bf16"):
        section = (ds or {}).get(dtype)
        if isinstance(section, dict) and _true(section.get("enabled")):
            if fixed:
                plan.problems.append(f"{plan.config_file}: both fp16.enabled and bf16.enabled are true. Keep one.")
            fixed = dtype
    handed_over = environ.get("ACCELERATE_MIXED_PRECISION", "no").lower()
    if config.mixed_precision is not None:
        plan.precision, plan.precision_source = config.mixed_precision, sources["mixed_precision"]
        if handed_over not in ("no", config.mixed_precision):
            plan.notes.append(
                f"precision: {sources['mixed_precision']} says {config.mixed_precision}, the launcher or its YAML "
                f"says {handed_over}; {config.mixed_precision} is used"
            )
    elif explicit is not None or handed_over != "no":
        plan.precision = explicit or handed_over
        plan.precision_source = "launcher's --mixed_precision" if explicit else "Accelerate YAML"
    elif fixed:
        plan.precision, plan.precision_source = fixed, f"{plan.config_file}: {fixed}.enabled"
    if fixed and plan.precision != fixed:
        plan.notes.append(
            f"precision: {plan.config_file} fixes {fixed}.enabled; {plan.precision_source} says "
            f"{plan.precision}, which is used (in memory; the file is unchanged)"
        )
    if plan.precision not in ("no", "bf16", "fp16"):
        plan.problems.append(f"mixed_precision: {plan.precision!r} is not supported. Use no, bf16 or fp16.")
    if plan.precision == "fp16" and on_cpu:
        key = f"{plan.config_file}: fp16.enabled is true" if fixed == "fp16" else (
            f"mixed_precision: fp16 (from {plan.precision_source})")  # fmt: skip
        plan.problems.append(f"{key}, and fp16 does not train on a CPU. Pass --mixed_precision no (or bf16).")
    if ds is not None:
        for dtype in ("fp16", "bf16"):
            section = ds.setdefault(dtype, {})
            section["enabled"] = plan.precision == dtype


def _fill_deepspeed(plan: LaunchPlan, config: RecipeConfig, sources: Resolved) -> None:
    """Fill ``auto`` and missing keys from the config; where both fix a value, they must agree."""
    ds = plan.deepspeed_config
    assert ds is not None
    # DeepSpeed computes the gradient norm only where it clips; a bound nothing reaches asks for the norm alone.
    never = 1e30
    fills: list[tuple[str, str | None, Any]] = [
        ("train_micro_batch_size_per_gpu", "per_device_train_batch_size", config.per_device_train_batch_size),
        ("gradient_accumulation_steps", None, config.gradient_accumulation_steps),
        ("gradient_clipping", "max_grad_norm", config.max_grad_norm or never),
    ]
    if "optimizer" in ds:
        ds["optimizer"].setdefault("params", {})
        fills += [
            ("optimizer.params.lr", "learning_rate", config.learning_rate),
            ("optimizer.params.weight_decay", "weight_decay", config.weight_decay),
            ("optimizer.params.betas", None, [config.adam_beta1, config.adam_beta2]),
            ("optimizer.params.eps", None, config.adam_epsilon),
        ]
    for dotted, key, value in fills:
        *path, leaf = dotted.split(".")
        node = ds
        for part in path:
            node = node[part]
        present = node.get(leaf, "auto")
        if present == "auto" or key is None:
            node[leaf] = value
        elif present != value and (sources.given(key) or key == "per_device_train_batch_size"):
            plan.problems.append(
                f"{plan.config_file}: {dotted} is {present}, but {key} is {value} (from {sources[key]}). "
                'Write "auto" in the JSON, or make them equal.'
            )
        elif present != value:
            setattr(config, key, present)
            sources[key] = str(plan.config_file)
    batch = ds.get("train_batch_size", "auto")
    product = config.per_device_train_batch_size * config.gradient_accumulation_steps * plan.world_size
    if batch not in ("auto", product):
        plan.problems.append(
            f"{plan.config_file}: train_batch_size is {batch}, but {config.per_device_train_batch_size} per device x "
            f"{config.gradient_accumulation_steps} accumulation x {plan.world_size} processes = {product}. "
            'Write "auto" in the JSON, or make them equal.'
        )
    ds["train_batch_size"] = product
    zero = ds["zero_optimization"]
    for what in ("offload_optimizer", "offload_param"):
        section = zero.get(what) or {}
        if section.get("device") == "nvme" and section.get("nvme_path", "auto") in ("auto", None):
            section["nvme_path"] = str(Path(config.output_dir) / "nvme_offload")
            note = f"NVMe offload swaps under {section['nvme_path']}; set nvme_path in the JSON to a fast local disk"
            if note not in plan.notes:
                plan.notes.append(note)
    ds["zero_allow_untested_optimizer"] = True
    scheduler = ds.get("scheduler", {})
    if scheduler and scheduler.get("type") not in (None, "WarmupDecayLR", "WarmupLR", "WarmupCosineLR"):
        plan.problems.append(
            f"{plan.config_file}: scheduler.type {scheduler['type']!r} is not known here. "
            "Remove the section; the recipe's lr_scheduler_type then sets the rate."
        )
    elif scheduler:
        plan.notes.append(f"learning rate: {scheduler.get('type')} from {plan.config_file}, not lr_scheduler_type")


def _check_model_choices(plan: LaunchPlan, config: RecipeConfig, hardware: Hardware, on_cpu: bool) -> None:
    """Choices of the model that this strategy or device cannot take."""
    if config.attn_implementation == "flash_attention_2" and (on_cpu or not hardware.flash_attention):
        have = "there is no GPU here" if on_cpu else "the flash-attn package is not installed"
        plan.problems.append(
            f"attn_implementation: flash_attention_2 was asked for, but {have}. Use auto, sdpa or eager, or "
            "install requirements-gpu.txt on a machine with a GPU."
        )
    if config.device_map and plan.world_size > 1:
        plan.problems.append(
            f"device_map: {config.device_map!r} spreads one process over all devices and cannot be combined with "
            f"{plan.world_size} processes. Remove it (ZeRO-3 or FSDP shard the model), or launch one process."
        )
    quantised = getattr(config, "load_in_4bit", False)
    if quantised and (plan.offload_param != "none" or "nvme" in (plan.offload_optimizer, plan.offload_param)):
        plan.problems.append(
            f"load_in_4bit: {plan.name} moves parameters between devices and loses the quantisation state of 4-bit "
            "weights. Use DDP, ZeRO-1, ZeRO-2 or FSDP without offload, or drop load_in_4bit."
        )
    if plan.precision == "bf16" and not on_cpu and not hardware.bf16:
        plan.problems.append(f"mixed_precision: bf16 is not supported by {hardware.gpu_name}. Use fp16.")
