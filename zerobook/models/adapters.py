"""Adapters: the flags, new and continued adapters, and the folder that they are saved in."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
from pydantic import Field, field_validator
from torch import nn

from zerobook.config import RecipeConfig
from zerobook.errors import ConfigError
from zerobook.models.unused_modules import unused_modules
from zerobook.models.vocabulary import are_tied, embedding_names, embedding_rows, grow_embeddings
from zerobook.utils.reading import read_json

if TYPE_CHECKING:
    from peft import LoraConfig, LoraModel, PeftConfig, PeftModel
    from transformers import PreTrainedModel

Method = Literal["lora", "rslora", "dora", "pissa", "ia3"]
# Name of the trained adapter in the model.
ADAPTER = "default"
# Name of the frozen copy of the adapter's initial weights under PiSSA.
INITIAL = "initial"
# Methods of peft that are not available, with the reason.
REFUSED = {
    "vera": "its random projections are buffers, which peft {peft} neither saves nor lets FSDP2 shard",
    "olora": "it changes the base weights, so the saved adapter would not fit the base. pissa is converted when it is saved",
    "loftq": "it changes the base weights, so the saved adapter would not fit the base. pissa is converted when it is saved",
}
# Subspace iterations of the randomised SVD, as in the paper's fast variant (Meng et al., 2024).
PISSA_ITERATIONS = 16

# Default rate and warm-up of LoRA: those of QLoRA for models up to 13B, from Dettmers et al., 2023 (arXiv 2305.14314,
# appendix B) and its code.
LORA_RATE = 2e-4
LORA_WARMUP = 0.03
# Default rate of IA3: Liu et al., 2022 (arXiv 2205.05638).
IA3_RATE = 3e-3

# Keys of a recipe whose values a saved adapter has in its own config.
LORA_KEYS = ("lora_r", "lora_alpha", "lora_dropout", "lora_target_modules", "modules_to_save")


class AdapterConfig(RecipeConfig):
    """The keys of a recipe that can train adapters."""

    adapter: Method | None = Field(
        None, description="train adapters beside the frozen weights: lora, rslora, dora, pissa or ia3; unset trains all weights"
    )
    adapter_path: str | None = Field(None, description="folder of a saved adapter, which is trained further")
    lora_r: int = Field(16, ge=1, description="rank of the adapters")
    lora_alpha: float = Field(
        32, gt=0, description="scale of the adapters; their output is multiplied by alpha / r (rslora: alpha / sqrt(r))"
    )
    lora_dropout: float = Field(0.0, ge=0, lt=1, description="dropout before the adapters")
    lora_target_modules: list[str] = Field(
        ["all-linear"], description="modules that get adapters, or a regular expression for their whole names"
    )

    modules_to_save: list[str] = Field(
        [], description="modules that are trained in full, in addition to the adapters, such as embed_tokens lm_head"
    )

    @property
    def trains_adapters(self) -> bool:
        return self.adapter is not None or self.adapter_path is not None

    def dependent_defaults(self) -> dict[str, Any]:
        if not self.trains_adapters:
            return {}
        learning_rate = IA3_RATE if self.adapter == "ia3" else LORA_RATE
        # A number of warm-up steps takes the place of the ratio.
        warmup_ratio = 0.0 if "num_warmup_steps" in self.model_fields_set else LORA_WARMUP
        return {"learning_rate": learning_rate, "warmup_ratio": warmup_ratio}

    @field_validator("adapter", mode="before")
    @classmethod
    def _refuse_unavailable(cls, value: Any) -> Any:
        if str(value) in REFUSED:
            from importlib.metadata import version

            raise ValueError(f"{value} is not available: {REFUSED[str(value)].format(peft=version('peft'))}")
        return value

    def problems(self) -> list[str]:
        problems = super().problems()
        try:
            # Names of modules are no pattern, and need no check.
            re.compile(find_target_pattern(self.lora_target_modules) or "")
        except re.error as error:
            problems.append(f"lora_target_modules: {self.lora_target_modules[0]!r} is no regular expression: {error}.")
        problems += self._conflicting_settings()
        if self.adapter_path is not None:
            problems += _find_adapter_problems(Path(self.adapter_path).expanduser())
        if self.adapter == "pissa" and self.base_format is not None:
            problems.append(
                f"adapter: pissa decomposes the base weights, which are packed in {self.base_format}. Use --adapter lora, or "
                "drop load_in_4bit and load_in_8bit."
            )
        return problems

    def _conflicting_settings(self) -> list[str]:
        """Return a problem for each setting that was given and has no effect on the kind of adapter that this run trains."""
        keys = [key for key in LORA_KEYS if key in self.model_fields_set]
        # new_tokens is also a setting of runs that train all weights, and has an effect there.
        if self.trains_adapters and "new_tokens" in self.model_fields_set:
            keys.append("new_tokens")
        # A saved adapter has all its settings in its own config.
        if self.adapter_path is not None:
            if "adapter" in self.model_fields_set:
                keys.append("adapter")
            return [
                f"{key}: it is {getattr(self, key)!r}, and adapter_path={self.adapter_path} has its own. Drop one of the two."
                for key in keys
            ]
        if self.adapter in (None, "ia3"):
            return [
                f"{key}: it is a setting of LoRA, which adapter={self.adapter} does not read. Drop it, or use --adapter lora."
                for key in keys
            ]
        return []


def find_target_pattern(targets: list[str]) -> str | None:
    """Return the single string that peft takes for ``targets``: a regular expression for complete names, or ``all-linear``.

    Returns:
        None if ``targets`` are names of modules, which peft takes as a list.

    >>> find_target_pattern([r".*_proj"]), find_target_pattern(["q_proj", "v_proj"]), find_target_pattern(["all-linear"])
    ('.*_proj', None, 'all-linear')
    """
    if targets == ["all-linear"] or (len(targets) == 1 and re.search(r"[\\*+?|()\[\]^$]", targets[0])):
        return targets[0]
    return None


def adapt_model(
    model: PreTrainedModel, values: Mapping[str, Any], *, revision: str, recorded: Mapping[str, Any] | None = None
) -> PeftModel:
    """Freeze ``model`` and add the adapters that a run trains: new ones, or those of a saved adapter.

    Args:
        values: the run's config.
        revision: the model's revision on the hub. If the model's commit is unknown, the saved adapter's config names this.
        recorded: the config of a saved adapter that the run continued, from a checkpoint. The adapter gets no weights here, and
            ``adapter_path`` is not read.

    Raises:
        ConfigError: the adapters do not fit the model.
    """
    if recorded:
        from peft import get_peft_config

        return _insert_adapter(model, get_peft_config(dict(recorded)), revision)
    if values.get("adapter_path"):
        return continue_adapter(model, Path(values["adapter_path"]).expanduser(), revision=revision)
    return add_adapter(
        model,
        values.get("adapter", "lora"),
        rank=values["lora_r"],
        alpha=values["lora_alpha"],
        dropout=values["lora_dropout"],
        targets=values["lora_target_modules"],
        seed=values["seed"],
        revision=revision,
        modules_to_save=values.get("modules_to_save", ()),
        trains_embeddings=bool(values.get("new_tokens")),
    )


def add_adapter(
    model: PreTrainedModel,
    method: Method,
    *,
    rank: int,
    alpha: float,
    dropout: float,
    targets: list[str],
    seed: int,
    revision: str = "main",
    modules_to_save: Sequence[str] = (),
    trains_embeddings: bool = False,
) -> PeftModel:
    """Freeze ``model`` and add new adapters to its ``targets``.

    Args:
        rank: inner size of the adapters.
        alpha: the update is weighed by ``alpha / rank``; by ``alpha / sqrt(rank)`` with rsLoRA.
        dropout: probability of dropout before the adapters.
        targets: module names, a regular expression for complete names, or ``["all-linear"]`` for every linear layer but the
            output head. Modules that text input does not use, and routers that are linear layers, get none.
        seed: decides the adapters' initial weights, which are equal on every rank and under every strategy.
        modules_to_save: names of modules that are trained in full.
        trains_embeddings: also train the input and output embeddings in full.

    IA3 ignores ``rank``, ``alpha``, ``dropout``, ``targets`` and the modules that are trained in full.

    Raises:
        ConfigError: a target or module that the model does not have, an architecture for which peft has no targets of IA3, or
            embeddings that cannot be trained in full.
    """
    from accelerate.utils import set_seed
    from peft import IA3Config, LoraConfig

    # peft draws the initial weights from the global random state. They have to be equal on all ranks.
    set_seed(seed)
    task = "SEQ_2_SEQ_LM" if model.config.is_encoder_decoder else "CAUSAL_LM"
    excluded = _excluded_modules_pattern(model)
    if method == "ia3":
        return _insert_adapter(model, IA3Config(task_type=task, exclude_modules=excluded), revision)

    full_modules, ties_copies = _choose_full_modules(model, modules_to_save, trains_embeddings=trains_embeddings)
    config = LoraConfig(
        r=rank,
        lora_alpha=cast("int", alpha),
        lora_dropout=dropout,
        task_type=task,
        use_rslora=method == "rslora",
        use_dora=method == "dora",
        target_modules=find_target_pattern(targets) or targets,
        exclude_modules=excluded,
        modules_to_save=full_modules or None,
        ensure_weight_tying=ties_copies,
    )
    adapted_model = _insert_adapter(model, config, revision)
    _check_target_names(adapted_model, config, targets)
    # peft's own PiSSA (init_lora_weights="pissa") changes the base weights, so it is not used.
    if method == "pissa":
        _start_from_principal_components(adapted_model, config)
    return adapted_model


# Raise `ConfigError` for a name in ``targets`` that no module has. peft refuses ``targets`` only if none of them has a module.
def _check_target_names(adapted_model: PeftModel, config: LoraConfig, targets: list[str]) -> None:
    paths = [path for path, _ in adapted_model.named_modules()]
    # peft takes names of experts out of `target_modules`, since experts are weights and not modules.
    for name in set(targets).intersection(config.target_modules or ()):
        if not any(path.endswith(f".{name}") for path in paths):
            raise ConfigError(
                f"lora_target_modules: no module of this model is called {name}. Correct the name, or leave it out. all-linear "
                "and a regular expression stand alone."
            )


def _choose_full_modules(
    model: PreTrainedModel, modules_to_save: Sequence[str], *, trains_embeddings: bool
) -> tuple[list[str], bool]:
    """Return (names of the modules that are trained in full, whether input and output embeddings share one trained copy).

    peft does not train these modules themselves, but a copy of each.
    """
    embeddings = embedding_names(model)
    if trains_embeddings:
        modules_to_save = [*modules_to_save, *embeddings]
    full_modules = _resolve_modules(model, modules_to_save)
    # Tied embeddings are one weight, so their copies have to be one weight, too.
    ties_copies = are_tied(model) and embeddings[0] in full_modules
    if ties_copies and model.config.is_encoder_decoder:
        setting = "new_tokens" if trains_embeddings else "modules_to_save"
        raise ConfigError(
            f"{setting}: encoder, decoder and output of a {model.config.model_type} share their embeddings, and peft would "
            "train a copy that none of them reads. Train all weights: drop --adapter."
        )
    return full_modules, ties_copies


def continue_adapter(model: PreTrainedModel, folder: Path, *, revision: str = "main") -> PeftModel:
    """Freeze ``model`` and add a saved adapter, to be trained further.

    The model's ``base_facts`` get the adapter's config, which checkpoints record.

    Raises:
        ConfigError: the adapter was made for another model.
    """
    from peft import PeftConfig, set_peft_model_state_dict
    from peft.utils import load_peft_weights

    config = PeftConfig.from_pretrained(str(folder))
    # peft writes inference_mode into every saved config. With this setting, it would freeze the adapter's weights.
    config.inference_mode = False
    # A checkpoint records the config as JSON, which has no sets.
    adapter_facts = {}
    for key, value in config.to_dict().items():
        adapter_facts[key] = sorted(value) if isinstance(value, set) else value

    weights = load_peft_weights(str(folder), device="cpu")
    # A saved adapter may hold embeddings with more rows than the model's. peft makes a copy of the model's embeddings for them,
    # so the model's are grown first.
    base_rows = embedding_rows(model)
    grow_for_adapter(model, folder)
    # peft also saves embeddings that are not trained, if they were resized. Zerobook saves only trained weights.
    if embedding_rows(model) > base_rows and not config.modules_to_save:
        raise ConfigError(
            f"adapter_path: the embeddings in {folder} have more rows than those of its base, and are not trained "
            "(modules_to_save), so this run would not save them. Merge the adapter into its base with peft first."
        )
    adapted_model = _insert_adapter(model, config, revision)
    try:
        result: Any = set_peft_model_state_dict(adapted_model, weights)
    except RuntimeError as error:
        raise ConfigError(f"adapter_path: {folder} does not fit this model: {error}") from error
    unmatched = [*result.unexpected_keys]
    # An adapter holds no weights of the base, so only missing weights of the adapter count.
    unmatched += [key for key in result.missing_keys if f".{ADAPTER}" in key]
    if unmatched:
        raise ConfigError(
            f"adapter_path: {folder} was made for another model: {unmatched[0]} (and {len(unmatched) - 1} more) is in one and "
            "not in the other. Give the model that its adapter_config.json names."
        )
    # Only models that `zerobook.models.load` has loaded have this record.
    base_facts = getattr(model, "base_facts", None)
    if base_facts is not None:
        base_facts["adapter"] = adapter_facts
    return adapted_model


def grow_for_adapter(model: PreTrainedModel, folder: Path) -> None:
    """Give the embeddings of ``model`` as many rows as the saved adapter's have. Do nothing if it holds no embeddings."""
    from safetensors import safe_open

    file = folder / "adapter_model.safetensors"
    if not file.exists():
        return
    suffixes = tuple(f".{name}.weight" for name in embedding_names(model))
    with safe_open(file, "pt") as weights:
        rows = 0
        for name in weights.keys():  # noqa: SIM118
            if name.endswith(suffixes):
                # A slice knows its shape without reading the weight.
                rows = max(rows, weights.get_slice(name).get_shape()[0])
        grow_embeddings(model, rows)


def merge_adapter(model: PeftModel) -> PreTrainedModel:
    """Add the adapter's product to the model's weights, and return the model.

    An adapter changes the output of one layer. If this layer shares its weight with another, as tied embeddings do, it first
    gets a copy, so that the other layer does not change. peft then writes into the config that the embeddings are not tied.
    """
    uses = Counter(id(weight) for _, weight in model.named_parameters(remove_duplicate=False))
    for module in model.modules():
        # peft keeps the original layer as `base_layer` of the module that adds the adapter. Other modules have none, and the id
        # of None counts 0.
        layer: Any = getattr(module, "base_layer", None)
        if uses[id(getattr(layer, "weight", None))] > 1:
            layer.weight = nn.Parameter(layer.weight.detach().clone())
    return cast("PreTrainedModel", model.merge_and_unload())


def save_adapter(model: PeftModel, folder: Path, weights: dict[str, torch.Tensor]) -> None:
    """Write an adapter that fits the base as it was loaded. One that was made by PiSSA becomes a plain LoRA adapter.

    Args:
        weights: name -> unsharded weight, including the buffers of `INITIAL`.
    """
    is_pissa = INITIAL in model.peft_config
    saved_weights = _subtract_initial_product(weights) if is_pissa else dict(weights)
    # peft looks up tied weights under each of their names, and ``weights`` has them under the first.
    first_names: dict[nn.Parameter, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        first_name = first_names.setdefault(parameter, name)
        if first_name in saved_weights:
            saved_weights[name] = saved_weights[first_name]
    # Embeddings that the run has changed are among the modules trained in full, which are saved anyway.
    model.save_pretrained(str(folder), state_dict=saved_weights, selected_adapters=[ADAPTER], save_embedding_layers=False)
    # peft writes a card with blanks for a person to fill in. `zerobook.models.card` replaces it.
    (folder / "README.md").unlink(missing_ok=True)
    if is_pissa:
        file = folder / "adapter_config.json"
        facts = read_json(file)
        # The rank has doubled. So does alpha, since alpha / r scales the update.
        facts |= {"r": 2 * facts["r"], "lora_alpha": 2 * facts["lora_alpha"]}
        file.write_text(json.dumps(facts, indent=2) + "\n")


# Return a PiSSA adapter's weights as those of a plain LoRA adapter of twice the rank (Meng et al., 2024, appendix C). PiSSA's
# update is ``B A - B0 A0``, where ``A0`` and ``B0`` are the initial weights. It equals ``[B, -B0] [A; A0]``.
def _subtract_initial_product(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    joined_weights = dict(weights)
    for name, weight in weights.items():
        if f".{ADAPTER}." in name:
            # The frozen adapter `INITIAL` holds A0 and -B0.
            initial = weights[name.replace(f".{ADAPTER}.", f".{INITIAL}.")]
            rank_dimension = 0 if ".lora_A." in name else 1
            joined_weights[name] = torch.cat([weight, initial.to(weight)], rank_dimension)
    return joined_weights


def _resolve_modules(model: PreTrainedModel, names: Sequence[str]) -> list[str]:
    """Return the names of the modules to train in full, each once.

    If the embeddings are tied, the name of the input embeddings stands for both.

    Raises:
        ConfigError: the model has no such module, or its weights are quantised.
    """
    modules = dict(model.named_modules())
    if are_tied(model):
        # Both embeddings are one weight, so a copy of one is enough. peft lets the other use it, too.
        paths = {id(module): path for path, module in modules.items()}
        output_name = paths[id(model.get_output_embeddings())].rsplit(".", 1)[-1]
        renamed = {output_name: embedding_names(model)[0]}
        names = [renamed.get(name, name) for name in names]
    unique_names = list(dict.fromkeys(names))
    for name in unique_names:
        # A name stands for every module whose path ends with it. The dots make it match complete parts of a path.
        matches = [path for path in modules if f".{path}".endswith(f".{name}")]
        if not matches:
            # The message lists the modules that have weights themselves, and can be trained.
            known_names = set()
            for path, module in modules.items():
                if list(module.parameters(recurse=False)):
                    known_names.add(path.rsplit(".", 1)[-1])
            raise ConfigError(
                f"modules_to_save: the model has no module {name}. Its modules: {', '.join(sorted(known_names))}."
            )
        for path in matches:
            for weight in modules[path].parameters():
                # 4-bit weights may be packed in a float dtype. Their `quant_state` shows that they are packed.
                if not weight.is_floating_point() or hasattr(weight, "quant_state"):
                    raise ConfigError(f"modules_to_save: {path} is quantised, and packed numbers are not trained. Drop {name}.")
    return unique_names


def _excluded_modules_pattern(model: PreTrainedModel) -> str | None:
    """Return a regular expression for the paths of modules that get no adapters; None if every module may get one."""
    paths = unused_modules(model)
    # peft adds an adapter's product to a layer's output. These linear layers return something else than their own product.
    for path, module in model.named_modules():
        if isinstance(module, nn.Linear) and type(module).__name__.endswith(("Router", "GroupedLinear")):
            paths.append(path)
    if not paths:
        return None
    alternatives = "|".join(map(re.escape, paths))
    return rf"({alternatives})(\..*)?"


# Freeze the model and insert the adapter that ``config`` describes. Raises `ConfigError` if its targets do not fit the model.
def _insert_adapter(model: PreTrainedModel, config: PeftConfig, revision: str) -> PeftModel:
    from peft import get_peft_model

    # The adapter's config names this revision of its base. A branch may move before somebody loads the adapter, so the commit
    # is better, if it is known.
    revision = getattr(model, "base_commit", None) or revision
    try:
        return cast("PeftModel", get_peft_model(model, config, adapter_name=ADAPTER, revision=revision))
    except ValueError as error:
        if config.peft_type == "IA3":
            raise ConfigError(
                f"adapter: peft does not know which modules of a {model.config.model_type} ia3 scales ({error}). Use lora."
            ) from error
        linear_layers = {path.rsplit(".", 1)[-1] for path, module in model.named_modules() if isinstance(module, nn.Linear)}
        raise ConfigError(
            f"lora_target_modules: {getattr(config, 'target_modules', None)} does not fit this model ({error}). Its linear "
            f"layers: {', '.join(sorted(linear_layers))}."
        ) from error


def _start_from_principal_components(model: PeftModel, config: PeftConfig) -> None:
    """Initialise LoRA with the largest singular values of the base weights, and keep a frozen copy of these initial weights.

    PiSSA subtracts the initial product from the base weights. Here the frozen copy, a second adapter, subtracts it in each
    forward pass. So the base stays as it was loaded, and sharded weights are only read. The copy is in buffers, which
    checkpoints hold.
    """
    import copy

    from peft.tuners.lora import Linear, LoraLayer
    from peft.utils.integrations import gather_params_ctx
    from peft.utils.other import transpose

    # The copy computes the initial product only, without dropout and without modules that are trained in full.
    frozen = copy.deepcopy(config)
    frozen.lora_dropout = 0.0  # type: ignore[attr-defined]  # a LoraConfig
    frozen.modules_to_save = None  # type: ignore[attr-defined]
    model.add_adapter(INITIAL, frozen)
    for name, module in model.named_modules():
        if not isinstance(module, LoraLayer):
            continue
        if not isinstance(module, Linear):
            raise ConfigError(
                f"lora_target_modules: {name} is a {type(module).__name__}, and pissa is for linear layers in fp32 or half "
                "precision. Use --adapter lora."
            )
        weight = cast("nn.Parameter", module.get_base_layer().weight)
        # Under ZeRO-3, gather the weight. No rank changes it.
        with torch.no_grad(), gather_params_ctx([weight], modifier_rank=None):
            factor_a, factor_b = _factorise(transpose(weight.float(), module.fan_in_fan_out), module.r[ADAPTER])
        # peft multiplies the product of A and B by the scaling, so each is divided by its square root.
        scale = module.scaling[ADAPTER] ** 0.5
        # The frozen copy has A and minus B: the two products add up to zero, so the model begins as the base.
        for layers, factor, sign in ((module.lora_A, factor_a, 1), (module.lora_B, factor_b, -1)):
            trained = layers[ADAPTER]
            initial = layers[INITIAL]
            initial_weight = (factor / scale).to(trained.weight).contiguous()
            trained.weight.data = initial_weight
            # The copy's parameter becomes a buffer, which no optimizer trains.
            del initial.weight
            initial.register_buffer("weight", sign * initial_weight)
    # The forward pass adds the products of both.
    cast("LoraModel", model.base_model).set_adapter([ADAPTER, INITIAL])


def _factorise(weight: torch.Tensor, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (A [rank, inputs], B [outputs, rank]), such that B A is the best approximation of ``weight`` with that rank."""
    # Under FSDP2, the ranks other than 0 have zeros for weights, and get the adapters of rank 0. The planner's weights have no
    # values.
    if weight.is_meta or not weight.any():
        return weight.new_zeros(rank, weight.shape[1]), weight.new_zeros(weight.shape[0], rank)
    u, s, v = torch.svd_lowrank(weight, rank, niter=PISSA_ITERATIONS)
    return s.sqrt()[:, None] * v.T, u * s.sqrt()


def _find_adapter_problems(folder: Path) -> list[str]:
    """Return why the adapter in ``folder`` cannot be trained further; an empty list if it can."""
    file = folder / "adapter_config.json"
    if not file.exists():
        return [f"adapter_path: there is no {file}. Give the folder of a saved adapter, such as outputs/run/adapter."]
    try:
        facts = read_json(file)
        kind = facts["peft_type"]
        initialisation = facts.get("init_lora_weights")
    except (OSError, ValueError, KeyError, AttributeError) as error:
        return [f"adapter_path: {file} is not an adapter's config: {error!r}."]
    if kind not in ("LORA", "IA3"):
        return [f"adapter_path: {folder} holds {kind}; LORA and IA3 are trained further."]
    # These methods have changed the base weights.
    if isinstance(initialisation, str) and initialisation.lower().startswith(("pissa", "olora", "loftq", "corda", "lora_ga")):
        return [
            f"adapter_path: {folder} was initialised with {initialisation}, which changed its base. Convert it first: peft's "
            "save_pretrained(..., path_initial_model_for_weight_conversion=...)."
        ]
    return []
