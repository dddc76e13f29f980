"""Table E: dtypes in which FSDP and DeepSpeed really hold and compute."""

from __future__ import annotations

import json
import tempfile
from dataclasses import dataclass
from pathlib import Path

from benchmarks.published.bench import ROOT, Bench
from benchmarks.published.table import Finding, Line, Table
from benchmarks.published.trial import LIMIT_S, Arm, TrialError, fingerprint
from zerobook.utils import subprocess_launch

SOURCE = (
    "Accelerate's guide, Moving between FSDP and DeepSpeed "
    "(https://huggingface.co/docs/accelerate/concept_guides/fsdp_and_deepspeed), its last "
    "table. In this guide, FSDP means FSDP1."
)
SCRIPT = Path(__file__).with_name("dtypes.py")


@dataclass(frozen=True)
class Mode:
    file: str
    loaded: str
    mixed: str
    how: str = "accelerate"
    published: tuple[str, str, str] | None = None

    @property
    def name(self) -> str:
        kind = {"fsdp": "FSDP2", "zero3": "ZeRO-3"}[self.file]
        made = "this project" if self.how == "zerobook" else "accelerate alone"
        return f"{kind}, loaded in {self.loaded}, mixed precision {self.mixed}; {made}"


MODES = (
    Mode("fsdp", "bf16", "no", published=("bf16", "bf16", "bf16")),
    Mode("fsdp", "bf16", "bf16", published=("fp32", "bf16", "fp32")),
    Mode("zero3", "bf16", "bf16", published=("fp32", "bf16", "fp32")),
    Mode("fsdp", "fp32", "bf16"),
    Mode("zero3", "fp32", "no"),
    Mode("fsdp", "bf16", "no", how="zerobook"),
    Mode("fsdp", "bf16", "bf16", how="zerobook"),
)
DTYPES = {"bf16": "bfloat16", "fp32": "float32"}


def run(bench: Bench) -> Table:
    """Run two steps in each mode. The dtypes are those of rank 0's live tensors."""
    ranks = min(2, bench.ranks)
    table = Table(
        "E",
        "Precision under FSDP and DeepSpeed",
        SOURCE,
        f"a Llama on {ranks} process(es), two steps; dtypes on rank 0 of the trained weights (*prepared*), the output of a "
        "linear layer (*training*), the gradients and the moments (*optimizer*).",
    )
    for mode in MODES:
        bench.say(f"E: {mode.name}")
        flags = bench.plain | {"per_device_train_batch_size": 1, "max_train_steps": 2}
        flags |= {"dtype": DTYPES[mode.loaded], "mixed_precision": mode.mixed}
        arm = Arm.of(mode.file, ranks)
        found = _read(arm, mode, flags)
        printed = dict(zip(("prepared", "training", "optimizer"), mode.published, strict=True)) if mode.published else {}
        here = {
            "prepared": found["prepared"],
            "training": found["compute"],
            "gradients": found["gradients"],
            "optimizer": found["moments"],
        }
        table.lines.append(
            Line(
                mode.name,
                printed,
                {"loaded": found["loaded"], **here},
                fingerprint(arm, "causal_lm", flags | {"prepared by": mode.how}),
            )
        )
        if mode.published:
            seen = (found["prepared"], found["compute"], found["moments"])
            table.findings.append(
                Finding(
                    f"{mode.name}: prepared, training and optimizer are {', '.join(mode.published)}",
                    seen == mode.published,
                    ", ".join(seen),
                )
            )
    table.notes.append(
        "DeepSpeed keeps master copies and moments in fp32, whatever the dtype of the loaded model. FSDP keeps the dtype of "
        "the loaded model. If this is bf16, the optimizer is in bf16 too, and small updates are lost by rounding. So the "
        "recipes here train fp32 master copies under every strategy."
    )
    return table


def _read(arm: Arm, mode: Mode, flags: dict[str, object]) -> dict[str, str]:
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        words = subprocess_launch.flags(flags | {"output_dir": Path(folder) / "run"})
        line = subprocess_launch.command(
            arm.launcher, arm.ranks, SCRIPT, result, mode.how, ROOT / "recipes" / "causal_lm.py", *words
        )
        code, text = subprocess_launch.run(line, LIMIT_S, cwd=ROOT)
        if not result.exists():
            raise TrialError(f"{mode.name}: exit status {code}: {subprocess_launch.last_error(text)}")
        return json.loads(result.read_text())
