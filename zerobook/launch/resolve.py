"""Resolve environment, hardware and config to a `LaunchPlan`, without starting anything.

A launched run, ``--dry-run`` and ``zerobook doctor`` all call `resolve`, so what doctor prints is what a run does. `resolve`
collects all contradictions between the Accelerate YAML, the DeepSpeed JSON and the flags.
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
from zerobook.checkpoint.resume import find_optimizer_mismatch, keep_global_batch
from zerobook.config import RecipeConfig
from zerobook.config_sources import ConfigDraft, ConfigSources, ConfigT
from zerobook.errors import CheckpointError, ConfigError
from zerobook.launch import deepspeed_json, deepspeed_keys, fast, fsdp_settings, groups, ops
from zerobook.launch.model_facts import find_missing_layers, find_text_problems, find_zero3_problems, model_facts
from zerobook.launch.quantised import explain_refused_base
from zerobook.optimizer import explain_refusal, names_code_in_yaml, unused_settings
from zerobook.strategy.launch_plan import LaunchPlan
from zerobook.utils import gpus
from zerobook.utils.compilers import missing_compiler
from zerobook.utils.environment import is_true
from zerobook.utils.host_memory import lockable_bytes
from zerobook.utils.units import counted

# Settings of a new adapter. An adapter that is trained further has its own values of them.
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


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """GPUs of this machine, and what runs on them.

    Attributes:
        gpus: number of GPUs that torch sees.
        flash_attention: True if flash attention 2 runs on all of them; if not, ``no_flash_attention`` says why.
        unused: why torch cannot use GPUs of this process: it does not see them, or has no kernels for one of them. None if
            torch can use all GPUs, if there are none, or if the environment hides them.
        first_unused: index of the first GPU that ``unused`` is about.
        missing_ops: DeepSpeed's ops that cannot be compiled here, op -> reason.
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
        """Detect the hardware of this machine, without a CUDA context except for queries of the devices."""
        if not torch.cuda.is_available():
            return cls(
                unused=gpus.unused(torch.__version__, torch.version.cuda),
                missing_ops=ops.find_missing_ops(on_gpus=False),
                missing_compiler=missing_compiler(),
                lockable_bytes=lockable_bytes(),
            )
        no_flash_attention = _explain_no_flash_attention()
        first_unused, unused = gpus.find_without_kernels()
        return cls(
            gpus=torch.cuda.device_count(),
            gpu_name=torch.cuda.get_device_name(0),
            bf16=torch.cuda.is_bf16_supported(including_emulation=False),
            flash_attention=not no_flash_attention,
            no_flash_attention=no_flash_attention,
            unused=unused,
            first_unused=first_unused,
            missing_ops=ops.find_missing_ops(on_gpus=True),
            missing_compiler=missing_compiler(),
            lockable_bytes=lockable_bytes(),
        )


def _explain_no_flash_attention() -> str:
    """Return why flash attention 2 does not run on this machine's GPUs; an empty text if it does."""
    for index in range(torch.cuda.device_count()):
        capability = torch.cuda.get_device_capability(index)
        # Flash attention 2 needs Ampere or a later generation.
        if capability < (8, 0):
            version = ".".join(map(str, capability))
            name = torch.cuda.get_device_name(index)
            return f"{name} has compute capability {version}, and flash attention 2 needs 8.0 or later"
    try:
        # Import the two functions that transformers calls, to find out whether the package works.
        from flash_attn import flash_attn_func, flash_attn_varlen_func  # noqa: F401
    except ModuleNotFoundError as error:
        if error.name == "flash_attn":
            return "the flash-attn package is not installed"
        return f"the flash-attn package does not import ({error})"
    # A build for another torch or CUDA raises ImportError, OSError, or errors of its own code.
    except Exception as error:
        return f"the flash-attn package does not import ({error})"
    from transformers.utils import is_flash_attn_2_available

    if not is_flash_attn_2_available():
        return "transformers does not recognise the installed package flash_attn as flash-attn 2.3.3 or later"
    return ""


@dataclass(kw_only=True)
class LaunchDraft:
    """A launch while `resolve` works on it. Each stage of `resolve` writes its decisions into the plan and the draft.

    Attributes:
        environ: the environment of a worker process.
        hardware: the hardware of the machine.
        explicit_precision: ``--mixed_precision`` as typed to the launcher; None without this flag.
        starts: a run follows. Otherwise, code that only the YAML names is not run.
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
        """Whether a launcher started this process, be it the only process or one of several."""
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
    """Compute the launch plan and the config from the environment that the launcher made, the hardware and the recipe's config.

    Args:
        environ: the environment of a worker process.
        hardware: the hardware of the machine.
        config: the recipe's config. It is not changed.
        sources: where each value of the config comes from. They are not changed.
        explicit_precision: ``--mixed_precision`` as typed to the launcher, or None. The environment does not tell
            ``--mixed_precision no`` from no flag.
        starts: a run follows. Otherwise, code that only the YAML names is not run.

    Returns:
        - The plan. Its ``problems`` hold all contradictions; no error is raised.
        - The config. Keys that the user left unset have the values that the YAML or JSON sets, such as accumulation, clipping,
          rate and decay. A frozen base has the dtype in which it is loaded.
        - The sources of the values of this config.
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
    # The order matters: later stages read the decisions of earlier ones, and problems are reported in this order.
    # The model is first, since its name may be the folder of a run.
    _replace_run_by_model(launch)
    _take_tokenizer_of_adapter(launch)
    # Then the strategy, and the devices of its processes.
    _read_strategy_file(launch)
    _choose_device(launch)
    _check_variables(launch)
    _check_gpus(launch)
    # Then the batch and the optimizer.
    _set_accumulation(launch)
    _set_global_batch(launch)
    deepspeed_json.check_micro_batch(plan, draft)
    _check_optimizer(launch)
    _preserve_global_batch_on_resume(launch)
    # Then the precision. DeepSpeed's config is filled in after it, since the config has both the batch and the precision.
    _choose_precision(launch)
    _choose_frozen_dtype(launch)
    _fill_deepspeed_config(launch)
    # Last, whether the strategy and the hardware support the model and its settings.
    _check_model(launch)
    fast.choose(plan, draft, hardware.missing_compiler)
    _check_model_settings(launch)
    # A strategy file may have set values that the config refuses.
    plan.problems += draft.problems()
    return plan, draft.config, draft.sources


def merge_problems(*stages: Sequence[str]) -> list[str]:
    """Return the problems of all stages of a launch, in their order.

    If an earlier stage has a problem with the same key, a problem of a later stage is left out, since it may be a consequence.
    """
    joined: list[str] = []
    for problems in stages:
        # A problem begins with its key and a colon.
        keys = {problem.partition(":")[0] for problem in joined}
        joined += [problem for problem in problems if problem.partition(":")[0] not in keys]
    return joined


def _replace_run_by_model(launch: LaunchDraft) -> None:
    """If ``model_name_or_path`` is the folder of a run or an adapter, replace it by the model, and set ``adapter_path``."""
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
    merge_advice = f"To merge it into its model first: zerobook export {name} --output merged"
    adapter_settings = [key for key in ADAPTER_SETTINGS if draft.sources.is_set(key)]
    # The result of a run is a model, or an adapter that names its model.
    if result.adapter is None:
        if result.model != name:
            draft.set(draft.sources["model_name_or_path"], model_name_or_path=result.model)
            plan.notes.append(f"model_name_or_path: {name} is a run; its model {result.model} is trained further")
    elif not draft.config.trains_adapters:
        plan.problems.append(
            f"model_name_or_path: {result.adapter} is an adapter for {result.model}, and this run trains all weights. "
            f"{merge_advice}; then name that folder. To train the adapter further, take recipes/lora_finetune.py."
        )
    elif adapter_settings:
        plan.problems.append(
            f"model_name_or_path: {result.adapter} is an adapter, which is trained further with its own settings, and "
            f"{', '.join(adapter_settings)} is given too. Drop one of the two. {merge_advice}."
        )
    else:
        draft.set(draft.sources["model_name_or_path"], model_name_or_path=result.model, adapter_path=str(result.adapter))
        if result.revision and not draft.sources.is_set("model_revision"):
            draft.set(f"the adapter in {result.adapter}", model_revision=result.revision)
        plan.notes.append(
            f"model_name_or_path: {result.adapter} is an adapter for {result.model}; it is trained further. {merge_advice}"
        )


def _take_tokenizer_of_adapter(launch: LaunchDraft) -> None:
    """If an adapter is trained further, use the tokenizer in its folder.

    This tokenizer has the chat template of the adapter's training. It may also have tokens that the model's tokenizer lacks,
    for which the adapter holds new rows of the embeddings.
    """
    draft = launch.draft
    path = getattr(draft.config, "adapter_path", None)
    if path is None or draft.config.tokenizer_name is not None:
        return
    if (Path(path).expanduser() / "tokenizer_config.json").exists():
        draft.set(f"the adapter in {path}", tokenizer_name=path)
        launch.plan.notes.append(f"tokenizer_name: {path}, whose adapter was trained with that tokenizer")


def _read_strategy_file(launch: LaunchDraft) -> None:
    """Read the kind of strategy, its settings and its groups of processes from the variables that the launcher set."""
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
    # The processes use the first LOCAL_WORLD_SIZE GPUs. It is no problem if torch cannot use a later GPU.
    elif launch.hardware.unused and int(launch.environ.get("LOCAL_WORLD_SIZE", 1)) > launch.hardware.first_unused:
        plan.problems.append(launch.hardware.unused)
    if launch.is_launched:
        plan.backend = "gloo" if launch.on_cpu else "nccl"
    deepspeed_json.check_device(plan, launch.environ)


def _check_variables(launch: LaunchDraft) -> None:
    """Add problems for variables that are incomplete, or that turn on what the recipes do themselves."""
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
    """Check that each process of this machine has its own GPU, whose index is LOCAL_RANK."""
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
    # Under srun without torchrun, Slurm's variables say how many processes this node has. The check uses them, so that all
    # processes find the same problem. A process that found none would wait for the others.
    if environ.get("SLURM_NTASKS") == str(plan.world_size) and "TORCHELASTIC_RUN_ID" not in environ:
        # The value is 8, or 8(x2) for two nodes of 8 processes each. If nodes have different numbers, it has another form.
        tasks = re.fullmatch(r"(\d+)(\(x\d+\))?", environ.get("SLURM_TASKS_PER_NODE", ""))
        local_processes = max(local_processes, local_rank + 1, int(tasks[1]) if tasks else 1)
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
    """Set the accumulation that the flags, the YAML or the JSON give. If several of them set it, they must agree."""
    plan = launch.plan
    draft = launch.draft
    steps_by_source: dict[str, int] = {}
    launcher_text = launch.environ.get("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "")
    # 1 means that nothing was chosen, since accelerate writes it by default.
    if launcher_text.isdigit() and int(launcher_text) != 1:
        steps_by_source["the Accelerate YAML or launcher"] = int(launcher_text)
    json_steps = (plan.deepspeed_config or {}).get("gradient_accumulation_steps", "auto")
    if isinstance(json_steps, int) and json_steps != 1:
        steps_by_source[str(plan.config_file)] = json_steps
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
    # Processes of a group read the same rows, and count once.
    readers = plan.data_parallel_size
    # Samples of one micro-batch of all processes.
    micro_batch = config.per_device_train_batch_size * readers
    product = config.gradient_accumulation_steps * micro_batch
    if draft.sources.is_set("gradient_accumulation_steps") and product != global_batch:
        plan.problems.append(
            f"global_batch_size: {global_batch}, but {draft.sources['gradient_accumulation_steps']} says "
            f"{config.gradient_accumulation_steps} accumulation steps, and {config.per_device_train_batch_size} x "
            f"{config.gradient_accumulation_steps} x {readers} is {product}. Drop one of the two."
        )
    elif global_batch % micro_batch:
        # Advise the next multiples below and above.
        lower_multiple = global_batch // micro_batch * micro_batch
        multiples = str(micro_batch)
        if lower_multiple > 0:
            multiples = f"{lower_multiple} or {lower_multiple + micro_batch}"
        plan.problems.append(
            f"global_batch_size: {global_batch} is no multiple of {config.per_device_train_batch_size} samples x {readers} "
            f"processes = {micro_batch}. Give {multiples}, or another --per_device_train_batch_size."
        )
    else:
        draft.set(f"global_batch_size={global_batch}", gradient_accumulation_steps=config.accumulation_steps_on(readers))


def _check_optimizer(launch: LaunchDraft) -> None:
    """Add problems if the strategy does not support the optimizer, or if the checkpoint to resume has another optimizer."""
    plan = launch.plan
    config = launch.draft.config
    sources = launch.draft.sources
    # The optimizer may be code that only a YAML names. A check without a run must not run such code.
    try:
        if launch.starts or not names_code_in_yaml(config, sources):
            refusal = explain_refusal(plan.name, plan.kind, plan.offload_optimizer, config.optimizer)
            if refusal:
                plan.problems.append(refusal)
        else:
            plan.notes.append(
                f"optimizer: {sources['optimizer']} names {config.optimizer}, which is not run here. A launch runs it. With "
                f"--optimizer {shlex.quote(config.optimizer)} it is run, and checked, here too"
            )
        difference = find_optimizer_mismatch(config)
        if difference:
            plan.problems.append(f"resume_from_checkpoint: {difference}")
    except ConfigError as error:
        plan.problems.append(str(error))
    except CheckpointError:
        # There is no checkpoint to resume. `_preserve_global_batch_on_resume` reports this.
        pass
    plan.problems += unused_settings(config.optimizer, [key for key in sources if sources.is_set(key)])


def _preserve_global_batch_on_resume(launch: LaunchDraft) -> None:
    """If the number of processes has changed since the checkpoint to resume, divide its global batch anew among them."""
    plan = launch.plan
    # Keep the config as the user set it, before the batch is divided anew. The next resume compares with it.
    plan.asked = launch.draft.config.model_dump()
    try:
        note = keep_global_batch(launch.draft, plan.data_parallel_size)
    except CheckpointError as error:
        plan.problems.append(f"resume_from_checkpoint: {error}")
        return
    if note:
        plan.notes.append(note)


def _choose_precision(launch: LaunchDraft) -> None:
    """Set the precision of the run to the first of `_list_precisions`. Without any, it stays ``no``, which is fp32."""
    plan = launch.plan
    choices = _list_precisions(launch)
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
    # DeepSpeed reads the precision only from its config.
    if plan.deepspeed_config is not None:
        for dtype in ("fp16", "bf16"):
            plan.deepspeed_config.setdefault(dtype, {})["enabled"] = plan.precision == dtype


def _list_precisions(launch: LaunchDraft) -> list[tuple[str, str]]:
    """Return (precision, source) for each source that sets a precision, the strongest source first.

    The order is: the recipe's flag, the launcher's flag, the recipe's YAML, the Accelerate YAML, the DeepSpeed JSON.
    """
    plan = launch.plan
    config = launch.draft.config
    sources = launch.draft.sources
    choices: list[tuple[str, str]] = []
    if config.mixed_precision is not None:
        choices.append((config.mixed_precision, sources["mixed_precision"]))
    yaml_precision = launch.environ.get("ACCELERATE_MIXED_PRECISION", "no").lower()
    if launch.explicit_precision is not None:
        # The launcher's flag overrides the recipe's YAML, but not the recipe's flag.
        position = len(choices) if sources.is_flag("mixed_precision") else 0
        choices.insert(position, (launch.explicit_precision.lower(), "launcher's --mixed_precision"))
    elif yaml_precision != "no":
        choices.append((yaml_precision, "Accelerate YAML"))
    # The JSON chooses a precision with true, and leaves it open with "auto".
    ds = plan.deepspeed_config or {}
    json_dtypes = [dtype for dtype in ("bf16", "fp16") if is_true((ds.get(dtype) or {}).get("enabled"))]
    if len(json_dtypes) > 1:
        plan.problems.append(f"{plan.config_file}: both fp16.enabled and bf16.enabled are true. Keep one.")
    choices += [(dtype, f"{plan.config_file}: {dtype}.enabled") for dtype in json_dtypes]
    return choices


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
    """Fill in DeepSpeed's config, if there is one, and check its keys, the ops that it needs, and the memory that it locks."""
    plan = launch.plan
    hardware = launch.hardware
    if plan.deepspeed_config is None:
        return
    deepspeed_json.fill(plan, launch.draft)
    # A run on the CPU of a machine with GPUs needs the ops for a CPU.
    missing_ops = hardware.missing_ops if plan.device == hardware.device else ops.find_missing_ops(on_gpus=False)
    deepspeed_json.check_ops(plan, missing_ops)
    deepspeed_keys.check_keys(plan)
    deepspeed_json.check_locked_memory(plan, hardware.lockable_bytes)


def _check_model(launch: LaunchDraft) -> None:
    """Add problems if the recipes or the strategy do not support the model, according to its config.json on this machine."""
    plan = launch.plan
    facts = model_facts(launch.draft.config)
    groups.check(plan, launch.draft, facts)
    if facts is not None:
        plan.problems += find_text_problems(facts)
        plan.problems += find_zero3_problems(plan, facts)
        if plan.kind in ("fsdp", "deepspeed"):
            plan.problems += find_missing_layers(launch.environ, facts)


def _check_model_settings(launch: LaunchDraft) -> None:
    """Add problems for settings of the model that the strategy or the hardware does not support."""
    plan = launch.plan
    config = launch.draft.config
    hardware = launch.hardware
    if config.attn_implementation == "flash_attention_2":
        _check_flash_attention(launch)
    # With these settings of adapters, modules are trained as a whole, in fp32.
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
    # Setting -> whether its value needs a compiler.
    needs_compiler = {
        "torch_compile": config.torch_compile,
        "attn_implementation": config.attn_implementation == "flex_attention",
    }
    for key, is_needed in needs_compiler.items():
        if is_needed and hardware.missing_compiler:
            plan.problems.append(f"{key}: it is compiled, and this machine lacks {hardware.missing_compiler}. Or drop {key}.")
    if config.base_format is not None:
        flag = {"nf4": "load_in_4bit", "int8": "load_in_8bit"}[config.base_format]
        refusal = explain_refused_base(plan, f"{flag}: the base is quantised to {config.base_format}", config.base_format)
        if refusal:
            plan.problems.append(refusal)
    if plan.precision == "bf16" and not launch.on_cpu and not hardware.bf16:
        plan.problems.append(f"mixed_precision: bf16 is not supported by {hardware.gpu_name}. Use fp16.")


def _check_flash_attention(launch: LaunchDraft) -> None:
    """Add problems if flash attention 2 does not run on this hardware, or with the precision of the run."""
    plan = launch.plan
    config = launch.draft.config
    if launch.on_cpu or not launch.hardware.flash_attention:
        reason = "there is no GPU here" if launch.on_cpu else launch.hardware.no_flash_attention
        plan.problems.append(
            f"attn_implementation: flash_attention_2 was asked for, but {reason}. Use auto, sdpa or eager, or "
            "install requirements-gpu.txt on a machine with a GPU of compute capability 8.0 or later."
        )
    # With dtype auto, the dtype of a frozen base is not known before the model is loaded.
    has_unknown_dtype = config.trains_adapters and config.dtype == "auto"
    if not has_unknown_dtype and not is_attention_in_half(config, plan.precision, config.dtype):
        plan.problems.append(explain_no_fp32_flash_attention(plan.precision, config.dtype))


def is_attention_in_half(config: RecipeConfig, precision: str, dtype: str) -> bool:
    """Return whether the model's attention computes in fp16 or bf16.

    Without mixed precision, it computes in the dtype of the weights. Trained weights are always converted to fp32, so only
    frozen weights may be in half precision.

    Args:
        precision: the precision of the run: ``no``, ``bf16`` or ``fp16``.
        dtype: torch's name for the dtype in which the weights are loaded.
    """
    return precision != "no" or (config.trains_adapters and dtype in ("bfloat16", "float16"))


def explain_no_fp32_flash_attention(precision: str, dtype: str) -> str:
    """Return the error message for flash attention 2 in a run that computes in fp32."""
    return (
        "attn_implementation: flash_attention_2 was asked for; it takes fp16 and bf16 only, and this run computes in fp32 "
        f"(mixed_precision {precision}, dtype {dtype}). Pass --mixed_precision bf16, or use auto, sdpa or eager."
    )
