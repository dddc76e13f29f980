"""The files of a checkpoint, and their fields. The reference in the docs is generated from them."""

from __future__ import annotations

FILES: dict[str, tuple[str, dict[str, str]]] = {
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
