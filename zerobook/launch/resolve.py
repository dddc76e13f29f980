"""Resolve environment, hardware and config to a `LaunchPlan`, without starting anything.

A launched run, ``--dry-run`` and ``zerobook doctor`` all call `resolve`, so what doctor prints is what a run does. Every
disagreement between the Accelerate YAML, the DeepSpeed JSON and the flags is gathered here.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from zerobook.checkpoint.result import find_result, holds_whole_modules
from zerobook.checkpoint.resume import keep_global_batch, other_optimizer, written_before
from zerobook.config import ConfigDraft, ConfigSources, ConfigT, RecipeConfig
from zerobook.errors import CheckpointError, ConfigError
from zerobook.launch import deepspeed_json, deepspeed_keys, fast, fsdp_settings, model_parallel, ops, token_split, variables
from zerobook.launch.model_facts import model_facts, unfit_for_text, unfit_for_zero3, unfit_layers
from zerobook.launch.quantised import refused_base
from zerobook.optimizer import names_code_in_yaml, refused_by, unused_settings
from zerobook.strategy.launch_plan import LaunchPlan
from zerobook.utils import gpus
from zerobook.utils.environment import true
from zerobook.utils.units import counted

FLASH_CAPABILITY = (8, 0)
"""Compute capability that flash attention 2 needs: Ampere or later."""


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """GPUs of this machine, and what runs on them.

    Attributes:
        gpus: number of GPUs that torch sees.
        flash_attention: True if flash attention 2 runs on all of them; if not, ``no_flash_attention`` says why.
        unused: why torch does not see the GPUs that this process may use; None where it sees them, where there are none, and
            where the environment hides them.
        missing_ops: DeepSpeed's ops that cannot be compiled here, each with the reason.
    """

    gpus: int = 0
    gpu_name: str | None = None
    bf16: bool = True
    flash_attention: bool = False
    no_flash_attention: str = "the flash-attn package is not installed"
    unused: str | None = None
    missing_ops: dict[str, str] = field(default_factory=dict)

    @property
    def device(self) -> str:
        return "cuda" if self.gpus else "cpu"

    @classmethod
    def detect(cls) -> Hardware:
        """Detect the hardware of this machine. Imports torch; initialises no CUDA context beyond a device query."""
        import torch

        if not torch.cuda.is_available():
            unused = gpus.unused(torch.__version__, torch.version.cuda)
            return cls(unused=unused, missing_ops=ops.missing(on_gpus=False))
        missing = _no_flash_attention()
        return cls(
            gpus=torch.cuda.device_count(),
            gpu_name=torch.cuda.get_device_name(0),
            bf16=torch.cuda.is_bf16_supported(including_emulation=False),
            flash_attention=not missing,
            no_flash_attention=missing,
            missing_ops=ops.missing(on_gpus=True),
        )


def _no_flash_attention() -> str:
    """Return why flash attention 2 does not run on this machine's GPUs; empty where it does."""
    import torch

    for index in range(torch.cuda.device_count()):
        capability = torch.cuda.get_device_capability(index)
        if capability < FLASH_CAPABILITY:
            has, needs = (".".join(map(str, numbers)) for numbers in (capability, FLASH_CAPABILITY))
            return f"{torch.cuda.get_device_name(index)} has compute capability {has}, and it needs {needs}"
    try:
        from flash_attn import flash_attn_func, flash_attn_varlen_func  # noqa: F401  what transformers calls
    except ModuleNotFoundError as error:
        if error.name == "flash_attn":
            return "the flash-attn package is not installed"
        return f"the flash-attn package does not import ({error})"
    except Exception as error:  # a build for another torch or CUDA: ImportError or OSError, and others from its own code
        return f"the flash-attn package does not import ({error})"
    from transformers.utils import is_flash_attn_2_available

    if not is_flash_attn_2_available():
        return "transformers does not take the installed package flash_attn for flash-attn 2.3.3 or later"
    return ""


def resolve(
    environ: Mapping[str, str],
    hardware: Hardware,
    config: ConfigT,
    sources: ConfigSources,
    explicit_precision: str | None = None,
    *,
    starts: bool = True,
) -> tuple[LaunchPlan, ConfigT, ConfigSources]:
    """Work out the strategy from what the launcher put into the environment.

    Args:
        environ: the environment of a worker process.
        hardware: what the machine has.
        config: the recipe's config. It is not changed.
        sources: where each config value came from. They are not changed.
        explicit_precision: ``--mixed_precision`` as typed to the launcher. The environment alone
            cannot tell ``--mixed_precision no`` from no flag.
        starts: a run follows. Otherwise code that only the YAML names is not run.

    Returns:
        The plan, whose ``problems`` hold every disagreement; nothing is raised here. The config with the values that no person
        set and that the YAML or JSON fixes (accumulation, clipping, rate, decay), and with the dtype of a frozen base. The
        sources of that config's values.
    """
    draft = ConfigDraft(config, sources)
    if config.trains_adapters and written_before(config, "warmup_ratio"):
        # A run of an earlier version keeps its learning rate, which was that of a run without adapters.
        earlier = {key: RecipeConfig.model_fields[key].default for key in ("learning_rate", "warmup_ratio")}
        draft.set("the checkpoint", **{key: value for key, value in earlier.items() if not sources.given(key)})
    naming = _name_model(draft)
    _take_tokenizer(draft, naming)
    config = draft.config
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
        optimizer=config.optimizer,
    )
    plan.notes += naming.notes
    plan.problems += naming.problems
    if true(environ.get("ACCELERATE_USE_DEEPSPEED")):
        plan.kind = "deepspeed"
        deepspeed_json.read(plan, environ)
    elif true(environ.get("ACCELERATE_USE_FSDP")):
        plan.kind = "fsdp"
        fsdp_settings.read(plan, environ)
        fsdp_settings.read_checkpointing(plan, environ, draft)
    token_split.read(plan, environ)
    model_parallel.read(plan, environ)
    if true(environ.get("ACCELERATE_USE_CPU")) and hardware.gpus:
        plan.device, plan.backend, on_cpu = "cpu", "gloo" if launched else None, True
    elif hardware.unused and not true(environ.get("ACCELERATE_USE_CPU")):
        plan.problems.append(hardware.unused)
    deepspeed_json.check_device(plan, environ)
    plan.problems += variables.check(environ)
    if environ.get("ACCELERATE_DYNAMO_BACKEND", "no").lower() != "no":
        plan.problems.append(
            f"dynamo_backend is {environ['ACCELERATE_DYNAMO_BACKEND']}; the recipes compile the model's layers with "
            "--torch_compile. Remove dynamo_config from the Accelerate YAML, or pass --dynamo_backend no."
        )
    if launched and not on_cpu:
        _check_gpus(plan, environ, hardware.gpus)
    if on_cpu and launched:
        plan.notes.append(f"no GPU is used: {plan.name} runs on {counted(world, 'CPU process')} over gloo")

    _set_accumulation(plan, environ, draft)
    _set_global_batch(plan, draft)
    deepspeed_json.check_micro_batch(plan, draft)
    _check_optimizer(plan, config, sources, starts)
    plan.asked = draft.config.model_dump()
    try:
        note = keep_global_batch(draft, plan.data_parallel_size)
    except CheckpointError as error:
        plan.problems.append(f"resume_from_checkpoint: {error}")
    else:
        plan.notes += [note] if note else []
    _choose_precision(plan, environ, config, draft.sources, explicit_precision, on_cpu)
    dtype = config.loaded_dtype(plan.precision)
    if dtype != config.dtype:
        plan.notes.append(
            f"dtype: the frozen base is loaded in {dtype}, in which mixed_precision {plan.precision} computes; pass --dtype "
            f"{config.dtype} to load it in that"
        )
        draft.set(plan.precision_source, dtype=dtype)
    if plan.deepspeed_config is not None:
        deepspeed_json.fill(plan, draft)
        # A GPU machine that is told to use its CPU builds the ops of a CPU.
        missing_ops = hardware.missing_ops if plan.device == hardware.device else ops.missing(on_gpus=False)
        deepspeed_json.check_ops(plan, missing_ops)
        deepspeed_keys.account(plan)
    facts = model_facts(draft.config)
    token_split.check(plan, draft, facts)
    model_parallel.check(plan, draft, facts)
    plan.problems += unfit_for_text(facts or {}) + unfit_for_zero3(plan, facts or {})
    plan.problems += unfit_layers(environ, facts or {}) if plan.kind in ("fsdp", "deepspeed") else []
    fast.choose(plan, draft)
    _check_model_choices(plan, draft.config, hardware, on_cpu)
    plan.problems += draft.problems()
    return plan, draft.config, draft.sources


def together(*stages: Sequence[str]) -> list[str]:
    """Return the problems of all stages of a launch, in their order.

    A key that an earlier stage complains of gets no second problem from a later one, which may follow from the first.
    """
    found: list[str] = []
    for problems in stages:
        keys = {problem.partition(":")[0] for problem in found}
        found += [problem for problem in problems if problem.partition(":")[0] not in keys]
    return found


@dataclass
class _Naming:
    notes: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def _name_model(draft: ConfigDraft[Any]) -> _Naming:
    """Replace the name of a run by that of its model, or of its adapter and the model beside it."""
    config, found, name = draft.config, _Naming(), draft.config.model_name_or_path
    if name is None:
        return found
    try:
        result = find_result(name)
    except ConfigError as error:
        found.problems.append(f"model_name_or_path: {error}")
        return found
    merge = f"To merge it into its model first: zerobook export {name} --output merged"
    if result.adapter is None:
        if result.model != name:
            draft.set(draft.sources["model_name_or_path"], model_name_or_path=result.model)
            found.notes.append(f"model_name_or_path: {name} is a run; its model {result.model} is trained further")
    elif not config.trains_adapters:
        found.problems.append(
            f"model_name_or_path: {result.adapter} is an adapter for {result.model}, and this run trains all weights. {merge}; "
            "then name that folder. To train the adapter further, take recipes/lora_finetune.py."
        )
    elif given := [key for key in ("adapter_path", "adapter", "lora_r", "lora_alpha", "lora_dropout", "lora_target_modules",
                                "modules_to_save", "new_tokens")
                   if draft.sources.given(key)]:  # fmt: skip
        found.problems.append(
            f"model_name_or_path: {result.adapter} is an adapter, which is trained further with its own settings, and "
            f"{', '.join(given)} is given too. Drop one of the two. {merge}."
        )
    else:
        source = draft.sources["model_name_or_path"]
        draft.set(source, model_name_or_path=result.model, adapter_path=str(result.adapter))
        found.notes.append(
            f"model_name_or_path: {result.adapter} is an adapter for {result.model}; it is trained further. {merge}"
        )
    return found


def _take_tokenizer(draft: ConfigDraft[Any], naming: _Naming) -> None:
    """Take the tokenizer beside an adapter that is trained further, where that adapter holds whole modules.

    It may have tokens that the model's own lacks: they came with new rows of the embeddings, which the adapter holds.
    """
    path = getattr(draft.config, "adapter_path", None)
    if path is None or draft.config.tokenizer_name is not None:
        return
    folder = Path(path).expanduser()
    if (folder / "tokenizer_config.json").exists() and holds_whole_modules(folder):
        draft.set(f"the adapter in {path}", tokenizer_name=path)
        naming.notes.append(f"tokenizer_name: {path}, whose adapter was trained with that tokenizer")


def _check_gpus(plan: LaunchPlan, environ: Mapping[str, str], gpus: int) -> None:
    """Check that each process of this machine has a GPU of its own, which it finds by LOCAL_RANK."""
    local, rank = int(environ.get("LOCAL_WORLD_SIZE", 1)), int(environ["LOCAL_RANK"])
    if environ.get("SLURM_NTASKS") == str(plan.world_size) and "TORCHELASTIC_RUN_ID" not in environ:  # srun started this
        tasks = re.fullmatch(r"(\d+)(\(x\d+\))?", environ.get("SLURM_TASKS_PER_NODE", ""))  # as 8(x2)
        local = max(local, rank + 1, int(tasks[1]) if tasks else 1)
        if local > gpus:
            plan.problems.append(
                f"srun: {local} processes on this machine, of which this one sees {counted(gpus, 'GPU')}. A process "
                "takes the GPU of its LOCAL_RANK, so each has to see all GPUs of the node. Pass --gpu-bind=none to srun "
                "(--gpus-per-task binds), or start one task a node, which runs accelerate launch."
            )
    elif local > gpus:
        plan.problems.append(
            f"num_processes: {local} processes on this machine, which has {counted(gpus, 'GPU')}; each process needs "
            f"one of its own. Pass --num_processes {gpus * (plan.world_size // local)}."
        )
    elif rank >= gpus:
        plan.problems.append(
            f"LOCAL_RANK {rank}: this process sees {counted(gpus, 'GPU')}, and takes the one of its LOCAL_RANK, counted "
            "from 0. Let each process see all GPUs of the machine, or start fewer."
        )


def _set_accumulation(plan: LaunchPlan, environ: Mapping[str, str], draft: ConfigDraft[Any]) -> None:
    """Set the accumulation from flags, YAML or JSON. Those that set it must agree."""
    said: dict[str, int] = {}
    from_yaml = environ.get("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "")
    if from_yaml.isdigit() and int(from_yaml) != 1:
        said["the Accelerate YAML or launcher"] = int(from_yaml)
    ds = plan.deepspeed_config or {}
    from_json = ds.get("gradient_accumulation_steps", "auto")
    # A fixed 1 in a JSON means that nothing was chosen: Accelerate writes it where it is missing.
    if isinstance(from_json, int) and from_json != 1:
        said[str(plan.config_file)] = from_json
    if draft.sources.given("gradient_accumulation_steps"):
        said[draft.sources["gradient_accumulation_steps"]] = draft.config.gradient_accumulation_steps
    if len(set(said.values())) > 1:
        plan.problems.append(
            "gradient_accumulation_steps: "
            + ", ".join(f"{value} in {where}" for where, value in said.items())
            + '. Keep one; in the JSON write "auto".'
        )
    elif said:
        where, value = next(iter(said.items()))
        if value != draft.config.gradient_accumulation_steps:
            draft.set(where, gradient_accumulation_steps=value)


def _set_global_batch(plan: LaunchPlan, draft: ConfigDraft[Any]) -> None:
    """Set the accumulation that gives ``global_batch_size``."""
    config = draft.config
    wanted, readers = config.global_batch_size, plan.data_parallel_size
    if wanted is None:
        return
    at_once = config.per_device_train_batch_size * readers
    source = draft.sources.get("gradient_accumulation_steps", "default")
    if draft.sources.given("gradient_accumulation_steps") and config.gradient_accumulation_steps * at_once != wanted:
        plan.problems.append(
            f"global_batch_size: {wanted}, but {source} says {config.gradient_accumulation_steps} accumulation steps, and "
            f"{config.per_device_train_batch_size} x {config.gradient_accumulation_steps} x {readers} is "
            f"{config.gradient_accumulation_steps * at_once}. Drop one of the two."
        )
    elif wanted % at_once:
        below, above = wanted // at_once * at_once, -(-wanted // at_once) * at_once
        near = f"{below} or {above}" if below else f"{above}"
        plan.problems.append(
            f"global_batch_size: {wanted} is no multiple of {config.per_device_train_batch_size} samples x {readers} "
            f"processes = {at_once}. Give {near}, or another --per_device_train_batch_size."
        )
    else:
        draft.set(f"global_batch_size={wanted}", gradient_accumulation_steps=config.accumulation_on(readers))


def _check_optimizer(plan: LaunchPlan, config: RecipeConfig, sources: ConfigSources, starts: bool) -> None:
    """Add problems if this strategy, or the checkpoint that is resumed, does not support the optimizer."""
    refused = None
    try:
        if starts or not names_code_in_yaml(config, sources):
            refused = refused_by(plan.name, plan.kind, plan.offload_optimizer, config.optimizer)
        else:
            plan.notes.append(
                f"optimizer: {sources['optimizer']} names {config.optimizer}, which is not run here. A launch runs it. With "
                f"--optimizer {shlex.quote(config.optimizer)} it is run, and checked, here too"
            )
        other = other_optimizer(config)
        found = [refused, other and f"resume_from_checkpoint: {other}"]
    except ConfigError as error:
        found = [str(error)]
    except CheckpointError:  # `keep_global_batch` reports it
        found = [refused]
    found += unused_settings(config.optimizer, [key for key in sources if sources.given(key)])
    plan.problems += [problem for problem in found if problem]


def _choose_precision(
    plan: LaunchPlan,
    environ: Mapping[str, str],
    config: RecipeConfig,
    sources: ConfigSources,
    explicit: str | None,
    on_cpu: bool,
) -> None:
    """Set the precision: the first of recipe's flag, launcher's flag, recipe's YAML, Accelerate YAML, fixed JSON, fp32."""
    ds = plan.deepspeed_config
    fixed = None
    for dtype in ("fp16", "bf16"):
        section = (ds or {}).get(dtype)
        if isinstance(section, dict) and true(section.get("enabled")):
            if fixed:
                plan.problems.append(f"{plan.config_file}: both fp16.enabled and bf16.enabled are true. Keep one.")
            fixed = dtype
    said: list[tuple[str, str]] = []
    if explicit is not None:
        said.append((explicit.lower(), "launcher's --mixed_precision"))
    elif environ.get("ACCELERATE_MIXED_PRECISION", "no").lower() != "no":
        said.append((environ["ACCELERATE_MIXED_PRECISION"].lower(), "Accelerate YAML"))
    if config.mixed_precision is not None:
        behind = explicit is not None and not sources.typed("mixed_precision")
        said.insert(1 if behind else 0, (config.mixed_precision, sources["mixed_precision"]))
    if said:
        plan.precision, plan.precision_source = said[0]
    elif fixed:
        plan.precision, plan.precision_source = fixed, f"{plan.config_file}: {fixed}.enabled"
    for value, where in said[1:]:
        if value != plan.precision:
            plan.notes.append(
                f"precision: {plan.precision_source} says {plan.precision}, {where} says {value}; {plan.precision} is used"
            )
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


def computes_in_half(config: RecipeConfig, precision: str, dtype: str) -> bool:
    """Return whether the model's attention computes in fp16 or bf16.

    Without mixed precision, trained weights are fp32 whatever they were loaded in, and only frozen ones stay as they are.

    Args:
        precision: of the run: ``no``, ``bf16`` or ``fp16``.
        dtype: of the loaded weights, as torch calls it.
    """
    return precision != "no" or (config.trains_adapters and dtype in ("bfloat16", "float16"))


def fp32_flash_attention(precision: str, dtype: str) -> str:
    """Return the error message for flash attention 2 in a run that computes in fp32."""
    return (
        "attn_implementation: flash_attention_2 was asked for; it takes fp16 and bf16 only, and this run computes in fp32 "
        f"(mixed_precision {precision}, dtype {dtype}). Pass --mixed_precision bf16, or use auto, sdpa or eager."
    )


def _check_model_choices(plan: LaunchPlan, config: RecipeConfig, hardware: Hardware, on_cpu: bool) -> None:
    """Add problems for model settings that this strategy or device does not support."""
    if config.attn_implementation == "flash_attention_2":
        if on_cpu or not hardware.flash_attention:
            have = "there is no GPU here" if on_cpu else hardware.no_flash_attention
            plan.problems.append(
                f"attn_implementation: flash_attention_2 was asked for, but {have}. Use auto, sdpa or eager, or "
                "install requirements-gpu.txt on a machine with a GPU of compute capability 8.0 or later."
            )
        frozen_by_its_config = config.trains_adapters and config.dtype == "auto"  # known when the model is loaded
        if not (computes_in_half(config, plan.precision, config.dtype) or frozen_by_its_config):
            plan.problems.append(fp32_flash_attention(plan.precision, config.dtype))
    whole = [key for key in ("modules_to_save", "new_tokens") if getattr(config, key, None)]
    if config.trains_adapters and whole and plan.precision == "no" and config.dtype in ("bfloat16", "float16"):
        plan.problems.append(
            f"{whole[0]}: modules that are trained whole are fp32, and a frozen base in {config.dtype} takes no fp32 without "
            "mixed precision. Pass --mixed_precision bf16, or --dtype float32."
        )
    if config.activation_checkpointing == "offload" and on_cpu:
        plan.notes.append("activation_checkpointing: offload is full on a CPU, whose activations are in host memory anyway")
    if config.torch_compile and (other := fast.not_compiled(plan, config)):
        plan.problems.append(f"torch_compile: it is not supported with {other}. Drop one of the two.")
    if config.device_map and plan.world_size > 1:
        plan.problems.append(
            f"device_map: {config.device_map!r} spreads one process over all devices and cannot be combined with "
            f"{plan.world_size} processes. Remove it (ZeRO-3 or FSDP shard the model), or launch one process."
        )
    if config.base_format is not None:
        flag = {"nf4": "load_in_4bit", "int8": "load_in_8bit"}[config.base_format]
        refused = refused_base(plan, f"{flag}: the base is quantised to {config.base_format}", config.base_format)
        plan.problems += [refused] if refused else []
    if plan.precision == "bf16" and not on_cpu and not hardware.bf16:
        plan.problems.append(f"mixed_precision: bf16 is not supported by {hardware.gpu_name}. Use fp16.")
