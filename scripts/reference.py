"""Write the pages of docs/reference/ that are generated from the code.

usage: reference.py [FOLDER]
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
from collections.abc import Iterable, Sequence
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
Memory is in bytes of each process's device at the peak of a step, in fp32 unless it says bf16, without activations. Traffic is
in bytes sent, times (N - 1)/N. P is the number of trained parameters, N of processes, G of processes of a node, R of replicas.
With LoRA, P counts the adapters; the frozen base adds 4 bytes a weight (2 under mixed precision), divided by N where weights
are sharded. Under `zero3_hpz.yaml`, the second copy adds the same number, divided by G.

The precision is set by `--mixed_precision` or by the strategy file. If a DeepSpeed JSON sets another precision, the flag has
priority, and a note says so. You can also use a file that `accelerate config`
wrote. The header of each file has the source of its figures.

Two more files, in `accelerate_configs/published/`, are those of [two published examples](../../ds_configs/published/README.md).
Their DeepSpeed files set fp16.
"""
STEP_FIELDS = {name: COMMON_FIELDS[name] for name in ("attempt", "branch", "crc")}
"""Fields of a line of ``steps.jsonl`` besides those of `StepRecord`."""
CHECKPOINT_FILES: dict[str, tuple[str, dict[str, str]]] = {
    "manifest.json": (
        "Written last. A folder without this file is not a checkpoint.",
        {
            "format_version": "version of this layout: 4 for AdamW, 5 for other optimizers and for slices",
            "step": "optimizer steps done",
            "files": "every other file: its size in bytes, and its digest (xxh3_128)",
        },
    ),
    "tensors.json": (
        "The index of the tensors.",
        {
            "shapes": "name of each trained parameter: its shape",
            "pieces": "name of each tensor (`weight/NAME`, `exp_avg/NAME`, `momentum_buffer/NAME`, ...): [start, stop, file] "
            "of each piece, as positions in the flattened tensor, or [offset, shape, file] of a slice",
            "adam_steps": "steps that AdamW has counted; in format 5 `optimizer_steps`",
            "state_shapes": "format 5: shapes of optimizer state that are different from the weight's shape",
            "written_by": "strategy that wrote the checkpoint",
        },
    ),
    "tensors-RRRRR-NNNNN.safetensors": (
        "Pieces of fp32 weights and of the optimizer's state that rank R wrote. A piece is a flattened segment, stored as "
        "`weight/NAME@START`. A file has 512 MiB at most, unless one piece is larger.",
        {},
    ),
    "buffers.safetensors": (
        "Persistent buffers by name, in the dtypes in which they were loaded. With adapters: PiSSA's initial weights.",
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
            "asked": "the config before values were filled in, from YAML, flags and strategy file",
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
        "boolean for `packing`, and a word for `mixed_precision`. `none` and `null` unset an optional key. For a list, they\n"
        "mean the empty list. A list may also be written as a single value, or as names that are separated by commas.\n"
    )
    parts.append("## Every recipe\n")
    for group, names in groups(RecipeConfig).items():
        parts.append(f"### {group[:1].upper()}{group[1:]}\n\n{fields(RecipeConfig, names)}")
    for file in sorted((ROOT / "recipes").glob("*.py")):
        if file.stem == "__init__":
            continue
        config = recipe_class(file).config_class
        own = [name for name, field in config.model_fields.items() if _is_own(name, field)]
        parts.append(f"## {file.name}\n\n{config_doc(file)}\n\n{fields(config, own)}")
    parts.append(
        "## Entries of `datasets`\n\nA mixture is written in the YAML under `datasets:`, a list of entries with these keys.\n\n"
        + fields(DatasetSpec, DatasetSpec.model_fields, dashes="")
    )
    renamed = [[f"`--{alias}`", f"`--{name}`"] for alias, name in ALIASES.items()]
    parts.append(f"## Other names\n\n{table(['flag', 'is read as'], renamed)}")
    return "\n".join(parts)


def _is_own(name: str, field: Any) -> bool:
    """Return whether a recipe has the field alone, or with a default of its own."""
    shared = RecipeConfig.model_fields.get(name)
    return shared is None or shared.default != field.default


def groups(config: type) -> dict[str, list[str]]:
    """Return the fields of a config class under the headings (``# --- heading``) of its source."""
    found: dict[str, list[str]] = {}
    names: list[str] = []
    for line in inspect.getsource(config).splitlines():
        if heading := re.match(r"    # --- (.*)", line):
            names = found[heading[1]] = []
        elif (field := re.match(r"    (\w+): ", line)) and field[1] in config.model_fields:  # type: ignore[attr-defined]
            names.append(field[1])
    return found


def config_doc(file: Path) -> str:
    return (ast.get_docstring(ast.parse(file.read_text())) or "").partition("\n")[0]


def fields(config: Any, names: Iterable[str], dashes: str = "--") -> str:
    """Return the table of some fields of a pydantic model."""
    known = {name: config.model_fields[name] for name in names}
    rows = [
        [f"`{dashes * (name != 'datasets')}{name}`", kind(field), default(field), sentence(field.description or "")]
        for name, field in known.items()
    ]
    return table(["flag" if dashes else "key", "type", "default", "meaning"], rows)


def kind(field: Any) -> str:
    """Return the type of a field as a user writes it: names of classes, choices, and bounds."""
    if "choices" in (field.json_schema_extra or {}):
        return ", ".join(f"`{choice}`" for choice in field.json_schema_extra["choices"])
    bounds = [
        f"{sign} {getattr(limit, name):.10g}"
        for limit in field.metadata
        for name, sign in (("ge", ">="), ("gt", ">"), ("le", "<="), ("lt", "<"))
        if hasattr(limit, name)
    ]
    return ", ".join([type_words(field.annotation), *bounds])


def type_words(annotation: Any) -> str:
    if annotation is DatasetSpec:
        return "mappings"
    inner = [type_words(part) for part in get_args(annotation) if part is not type(None)]
    name = getattr(annotation, "__name__", str(annotation))
    if name == "list":
        return f"list of {inner[0]}"
    if name == "Literal":
        return ", ".join(f"`{choice}`" for choice in get_args(annotation))
    return inner[0] if inner else {"str": "text", "bool": "true or false"}.get(name, name)


def default(field: Any) -> str:
    value = field.default
    if field.is_required():
        return "required"
    if value is None or value == [] or value == "":
        return ""
    if isinstance(value, bool):
        value = str(value).lower()
    return f"`{' '.join(value) if isinstance(value, list) else value}`"


# --- strategies
def strategies() -> str:
    """Return the page of strategy files, made from their headers."""
    rows = []
    order = ("single", "ddp", "zero", "fsdp")
    for file in sorted((ROOT / "accelerate_configs").glob("*.yaml"), key=lambda f: (prefix(f.stem, order), f.stem)):
        said = header(file)
        link = f"[`{file.name}`](../../accelerate_configs/{file.name})"
        rows.append([link, *(sentence(said[key]) for key in ("Purpose", "Memory", "Traffic", "Choose", "Run on"))])
    heads = ["file in `accelerate_configs/`", "what is spread", "memory", "traffic", "choose it when", "ran on"]
    return "\n".join(
        [
            "# Strategy files\n",
            NOTE + "\n",
            STRATEGIES,
            table(heads, rows),
        ]
    )


def prefix(name: str, order: Sequence[str]) -> int:
    """Return the index in ``order`` of the prefix of ``name``; the length of ``order`` where none matches."""
    return next((place for place, start in enumerate(order) if name.startswith(start)), len(order))


def header(file: Path) -> dict[str, str]:
    """Return the ``# Key:  value`` lines at the top of a YAML file; a line without a key continues the value before."""
    found: dict[str, str] = {}
    key = ""
    for line in file.read_text().splitlines():
        if not line.startswith("#"):
            break
        match = re.match(r"# (\w[\w ]*): +(.*)", line)
        if match:
            key = match[1]
            found[key] = match[2]
        else:
            found[key] += " " + line.removeprefix("#").strip()
    return found


# --- runlog
def runlog() -> str:
    """Return the page of events and steps."""
    parts = ["# Files of a runlog\n", NOTE + "\n"]
    parts.append(
        "`output_dir/runlog/` holds files with one JSON object per line, written by rank 0. [The\n"
        "runlog](../guides/runlog.md) explains them.\n"
    )
    line = StepRecord(step=0, loss=0.0, grad_norm=0.0, learning_rate=0.0, tokens=0, cursor=(0, 0), ids=[], metrics={"a": 0.0})
    known = field_docs(StepRecord)
    rows = [[f"`{name}`", sentence(text)] for name, text in STEP_FIELDS.items() if name != "crc"]
    rows += [[f"`{name}`", sentence(known[name])] for name in line.to_json()]
    rows.append(["`crc`", sentence(STEP_FIELDS["crc"])])
    parts.append(f"## steps.jsonl\n\nOne line per optimizer step.\n\n{table(['field', 'meaning'], rows)}")
    common = [[f"`{name}`", sentence(text)] for name, text in COMMON_FIELDS.items()]
    parts.append(f"## events.jsonl\n\nEvery event has these fields.\n\n{table(['field', 'meaning'], common)}")
    parts.append("Fields that have no value in a case are left out, or null.\n")
    for name, event in EVENT_TYPES.items():
        rows = [[f"`{field}`", sentence(text)] for field, text in event.fields.items()]
        parts.append(f"### {name}\n\n{event.when}\n\n{table(['field', 'meaning'], rows)}")
    return "\n".join(parts)


def checkpoint() -> str:
    """Return the page of a checkpoint's files."""
    parts = ["# Files of a checkpoint\n", NOTE + "\n"]
    parts.append(
        "`output_dir/checkpoints/step-NNNNNN/` is a complete checkpoint. [Checkpoints](../guides/checkpoints.md) explains how\n"
        "it is written and read, and the other folders beside it.\n"
    )
    for name, (words, content) in CHECKPOINT_FILES.items():
        known = field_docs(Progress) if name == "progress.json" else content
        rows = [[f"`{field}`", sentence(text)] for field, text in known.items()]
        parts.append(f"## {name}\n\n{words}\n" + (f"\n{table(['field', 'meaning'], rows)}" if rows else ""))
    return "\n".join(parts)


# --- helpers
def field_docs(record: type) -> dict[str, str]:
    """Return field -> the docstring after it, of a dataclass.

    Raises:
        ValueError: a field has no docstring.
    """
    (body,) = [node.body for node in ast.parse(inspect.getsource(record)).body if isinstance(node, ast.ClassDef)]
    found = {}
    for node, behind in zip(body, [*body[1:], None], strict=True):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            if not (isinstance(behind, ast.Expr) and isinstance(behind.value, ast.Constant)):
                raise ValueError(f"{record.__name__}.{node.target.id} has no docstring behind it; write one.")
            found[node.target.id] = " ".join(str(behind.value.value).split())
    return found


def sentence(text: str) -> str:
    """Return text that a cell of a table can hold."""
    return text.replace("``", "`").replace("|", "\\|")


def table(heads: list[str], rows: list[list[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "docs" / "reference")
