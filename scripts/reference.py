"""Write the pages of docs/reference/ that are generated from the code.

usage: reference.py [FOLDER]
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

from zerobook.checkpoint.progress import Progress
from zerobook.config import ALIASES, DatasetSpec, RecipeConfig
from zerobook.runlog.events import COMMON_FIELDS, EVENT_TYPES
from zerobook.runlog.records import StepRecord
from zerobook.training.recipe_file import recipe_class

ROOT = Path(__file__).resolve().parents[1]
NOTE = "<!-- written by scripts/reference.py -->"
STRATEGIES = """\
*Memory* is the bytes on each process's device at the peak of a step, without activations. *Traffic* is the bytes that a
process sends. Multiply each figure with P by (M - 1)/M, where M is the number of processes that exchange these bytes: all N,
or those inside a group or node if the cell says so; between groups, one process of each. Figures for a row or a layer already
have this factor. The figures are for fp32 unless they say bf16. P is the number of trained parameters, N of processes, G of
processes of a node, R of replicas. S and C are the number of processes that share the tokens of a row, E that share experts,
and T that share weight matrices. With LoRA, P counts the adapters; the frozen base adds 4 bytes per weight (2 under mixed
precision), divided by N if weights are sharded. Under `zero3_hpz.yaml`, the second copy adds as many bytes per weight, divided
by G.

The precision is set by `--mixed_precision` or by the strategy file. If a DeepSpeed JSON sets another precision, the flag has
priority, and a note says so. The header of each file names the source of its figures. You can also use a file that
`accelerate config` wrote.

Two more files, in `accelerate_configs/published/`, belong to [two published examples](../../ds_configs/published/README.md).
Their DeepSpeed files set fp16.
"""
STEP_FIELDS = {name: COMMON_FIELDS[name] for name in ("attempt", "branch", "crc")}
"""Fields of a line of ``steps.jsonl`` besides those of `StepRecord`."""
CHECKPOINT_FILES: dict[str, tuple[str, dict[str, str]]] = {
    "manifest.json": (
        "Written last. A folder without this file is not a checkpoint.",
        {
            "format_version": "version of this layout: 4 if the optimizer is AdamW and no piece is a slice; otherwise 5",
            "step": "optimizer steps done",
            "files": "every other file: its size in bytes, and its digest (xxh3_128)",
        },
    ),
    "tensors.json": (
        "The index of the tensors.",
        {
            "shapes": "name of each trained parameter: the shape of the complete parameter",
            "pieces": "name of each tensor (`weight/NAME`, `exp_avg/NAME`, `momentum_buffer/NAME`, ...): list of its pieces. A "
            "segment is [start, stop, file], with positions in the flattened tensor. A slice is [offset, shape, file], where "
            "offset and shape are lists with a number for each dimension",
            "adam_steps": "steps that AdamW has counted; for other optimizers the key is `optimizer_steps`",
            "state_shapes": "shapes of optimizer state that differ from the weight's shape; left out for AdamW",
            "written_by": "strategy that wrote the checkpoint",
        },
    ),
    "tensors-RRRRR-NNNNN.safetensors": (
        "Pieces of fp32 weights and of the optimizer's state, written by the rank RRRRR. A segment of the flattened tensor is "
        "stored as `weight/NAME@START`. A file has 512 MiB at most, unless one piece is larger.",
        {},
    ),
    "buffers.safetensors": (
        "Persistent buffers by name, in the dtypes in which they were loaded. With adapters, the buffers of the base are not "
        "saved. With PiSSA, the adapter's initial weights are buffers, and are saved here.",
        {},
    ),
    "hooks.json": (
        "The state of hooks, if they have any. Their tensors are stored in pieces like weights, as `hooks.HOOK.KEY/NAME`.",
        {"values": "for each hook: its state without tensors", "tensors": "for each hook: the keys of its tensors"},
    ),
    "progress.json": ("The state of the loop: one `zerobook.checkpoint.progress.Progress` record.", {}),
    "config.json": (
        "The settings of the run that wrote it.",
        {
            "config": "every key of the recipe's config with its value",
            "asked": "the config as YAML, flags and strategy file set it. `config` may differ: a resumed run may have other "
            "batch sizes, and the revision of a dataset is the commit that was read",
            "chat_template": "text of `--chat_template`; null for the tokenizer's own",
            "base_commit": "hub commit of the model that was loaded",
            "base": "config of that model; with adapters, also a digest of its weights",
        },
    ),
}
"""Name of the file -> (what it holds, its fields). In a name, RRRRR is the rank and NNNNN counts its files."""


def main(folder: Path) -> None:
    for name, text in pages().items():
        (folder / name).write_text(text)
        print(f"wrote {folder / name}")


def pages() -> dict[str, str]:
    """Return the text of each page, by file name."""
    return {"flags.md": flags(), "strategies.md": strategies(), "runlog.md": runlog(), "checkpoint.md": checkpoint()}


# --- flags
def flags() -> str:
    """Return the page of all flags of all recipes."""
    parts = ["# Flags\n", NOTE + "\n"]
    parts.append(
        "Every flag is also a key of the YAML file that `--config FILE.yaml` names. A flag overrides the file. `--dry-run`\n"
        "prints each value with its source. *Steps* are optimizer steps. A flag without a default is unset.\n\n"
        "A YAML value is parsed like the same text on the command line. The type of the key decides what it means: `no` is a\n"
        "boolean for `packing`, and a word for `mixed_precision`. For a list, `none` and `null` mean an empty list. They\n"
        "unset the lists `policy` and `datasets`, and every other optional key. `mixed_precision: none` means `no`. A list\n"
        "may also be written as a single value, or as names that are separated by commas. `embedded:NAME` is a small model\n"
        "or dataset from a Python package, which needs no network.\n"
    )
    parts.append("## Every recipe\n")
    for group, names in groups(RecipeConfig).items():
        parts.append(f"### {group[:1].upper()}{group[1:]}\n\n{fields(RecipeConfig, names)}")
    for file in sorted((ROOT / "recipes").glob("*.py")):
        if file.stem == "__init__":
            continue
        config = recipe_class(file).config_class
        recipe_fields = [name for name, field in config.model_fields.items() if _is_of_recipe(name, field)]
        parts.append(f"## {file.name}\n\n{config_doc(file)}\n\n{fields(config, recipe_fields)}")
    parts.append(
        "## Entries of `datasets`\n\nA mixture is written in the YAML under `datasets:`, a list of entries with these keys.\n\n"
        + fields(DatasetSpec, DatasetSpec.model_fields, dashes="")
    )
    renamed = [[f"`--{alias}`", f"`--{name}`"] for alias, name in ALIASES.items()]
    parts.append(f"## Other names\n\n{table(['flag', 'is read as'], renamed)}")
    return "\n".join(parts)


def _is_of_recipe(name: str, field: Any) -> bool:
    """Return whether a field of a recipe is not in every recipe, or has another default in this recipe."""
    shared = RecipeConfig.model_fields.get(name)
    return shared is None or shared.default != field.default


def groups(config: type) -> dict[str, list[str]]:
    """Return the fields of a config class under the headings (``# --- heading``) of its source."""
    names_by_heading: dict[str, list[str]] = {}
    heading = ""
    for line in inspect.getsource(config).splitlines():
        heading_match = re.match(r"    # --- (.*)", line)
        field_match = re.match(r"    (\w+): ", line)
        if heading_match:
            heading = heading_match[1]
            names_by_heading[heading] = []
        # Other lines with a colon are in methods and texts.
        elif field_match and field_match[1] in config.model_fields:  # type: ignore[attr-defined]
            names_by_heading[heading].append(field_match[1])
    return names_by_heading


def config_doc(file: Path) -> str:
    """Return the first line of a module's docstring."""
    docstring = ast.get_docstring(ast.parse(file.read_text())) or ""
    return docstring.partition("\n")[0]


def fields(config: Any, names: Iterable[str], dashes: str = "--") -> str:
    """Return the table of some fields of a pydantic model.

    Args:
        dashes: what stands before a flag; empty if the fields are keys of a YAML file.
    """
    rows = []
    for name in names:
        field = config.model_fields[name]
        # `datasets` is a key of the YAML only.
        flag = name if name == "datasets" else f"{dashes}{name}"
        rows.append([f"`{flag}`", kind(field), default(field), sentence(field.description or "")])
    return table(["flag" if dashes else "key", "type", "default", "meaning"], rows)


def kind(field: Any) -> str:
    """Return the type of a field as a user writes it: names of classes, choices, and bounds."""
    if "choices" in (field.json_schema_extra or {}):
        return ", ".join(f"`{choice}`" for choice in field.json_schema_extra["choices"])
    words = [type_words(field.annotation)]
    # Pydantic keeps a bound as an object with one of these attributes.
    for constraint in field.metadata:
        for name, sign in (("ge", ">="), ("gt", ">"), ("le", "<="), ("lt", "<")):
            if hasattr(constraint, name):
                words.append(f"{sign} {getattr(constraint, name):.10g}")
    return ", ".join(words)


def type_words(annotation: Any) -> str:
    """Return a type in words. ``X | None`` is written as X."""
    if annotation is DatasetSpec:
        return "mappings"
    inner = [type_words(part) for part in get_args(annotation) if part is not type(None)]
    name = getattr(annotation, "__name__", str(annotation))
    if name == "list":
        return f"list of {inner[0]}"
    if name == "Literal":
        return ", ".join(f"`{choice}`" for choice in get_args(annotation))
    if inner:
        return inner[0]
    return {"str": "text", "bool": "true or false"}.get(name, name)


def default(field: Any) -> str:
    """Return the default of a field as a user writes it; empty if it is unset."""
    value = field.default
    if field.is_required():
        return "required"
    if value is None or value == [] or value == "":
        return ""
    if isinstance(value, bool):
        value = str(value).lower()
    if isinstance(value, list):
        value = " ".join(value)
    return f"`{value}`"


# --- strategies
def strategies() -> str:
    """Return the page of strategy files, made from their headers."""
    names = sorted(file.stem for file in (ROOT / "accelerate_configs").glob("*.yaml"))
    prefixes = ("single", "ddp", "zero", "fsdp")
    # Sorting is stable, so names with the same prefix stay in the order of the alphabet.
    names.sort(key=lambda name: find_prefix(name, prefixes))
    rows = []
    for name in names:
        values = header(ROOT / "accelerate_configs" / f"{name}.yaml")
        cells = [sentence(values[key]) for key in ("Purpose", "Memory", "Traffic", "Choose", "Run on")]
        rows.append([f"[`{name}.yaml`](../../accelerate_configs/{name}.yaml)", *cells])
    heads = ["file in `accelerate_configs/`", "what is spread", "memory", "traffic", "choose it when", "ran on"]
    return "\n".join(["# Strategy files\n", NOTE + "\n", STRATEGIES, table(heads, rows)])


def find_prefix(name: str, prefixes: Sequence[str]) -> int:
    """Return the index of the first prefix with which ``name`` begins; the number of prefixes if there is none."""
    for index, prefix in enumerate(prefixes):
        if name.startswith(prefix):
            return index
    return len(prefixes)


def header(file: Path) -> dict[str, str]:
    """Return the ``# Key:  value`` lines at the top of a YAML file. A line without a key continues the value before it."""
    values: dict[str, str] = {}
    key = ""
    for line in file.read_text().splitlines():
        if not line.startswith("#"):
            break
        match = re.match(r"# (\w[\w ]*): +(.*)", line)
        if match:
            key = match[1]
            values[key] = match[2]
        else:
            values[key] += " " + line.removeprefix("#").strip()
    return values


# --- runlog
def runlog() -> str:
    """Return the page of events and steps."""
    parts = ["# Files of a runlog\n", NOTE + "\n"]
    parts.append(
        "This page describes the two files of `output_dir/runlog/` that have one JSON object per line. Rank 0 writes them.\n"
        "[The runlog](../guides/runlog.md) explains them, and lists the other files there.\n"
    )
    # The fields are in the order in which a record is written.
    record = StepRecord(step=0, loss=0.0, grad_norm=0.0, learning_rate=0.0, tokens=0, cursor=(0, 0), ids=[], metrics={"a": 0.0})
    docs = field_docs(StepRecord)
    step_fields = {name: text for name, text in STEP_FIELDS.items() if name != "crc"}
    step_fields |= {name: docs[name] for name in record.to_json()}
    # The checksum is the last field of a line.
    step_fields["crc"] = STEP_FIELDS["crc"]
    parts.append(f"## steps.jsonl\n\nOne line per optimizer step.\n\n{field_table(step_fields)}")
    parts.append(f"## events.jsonl\n\nEvery event has these fields.\n\n{field_table(COMMON_FIELDS)}")
    parts.append("Fields that have no value in a case are left out, or null.\n")
    for name, event in EVENT_TYPES.items():
        parts.append(f"### {name}\n\n{event.when}\n\n{field_table(event.fields)}")
    return "\n".join(parts)


def checkpoint() -> str:
    """Return the page of a checkpoint's files."""
    parts = ["# Files of a checkpoint\n", NOTE + "\n"]
    parts.append(
        "`output_dir/checkpoints/step-NNNNNN/` is a complete checkpoint. [Checkpoints](../guides/checkpoints.md) explains how\n"
        "it is written and read, and the other folders beside it.\n"
    )
    for name, (description, file_fields) in CHECKPOINT_FILES.items():
        parts.append(f"## {name}\n\n{description}\n")
        if name == "progress.json":
            parts.append(field_table(field_docs(Progress)))
        elif file_fields:
            parts.append(field_table(file_fields))
    return "\n".join(parts)


# --- helpers
def field_docs(record: type) -> dict[str, str]:
    """Return field -> the docstring after it, of a dataclass.

    Raises:
        ValueError: a field has no docstring.
    """
    class_definition = ast.parse(inspect.getsource(record)).body[0]
    assert isinstance(class_definition, ast.ClassDef)
    statements = class_definition.body
    docs = {}
    for statement, following in zip(statements, [*statements[1:], None], strict=True):
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            if not (isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant)):
                raise ValueError(f"{record.__name__}.{statement.target.id} has no docstring behind it; write one.")
            docs[statement.target.id] = " ".join(str(following.value.value).split())
    return docs


def field_table(docs: Mapping[str, str]) -> str:
    """Return the table of fields with their meanings."""
    rows = [[f"`{name}`", sentence(text)] for name, text in docs.items()]
    return table(["field", "meaning"], rows)


def sentence(text: str) -> str:
    """Return a docstring as a cell of a table in Markdown."""
    return text.replace("``", "`").replace("|", "\\|")


def table(heads: list[str], rows: list[list[str]]) -> str:
    """Return a table in Markdown."""
    lines = [heads, ["---"] * len(heads), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "docs" / "reference")
