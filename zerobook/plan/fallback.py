"""A plan by formulas alone, for a model whose class cannot be built: transformers does not know the class, or the class comes
with code that was not allowed to run.

The formulas cover decoders: layers of attention and one MLP, an embedding and an output head. The rows have the same form
as counted and traced rows, and are marked as computed by formula. The libraries hold more than the formulas include:
buckets, copies, padding.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from zerobook.config import ConfigSources
from zerobook.errors import ConfigError
from zerobook.plan import formulas
from zerobook.plan.hardware import Cluster
from zerobook.plan.job import NoClass
from zerobook.plan.literature import flows, paper
from zerobook.plan.memory import Memory, at_load
from zerobook.plan.roofline import time
from zerobook.plan.rows import Row, Subject, checkpoints, judge, launch_plan, rank, unplanned
from zerobook.plan.sharding import spread
from zerobook.plan.state_bytes import Weight, saved_numbers, state_ratio
from zerobook.training.recipe import BatchShape, Recipe

KEYS = {
    "width": ("hidden_size", "n_embd", "d_model", "dim"),
    "layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    "heads": ("num_attention_heads", "n_head", "n_heads", "num_heads"),
    "vocabulary": ("vocab_size",),
}
"""Numbers that a decoder's formulas need -> the names of these numbers in configs."""
OPTIONAL = {
    "inner": ("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size", "d_ff"),
    "shared": ("num_key_value_heads", "num_kv_heads", "n_head_kv", "n_kv_heads"),
    "head": ("head_dim",),
}
EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
GATED = ("silu", "swish", "glu")
"""Activations, or endings of their names, whose MLPs have a third matrix."""


@dataclass(frozen=True)
class Decoder:
    """Dimensions of a decoder. ``inner`` is the width of the MLP, ``head`` the width of a head, ``shared`` the number of
    key and value heads. ``gated`` means that the MLP has three matrices, ``tied`` that the output head is the embedding."""

    width: int
    layers: int
    heads: int
    vocabulary: int
    inner: int
    head: int
    shared: int
    gated: bool
    tied: bool

    @classmethod
    def of(cls, name: str, facts: Mapping[str, Any]) -> Decoder:
        """Read a decoder's dimensions from the keys of a config.json. A missing key of `OPTIONAL` gets GPT-2's value: an MLP 4
        H wide, and a key and value head for every query head. The MLP is assumed to be gated where its activation is gated, or
        where no activation is named and the MLP is not 4 H wide.

        Raises:
            ConfigError: lists every key that is missing or not a number, and everything that the formulas do not cover.
        """
        facts = {**facts, **(facts.get("text_config") or {})}
        problems = []
        if facts.get("is_encoder_decoder"):
            problems.append(f"{name}: is_encoder_decoder: true, and the formulas know decoders alone.")
        for part in (facts, *(value for value in facts.values() if isinstance(value, Mapping))):  # DBRX: one level deeper
            for key in EXPERTS:
                if isinstance(part.get(key), int) and part[key] > 1:
                    problems.append(f"{name}: {key}: {part[key]}, and the formulas know layers of one MLP each.")
        found: dict[str, int] = {}
        for what, keys in (KEYS | OPTIONAL).items():
            named = next((key for key in keys if facts.get(key) is not None), None)
            if named is None:
                if what in KEYS:
                    problems.append(f"{name}: {' / '.join(keys)}: the config has none of them, and the formulas need it.")
            elif type(facts[named]) is not int or facts[named] < 1:
                problems.append(f"{name}: {named}: {facts[named]!r} is no number that a model can have; 1 or more is.")
            else:
                found[what] = facts[named]
        if problems:
            problems.append(f"{name}: count its parameters, and give zerobook plan --formulas --parameters 7B, say.")
            raise ConfigError(problems)
        width, heads = found["width"], found["heads"]
        inner = found.get("inner", 4 * width)
        act = next((str(facts[key]).lower() for key in ("hidden_act", "activation_function") if facts.get(key)), "")
        gated = act.endswith(GATED) if act else inner != 4 * width
        return cls(
            width, found["layers"], heads, found["vocabulary"], inner, found.get("head", width // heads),
            found.get("shared", heads), gated, tied=bool(facts.get("tie_word_embeddings", True)),
        )  # fmt: skip

    @property
    def layer(self) -> int:
        """Parameters of a layer's matrices, without norms and biases, which are only thousandths of them."""
        attention = 2 * self.width * self.heads * self.head + 2 * self.width * self.shared * self.head
        return attention + (3 if self.gated else 2) * self.width * self.inner

    @property
    def embedding(self) -> int:
        return self.vocabulary * self.width

    @property
    def largest(self) -> int:
        """Parameters of the largest matrix."""
        return max(self.embedding, self.width * self.inner)

    @property
    def parameters(self) -> int:
        return self.layers * self.layer + self.embedding * (1 if self.tied else 2)

    @property
    def formula(self) -> str:
        """Formula of ``parameters``, with its numbers."""
        plain = self.heads * self.head == self.width == self.shared * self.head and self.inner == 4 * self.width
        if plain and not self.gated:
            layers, where = "12 L H^2", ""
        else:
            layers = f"L (2 H A + 2 H K + {3 if self.gated else 2} H F)"
            where = f", A = {self.heads * self.head}, K = {self.shared * self.head}, F = {self.inner}"
        return (
            f"{layers} + {'' if self.tied else '2 '}V H = {self.parameters:,}; L = {self.layers}, H = {self.width}, "
            f"V = {self.vocabulary}{where}"
        )


def fall_back(
    recipe: Recipe[Any], sources: ConfigSources, error: NoClass, files: Sequence[Path], cluster: Cluster
) -> tuple[Subject, list[Row]]:
    """Return the model and a row computed by formula for every strategy file, the best row first.

    Args:
        error: the reason why the class cannot be built, with the values of the model's config.

    Raises:
        ConfigError: the config lacks a number, or the formulas do not cover what the recipe trains.
    """
    config = recipe.config
    if config.trains_adapters or recipe.encoder_decoder:
        what = "adapters" if config.trains_adapters else "encoder-decoders"
        raise ConfigError(
            [*error.problems, f"{error.name}: without its class there are formulas, which do not know {what}. "
             "Plan recipes/causal_lm.py with it, or take a model whose class is known."]
        )  # fmt: skip
    if (asked := config.activation_checkpointing) not in ("none", "full"):
        raise ConfigError(
            [*error.problems, f"activation_checkpointing: {asked}, and the formulas know none and full. Plan one of them, or a "
             "model whose class is known."]
        )  # fmt: skip
    try:
        decoder = Decoder.of(error.name, error.facts)
    except ConfigError as refused:  # the user can fix why the class failed
        raise ConfigError([*error.problems, *refused.problems]) from refused
    shape = BatchShape(config.per_device_train_batch_size, config.row_length, 0, padded=False)
    subject = Subject(
        name=error.name, parameters=decoder.parameters, trained=decoder.parameters, shape=shape,
        accumulation=config.gradient_accumulation_steps, by_formula=error.why,
    )  # fmt: skip
    return subject, rank([_row(file, recipe, sources, decoder, shape, cluster) for file in files])


def _row(file: Path, recipe: Recipe[Any], sources: ConfigSources, decoder: Decoder, shape: BatchShape, cluster: Cluster) -> Row:
    config = recipe.config
    try:
        plan = launch_plan(file, cluster, config, sources)
    except ConfigError as error:
        return Row(file=file.stem, name=file.stem, by_formula=True, problems=error.problems)
    if plan.problems:
        return Row(file=file.stem, name=plan.name, by_formula=True, problems=plan.problems)
    if why := unplanned(plan):
        return Row(file=file.stem, name=plan.name, by_formula=True, untraced=True, problems=[why])
    spreads = spread(plan, SimpleNamespace(hidden_size=decoder.width), min(cluster.gpus, plan.world_size))
    matrix = Weight("weight", (decoder.width, decoder.inner), 4, trained=True)  # most parameters are in matrices of this shape
    states_each = state_ratio([[matrix]], spreads)
    literature = paper(decoder.parameters, decoder.parameters, spreads, cluster.nodes, states=states_each)
    rows, length, checkpointing = shape.rows, shape.source, config.activation_checkpointing == "full"
    fused, element = config.attn_implementation != "eager", spreads.compute
    kept = formulas.activations(
        decoder.layers, rows, length, decoder.width, decoder.heads, element=element, fused=fused, checkpointing=checkpointing
    )
    logits = formulas.logits(rows, length, decoder.vocabulary, element=element)
    largest = max(decoder.layer, decoder.embedding)
    gathered = 4 * largest if spreads.stage == 3 else 0  # like DeepSpeed's estimator, formulas.deepspeed_zero3
    flops = formulas.flops(decoder.parameters, rows * length, checkpointing=checkpointing)
    layer, more = divmod(decoder.parameters, decoder.layers)
    sizes = [layer + (at < more) for at in range(decoder.layers)]
    everything = [[Weight(f"{at}.weight", (size,), 4, trained=True, unit=f"{at}") for at, size in enumerate(sizes)]]
    states, lying = literature.states, literature.lying
    device = {
        "parameters": states.parameters if lying["parameters"] == "none" else 0,
        "gradients": states.gradients if lying["gradients"] == "none" else 0,
        "optimizer": states.optimizer if lying["optimizer"] == "none" else 0,
        "activations": kept + logits,
        "buffers": gathered,
        "other": cluster.context,
    }
    loaded = 4 * decoder.parameters  # the recipes train fp32 weights, whatever dtype they are loaded in
    made = Row(
        file=file.stem,
        name=plan.name,
        spread=spreads,
        memory=Memory(
            device={part: int(amount) for part, amount in device.items()},
            when="all at once",
            host_at_load=at_load(loaded, 4 * decoder.largest, spreads, spreads.node),
            host=int(literature.held("cpu") * spreads.node),
            disk=int(literature.held("nvme") * spreads.node),
        ),
        states=literature.held("none"),
        paper=literature,
        sent=literature.sent,
        between=literature.between,
        **checkpoints(round(decoder.parameters / matrix.numel * saved_numbers([[matrix]], spreads)), config),
        time=time(
            flops, flows(decoder.parameters, decoder.parameters, spreads), everything, spreads, cluster,
            accumulation=config.accumulation_on(plan.data_parallel_size), states=states_each,
        ),
        by_formula=True,
        formula={
            "parameters": decoder.formula,
            "activations": _activations(decoder, shape, element=element, fused=fused, checkpointing=checkpointing),
            "logits": f"{rows} x {length} x {decoder.vocabulary} x ({element} + 3 x 4) bytes",
            "gathered": f"4 x {largest:,} bytes" if gathered else "nothing",
            "operations": f"{8 if checkpointing else 6} P x {rows} x {length} a micro-batch",
        },
        tokens_per_step=rows * length * config.accumulation_on(plan.data_parallel_size) * spreads.ranks,
    )  # fmt: skip
    judge(made, recipe, cluster)
    return made


def _activations(decoder: Decoder, shape: BatchShape, *, element: int, fused: bool, checkpointing: bool) -> str:
    """Return `formulas.activations` as text. The factor 34 is for an MLP of two matrices, 4 H wide."""
    tokens = f"{shape.rows} x {shape.source} x {decoder.width}"
    layer = f"{34 * element / 2:g} x {tokens}"
    if not fused:
        layer += f" + {5 * element / 2:g} x {decoder.heads} x {shape.source}^2 x {shape.rows}"
    more = "; a gated MLP keeps up to half as much again" if decoder.gated else ""
    if checkpointing:
        return f"{decoder.layers} x {element} x {tokens} + {layer} bytes{more}"
    return f"{decoder.layers} x ({layer}) bytes{more}"
