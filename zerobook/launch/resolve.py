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

import torch

from zerobook.checkpoint.result import find_result
from zerobook.checkpoint.resume import keep_global_batch, other_optimizer
from zerobook.config import RecipeConfig
from zerobook.config_sources import ConfigDraft, ConfigSources, ConfigT
from zerobook.errors import CheckpointError, ConfigError
from zerobook.launch import deepspeed_json, deepspeed_keys, fast, fsdp_settings, groups, ops
from zerobook.launch.model_facts import find_missing_layers, model_facts, unfit_for_text, unfit_for_zero3
from zerobook.launch.quantised import refused_base
from zerobook.optimizer import names_code_in_yaml, refused_by, unused_settings
from zerobook.strategy.launch_plan import LaunchPlan
from zerobook.utils import gpus
from zerobook.utils.compilers import missing_compiler
from zerobook.utils.environment import is_true
from zerobook.utils.host_memory import lockable_bytes
from zerobook.utils.units import counted

ADAPTER_SETTINGS = (
    "adapter_path",
    "adapter",
    "lora_r",
    "lora_alpha",
    "lora_dropout",
    "lora_target_modules",
    "modules_to_save",
    "new_tokens",
)
"""Settings of a new adapter. An adapter that is trained further brings its own."""


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """GPUs of this machine, and what runs on them.

    Attributes:
        gpus: number of GPUs that torch sees.
        flash_attention: True if flash attention 2 runs on all of them; if not, ``no_flash_attention`` says why.
        unused: why torch does not see the GPUs that this process may use, or has no kernels for one of them; None if it has, if
            there are none, or if the environment hides them.
        first_unused: index of the first GPU that ``unused`` is about.
        missing_ops: DeepSpeed's ops that cannot be compiled here, each with the reason.
        missing_compiler: what is missing here to compile models, see `missing_compiler`.
        lockable_bytes: memory that a process may lock; None: any amount.
    """

    gpus: int = 0
    gpu_name: str | None = None
    bf16: bool = True
    flash_attention: bool = False
    no_flash_attention: str = "the flash-attn package is not installed"
    unused: str | None = None
    first_unused: int = 0
    missing_ops: dict[str, str] = field(default_factory=dict)
    missing_compiler: str | None = None
    lockable_bytes: int | None = None

    @property
    def device(self) -> str:
        return "cuda" if self.gpus else "cpu"

    @classmethod
    def detect(cls) -> Hardware:
        """Detect the hardware of this machine. Imports torch; initialises no CUDA context beyond a device query."""
        if not torch.cuda.is_available():
            unused = gpus.unused(torch.__version__, torch.version.cuda)
            return cls(
                unused=unused,
                missing_ops=ops.find_missing_ops(on_gpus=False),
                missing_compiler=missing_compiler(),
                lockable_bytes=lockable_bytes(),
            )
        missing = _no_flash_attention()
        first_unused, unused = gpus.find_without_kernels()
        return cls(
            gpus=torch.cuda.device_count(),
            gpu_name=torch.cuda.get_device_name(0),
            bf16=torch.cuda.is_bf16_supported(including_emulation=False),
            flash_attention=not missing,
            no_flash_attention=missing,
            unused=unused,
            first_unused=first_unused,
            missing_ops=ops.find_missing_ops(on_gpus=True),
            missing_compiler=missing_compiler(),
            lockable_bytes=lockable_bytes(),
        )


def _no_flash_attention() -> str:
    """Return why flash attention 2 does not run on this machine's GPUs; empty if it does."""
    for index in range(torch.cuda.device_count()):
        capability = torch.cuda.get_device_capability(index)
        # Ampere is the first generation that it runs on.
        if capability < (8, 0):
            has = ".".join(map(str, capability))
            return f"{torch.cuda.get_device_name(index)} has compute capability {has}, and it needs 8.0"
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


@dataclass(kw_only=True)
class LaunchDraft:
    """A launch while it is resolved. A stage writes what it decides into the plan and the config.

    Attributes:
        environ: the environment of a worker process.
        hardware: what the machine has.
        explicit_precision: ``--mixed_precision`` as typed to the launcher; None without that flag.
        starts: a run follows. Otherwise code that only the YAML names is not run.
        plan: the strategy, with the problems and notes so far.
        draft: the config, with the source of each value.
    """

    environ: Mapping[str, str]
    hardware: Hardware
    explicit_precision: str | None
    starts: bool
    plan: LaunchPlan
    draft: ConfigDraft[Any]

    @property
    def is_launched(self) -> bool:
        """Whether a launcher started this process, as one of several or alone."""
        return int(self.environ.get("LOCAL_RANK", -1)) >= 0

    @property
    def on_cpu(self) -> bool:
        return self.plan.device == "cpu"


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
        starts: whether a run is started afterwards. If not, code that only the YAML names is not executed.

    Returns:
        - The plan. Its ``problems`` hold every disagreement; nothing is raised here.
        - The config, in which keys that the user left unset have the values that the YAML or JSON prescribes (accumulation,
          clipping, rate, decay). It also has the dtype of a frozen base.
        - The sources of the values of that config.
    """
    launch = LaunchDraft(
        environ=environ,
        hardware=hardware,
        explicit_precision=explicit_precision,
        starts=starts,
        draft=ConfigDraft(config, sources),
        plan=LaunchPlan(
            kind="single",
            world_size=int(environ.get("WORLD_SIZE", 1)),
            device=hardware.device,
            backend=None,
            precision="no",
            precision_source="default",
            optimizer=config.optimizer,
        ),
    )
    plan = launch.plan
    draft = launch.draft
    # Later stages read what earlier ones decided, and problems are told in this order.
    # The model first: its name may be the folder of a run, which is replaced by the run's result.
    _name_model(launch)
    _take_tokenizer(launch)
    # The strategy, and the devices of its processes.
    _read_strategy_file(launch)
    _choose_device(launch)
    _check_variables(launch)
    _check_gpus(launch)
    # The batch, and the optimizer that steps once for it.
    _set_accumulation(launch)
    _set_global_batch(launch)
    deepspeed_json.check_micro_batch(plan, draft)
    _check_optimizer(launch)
    _preserve_global_batch_on_resume(launch)
    # Precision, and then DeepSpeed's config, which has the batch and the precision in it.
    _choose_precision(launch)
    _choose_frozen_dtype(launch)
    _fill_deepspeed_config(launch)
    # What this model and this hardware can do under all of that.
    _check_model(launch)
    fast.choose(plan, draft, hardware.missing_compiler)
    _check_model_choices(launch)
    # A strategy file may have set values that the config does not take.
    plan.problems += draft.problems()
    return plan, draft.config, draft.sources


def together(*stages: Sequence[str]) -> list[str]:
    """Return the problems of all stages of a launch, in their order.

    A key that an earlier stage complains of gets no second problem from a later one, which may follow from the first.
    """
    joined: list[str] = []
    for problems in stages:
        keys = {problem.partition(":")[0] for problem in joined}
        joined += [problem for problem in problems if problem.partition(":")[0] not in keys]
    return joined


def _name_model(launch: LaunchDraft) -> None:
    """Replace the name of a run by that of its model, or of its adapter and the model beside it."""
    plan = launch.plan
    draft = launch.draft
    name = draft.config.model_name_or_path
    if name is None:
        return
    try:
        result = find_result(name)
    except ConfigError as error:
        plan.problems.append(f"model_name_or_path: {error}")
        return
    merge = f"To merge it into its model first: zerobook export {name} --output merged"
    adapter_settings = [key for key in ADAPTER_SETTINGS if draft.sources.is_set(key)]
    # A run's folder holds a model, or an adapter that names one.
    if result.adapter is None:
        if result.model != name:
            draft.set(draft.sources["model_name_or_path"], model_name_or_path=result.model)
            plan.notes.append(f"model_name_or_path: {name} is a run; its model {result.model} is trained further")
    elif not draft.config.trains_adapters:
        plan.problems.append(
            f"model_name_or_path: {result.adapter} is an adapter for {result.model}, and this run trains all weights. {merge}; "
            "then name that folder. To train the adapter further, take recipes/lora_finetune.py."
        )
    elif adapter_settings:
        plan.problems.append(
            f"model_name_or_path: {result.adapter} is an adapter, which is trained further with its own settings, and "
            f"{', '.join(adapter_settings)} is given too. Drop one of the two. {merge}."
        )
    else:
        draft.set(draft.sources["model_name_or_path"], model_name_or_path=result.model, adapter_path=str(result.adapter))
        if result.revision and not draft.sources.is_set("model_revision"):
            draft.set(f"the adapter in {result.adapter}", model_revision=result.revision)
        plan.notes.append(
            f"model_name_or_path: {result.adapter} is an adapter for {result.model}; it is trained further. {merge}"
        )


def _take_tokenizer(launch: LaunchDraft) -> None:
    """Take the tokenizer beside an adapter that is trained further.

    Its chat template is that of the adapter's training. It may have tokens that the model's own lacks: they came with new rows
    of the embeddings, which the adapter holds.
    """
    draft = launch.draft
    path = getattr(draft.config, "adapter_path", None)
    if path is None or draft.config.tokenizer_name is not None:
        return
    if (Path(path).expanduser() / "tokenizer_config.json").exists():
        draft.set(f"the adapter in {path}", tokenizer_name=path)
        launch.plan.notes.append(f"tokenizer_name: {path}, whose adapter was trained with that tokenizer")


def _read_strategy_file(launch: LaunchDraft) -> None:
    """Read what the launcher made of the strategy file: the kind, its settings, and the groups of processes."""
    plan = launch.plan
    environ = launch.environ
    if is_true(environ.get("ACCELERATE_USE_DEEPSPEED")):
        plan.kind = "deepspeed"
        deepspeed_json.read(plan, environ)
    elif is_true(environ.get("ACCELERATE_USE_FSDP")):
        plan.kind = "fsdp"
        fsdp_settings.read(plan, environ)
        fsdp_settings.read_checkpointing(plan, environ, launch.draft)
    elif launch.is_launched:
        plan.kind = "ddp"
    groups.read(plan, environ)


def _choose_device(launch: LaunchDraft) -> None:
    """Choose CPU or GPUs, and the backend of the process group."""
    plan = launch.plan
    if is_true(launch.environ.get("ACCELERATE_USE_CPU")):
        plan.device = "cpu"
    # A process takes the GPU of its LOCAL_RANK, so a later GPU may be one that torch cannot use.
    elif launch.hardware.unused and int(launch.environ.get("LOCAL_WORLD_SIZE", 1)) > launch.hardware.first_unused:
        plan.problems.append(launch.hardware.unused)
    if launch.is_launched:
        plan.backend = "gloo" if launch.on_cpu else "nccl"
    deepspeed_json.check_device(plan, launch.environ)


def _check_variables(launch: LaunchDraft) -> None:
    """Add problems for variables that ask for what the recipes do themselves, or that are incomplete."""
    plan = launch.plan
    if plan.world_size > 1 and not launch.is_launched:
        plan.problems.append(
            f"WORLD_SIZE is {plan.world_size}, and LOCAL_RANK is not set: accelerate would let each process train alone on its "
            "GPU. Start the processes with accelerate launch and a strategy file, or set LOCAL_RANK too, which is 0 where a "
            "machine has one process. For a run of one process, unset WORLD_SIZE."
        )
    torch_device = launch.environ.get("ACCELERATE_TORCH_DEVICE")
    if torch_device:
        plan.problems.append(
            f"ACCELERATE_TORCH_DEVICE is {torch_device}: a process takes the GPU of its LOCAL_RANK, or the CPU. Unset it; GPUs "
            "are chosen with CUDA_VISIBLE_DEVICES."
        )
    dynamo_backend = launch.environ.get("ACCELERATE_DYNAMO_BACKEND", "no")
    if dynamo_backend.lower() != "no":
        plan.problems.append(
            f"dynamo_backend is {dynamo_backend}; the recipes compile the model's layers with "
            "--torch_compile. Remove dynamo_config from the Accelerate YAML, or pass --dynamo_backend no."
        )


def _check_gpus(launch: LaunchDraft) -> None:
    """Check that each process of this machine has a GPU of its own, which it finds by LOCAL_RANK."""
    if not launch.is_launched:
        return
    plan = launch.plan
    environ = launch.environ
    if launch.on_cpu:
        plan.notes.append(f"no GPU is used: {plan.name} runs on {counted(plan.world_size, 'CPU process')} over gloo")
        return
    gpu_count = launch.hardware.gpus
    gpus_seen = counted(gpu_count, "GPU")
    local_rank = int(environ["LOCAL_RANK"])
    local_processes = int(environ.get("LOCAL_WORLD_SIZE", 1))
    # Under srun without torchrun, Slurm's variables say how many processes this node has. All of them have to find the same
    # problem: a process that found none would wait for the others.
    if environ.get("SLURM_NTASKS") == str(plan.world_size) and "TORCHELASTIC_RUN_ID" not in environ:
        # The value is 8, or 8(x2) for two nodes of 8 processes each. Nodes with different numbers have another form.
        tasks = re.fullmatch(r"(\d+)(\(x\d+\))?", environ.get("SLURM_TASKS_PER_NODE", ""))
        tasks_of_node = int(tasks[1]) if tasks else 1
        local_processes = max(local_processes, local_rank + 1, tasks_of_node)
        if local_processes > gpu_count:
            plan.problems.append(
                f"srun: {local_processes} processes on this machine, of which this one sees {gpus_seen}. A process "
                "takes the GPU of its LOCAL_RANK, so each has to see all GPUs of the node. Pass --gpu-bind=none to srun "
                "(--gpus-per-task binds), or start one task a node, which runs accelerate launch."
            )
    elif local_processes > gpu_count:
        plan.problems.append(
            f"num_processes: {local_processes} processes on this machine, which has {gpus_seen}; each process needs "
            f"one of its own. Pass --num_processes {gpu_count * (plan.world_size // local_processes)}."
        )
    elif local_rank >= gpu_count:
        plan.problems.append(
            f"LOCAL_RANK {local_rank}: this process sees {gpus_seen}, and takes the one of its LOCAL_RANK, counted "
            "from 0. Let each process see all GPUs of the machine, or start fewer."
        )


def _set_accumulation(launch: LaunchDraft) -> None:
    """Set the accumulation from flags, YAML or JSON. Those that set it must agree."""
    plan = launch.plan
    draft = launch.draft
    steps_by_source: dict[str, int] = {}
    from_yaml = launch.environ.get("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "")
    if from_yaml.isdigit() and int(from_yaml) != 1:
        steps_by_source["the Accelerate YAML or launcher"] = int(from_yaml)
    from_json = (plan.deepspeed_config or {}).get("gradient_accumulation_steps", "auto")
    # A fixed 1 in a JSON means that nothing was chosen: Accelerate writes it where it is missing.
    if isinstance(from_json, int) and from_json != 1:
        steps_by_source[str(plan.config_file)] = from_json
    if draft.sources.is_set("gradient_accumulation_steps"):
        steps_by_source[draft.sources["gradient_accumulation_steps"]] = draft.config.gradient_accumulation_steps
    if len(set(steps_by_source.values())) > 1:
        listed = ", ".join(f"{steps} in {source}" for source, steps in steps_by_source.items())
        plan.problems.append(f'gradient_accumulation_steps: {listed}. Keep one; in the JSON write "auto".')
    elif steps_by_source:
        source, steps = next(iter(steps_by_source.items()))
        if steps != draft.config.gradient_accumulation_steps:
            draft.set(source, gradient_accumulation_steps=steps)


def _set_global_batch(launch: LaunchDraft) -> None:
    """Set the accumulation that gives ``global_batch_size``."""
    plan = launch.plan
    draft = launch.draft
    config = draft.config
    global_batch = config.global_batch_size
    if global_batch is None:
        return
    readers = plan.data_parallel_size
    micro_batches = config.per_device_train_batch_size * readers
    product = config.gradient_accumulation_steps * micro_batches
    if draft.sources.is_set("gradient_accumulation_steps") and product != global_batch:
        plan.problems.append(
            f"global_batch_size: {global_batch}, but {draft.sources['gradient_accumulation_steps']} says "
            f"{config.gradient_accumulation_steps} accumulation steps, and {config.per_device_train_batch_size} x "
            f"{config.gradient_accumulation_steps} x {readers} is {product}. Drop one of the two."
        )
    elif global_batch % micro_batches:
        below = global_batch // micro_batches * micro_batches
        multiples = str(micro_batches)
        if below:
            multiples = f"{below} or {below + micro_batches}"
        plan.problems.append(
            f"global_batch_size: {global_batch} is no multiple of {config.per_device_train_batch_size} samples x {readers} "
            f"processes = {micro_batches}. Give {multiples}, or another --per_device_train_batch_size."
        )
    else:
        draft.set(f"global_batch_size={global_batch}", gradient_accumulation_steps=config.accumulation_on(readers))


def _check_optimizer(launch: LaunchDraft) -> None:
    """Add problems if this strategy, or the checkpoint that is resumed, does not support the optimizer."""
    plan = launch.plan
    config = launch.draft.config
    sources = launch.draft.sources
    # An optimizer may be a person's own code, which a check alone does not run unasked.
    try:
        if launch.starts or not names_code_in_yaml(config, sources):
            refusal = refused_by(plan.name, plan.kind, plan.offload_optimizer, config.optimizer)
            if refusal:
                plan.problems.append(refusal)
        else:
            plan.notes.append(
                f"optimizer: {sources['optimizer']} names {config.optimizer}, which is not run here. A launch runs it. With "
                f"--optimizer {shlex.quote(config.optimizer)} it is run, and checked, here too"
            )
        differing = other_optimizer(config)
        if differing:
            plan.problems.append(f"resume_from_checkpoint: {differing}")
    except ConfigError as error:
        plan.problems.append(str(error))
    except CheckpointError:
        # There is no checkpoint to resume, which `_keep_global_batch` reports.
        pass
    plan.problems += unused_settings(config.optimizer, [key for key in sources if sources.is_set(key)])


def _preserve_global_batch_on_resume(launch: LaunchDraft) -> None:
    """Cut the batch of a resumed run anew if the number of processes changed."""
    plan = launch.plan
    # What a person asked for, and no cut of it: the next resume compares with this.
    plan.asked = launch.draft.config.model_dump()
    try:
        note = keep_global_batch(launch.draft, plan.data_parallel_size)
    except CheckpointError as error:
        plan.problems.append(f"resume_from_checkpoint: {error}")
        return
    if note:
        plan.notes.append(note)


def _choose_precision(launch: LaunchDraft) -> None:
    """Set the precision: the first of recipe's flag, launcher's flag, recipe's YAML, Accelerate YAML, fixed JSON, fp32."""
    plan = launch.plan
    config = launch.draft.config
    sources = launch.draft.sources
    ds = plan.deepspeed_config
    choices: list[tuple[str, str]] = []
    if config.mixed_precision is not None:
        choices.append((config.mixed_precision, sources["mixed_precision"]))
    environment_precision = launch.environ.get("ACCELERATE_MIXED_PRECISION", "no").lower()
    if launch.explicit_precision is not None:
        # The launcher's flag is stronger than a recipe's YAML, and weaker than a recipe's flag.
        position = len(choices) if sources.is_flag("mixed_precision") else 0
        choices.insert(position, (launch.explicit_precision.lower(), "launcher's --mixed_precision"))
    elif environment_precision != "no":
        choices.append((environment_precision, "Accelerate YAML"))
    # "auto" in the JSON fixes nothing.
    fixed_dtypes = [dtype for dtype in ("bf16", "fp16") if is_true(((ds or {}).get(dtype) or {}).get("enabled"))]
    if len(fixed_dtypes) > 1:
        plan.problems.append(f"{plan.config_file}: both fp16.enabled and bf16.enabled are true. Keep one.")
    choices += [(dtype, f"{plan.config_file}: {dtype}.enabled") for dtype in fixed_dtypes]
    if choices:
        plan.precision, plan.precision_source = choices[0]
    elif not launch.on_cpu:
        half = "bf16" if launch.hardware.bf16 else "fp16"
        plan.notes.append(
            f"mixed_precision: no, by default; --mixed_precision {half} is faster, needs less memory, and rounds more"
        )
    for precision, source in choices[1:]:
        if precision != plan.precision:
            plan.notes.append(
                f"precision: {plan.precision_source} says {plan.precision}, {source} says {precision}; {plan.precision} is used"
            )
    if plan.precision not in ("no", "bf16", "fp16"):
        plan.problems.append(f"mixed_precision: {plan.precision!r} is not supported. Use no, bf16 or fp16.")
    if plan.precision == "fp16" and launch.on_cpu:
        plan.problems.append(
            f"mixed_precision: fp16 (from {plan.precision_source}), and fp16 does not train on a CPU. Pass "
            "--mixed_precision no (or bf16)."
        )
    # DeepSpeed reads the precision from its config alone.
    if ds is not None:
        for dtype in ("fp16", "bf16"):
            ds.setdefault(dtype, {})["enabled"] = plan.precision == dtype


def _choose_frozen_dtype(launch: LaunchDraft) -> None:
    """Load a frozen base in the dtype that the run computes in."""
    plan = launch.plan
    config = launch.draft.config
    dtype = config.loaded_dtype(plan.precision)
    if dtype != config.dtype:
        plan.notes.append(
            f"dtype: the frozen base is loaded in {dtype}, in which mixed_precision {plan.precision} computes; pass --dtype "
            f"{config.dtype} to load it in that"
        )
        launch.draft.set(plan.precision_source, dtype=dtype)


def _fill_deepspeed_config(launch: LaunchDraft) -> None:
    """Fill in DeepSpeed's config, and check the ops that it needs and its keys."""
    plan = launch.plan
    hardware = launch.hardware
    if plan.deepspeed_config is None:
        return
    deepspeed_json.fill(plan, launch.draft)
    # A GPU machine that is told to use its CPU builds the ops of a CPU.
    missing_ops = hardware.missing_ops if plan.device == hardware.device else ops.find_missing_ops(on_gpus=False)
    deepspeed_json.check_ops(plan, missing_ops)
    deepspeed_keys.check_keys(plan)
    deepspeed_json.check_locked_memory(plan, hardware.lockable_bytes)


def _check_model(launch: LaunchDraft) -> None:
    """Check the model against the strategy by its config.json, if that is on this machine."""
    plan = launch.plan
    facts = model_facts(launch.draft.config)
    groups.check(plan, launch.draft, facts)
    if facts is not None:
        plan.problems += unfit_for_text(facts)
        plan.problems += unfit_for_zero3(plan, facts)
        if plan.kind in ("fsdp", "deepspeed"):
            plan.problems += find_missing_layers(launch.environ, facts)


def _check_model_choices(launch: LaunchDraft) -> None:
    """Add problems for model settings that this strategy or device does not support."""
    plan = launch.plan
    config = launch.draft.config
    hardware = launch.hardware
    if config.attn_implementation == "flash_attention_2":
        if launch.on_cpu or not hardware.flash_attention:
            reason = "there is no GPU here" if launch.on_cpu else hardware.no_flash_attention
            plan.problems.append(
                f"attn_implementation: flash_attention_2 was asked for, but {reason}. Use auto, sdpa or eager, or "
                "install requirements-gpu.txt on a machine with a GPU of compute capability 8.0 or later."
            )
        # The dtype of a frozen base may be known only when the model is loaded.
        has_unknown_dtype = config.trains_adapters and config.dtype == "auto"
        if not (computes_in_half(config, plan.precision, config.dtype) or has_unknown_dtype):
            plan.problems.append(fp32_flash_attention(plan.precision, config.dtype))
    whole_module_keys = [key for key in ("modules_to_save", "new_tokens") if getattr(config, key, None)]
    has_half_base = config.trains_adapters and config.dtype in ("bfloat16", "float16")
    if has_half_base and whole_module_keys and plan.precision == "no":
        plan.problems.append(
            f"{whole_module_keys[0]}: modules that are trained whole give fp32 values, which a frozen base in "
            f"{config.dtype} cannot take without mixed precision. Pass --mixed_precision bf16, or --dtype float32."
        )
    if config.activation_checkpointing == "offload" and launch.on_cpu:
        plan.notes.append(
            "activation_checkpointing: on a CPU, offload does what full does, since activations are in host memory anyway"
        )
    obstacle = fast.find_compile_obstacle(plan, config)
    if config.torch_compile and obstacle:
        plan.problems.append(f"torch_compile: it is not supported with {obstacle}. Drop one of the two.")
    compiled = {"torch_compile": config.torch_compile, "attn_implementation": config.attn_implementation == "flex_attention"}
    for key, is_asked_for in compiled.items():
        if is_asked_for and hardware.missing_compiler:
            plan.problems.append(f"{key}: it is compiled, and this machine lacks {hardware.missing_compiler}. Or drop {key}.")
    if config.base_format is not None:
        flag = {"nf4": "load_in_4bit", "int8": "load_in_8bit"}[config.base_format]
        refusal = refused_base(plan, f"{flag}: the base is quantised to {config.base_format}", config.base_format)
        if refusal:
            plan.problems.append(refusal)
    if plan.precision == "bf16" and not launch.on_cpu and not hardware.bf16:
        plan.problems.append(f"mixed_precision: bf16 is not supported by {hardware.gpu_name}. Use fp16.")


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
