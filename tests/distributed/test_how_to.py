"""The files of docs/how-to/ train the same under ZeRO-3 and FSDP2 as in one process, and the commands take them."""

from __future__ import annotations

import json
import re
from functools import cache
from itertools import product
from pathlib import Path

import pytest

from tests.harness import ROOT, launch, sampled
from tests.versions import NEEDS_MODEL_PARALLELISM
from zerobook.cli.main import main

FOLDER = ROOT / "docs" / "how-to"
PAIRS = [
    {side: [{"role": "user", "content": f"Name {n} of {n + 1}."}, {"role": "assistant", "content": f"{answer} {n}."}]
     for side, answer in (("chosen", "This is number"), ("rejected", "I do not know, is it perhaps"))}
    for n in range(24)
]  # fmt: skip
PROMPTED = [{"prompt": pair["chosen"][:1], "chosen": pair["chosen"][1:], "rejected": pair["rejected"][1:]} for pair in PAIRS]
DIALOGUES = [{"dialogue": f"Q: What is {n}? A: A number. Q: And {n + 1}? A: One more than {n}."} for n in range(24)]
CASES = {
    "custom_loss": {"block_size": 32, "z_weight": 0.01},
    "dpo": {"rows": PROMPTED, "max_seq_length": 64, "lora_r": 4, "learning_rate": 2e-3, "beta": 0.5},
    "dpo_full": {"rows": PAIRS, "block_size": 64, "learning_rate": 1e-3, "beta": 0.5},
    "data_format": {"rows": DIALOGUES, "max_seq_length": 64, "lora_r": 4, "learning_rate": 2e-3},
    "evaluation": {"block_size": 32},
}
"""Page -> flags of its file; ``rows`` are the data."""
SAMPLE = [
    ("custom_loss", "zero3"),
    ("dpo", "fsdp"),
    ("dpo_full", "zero3"),
    ("data_format", "zero3"),
    ("evaluation", "fsdp"),
]
PAGES = {"dpo_full": "dpo"}
"""A page's second file -> the page."""
PREFERENCES = {"reward_margin", "reward_accuracy"}
METRICS = {"custom_loss": {"z_loss"}, "dpo": PREFERENCES, "dpo_full": PREFERENCES}


def file_of(case: str, folder: Path) -> Path:
    """Write a page's Python blocks under the names in their first lines, and return the file of the case."""
    page = PAGES.get(case, case)
    blocks = re.findall(r"```python\n(# (\w+\.py)\n.*?)```", (FOLDER / f"{page}.md").read_text(), re.S)
    for code, name in blocks:
        (folder / name).write_text(code)
    return folder / (f"{case}.py" if case in PAGES else blocks[0][1])


def flags_of(page: str, tiny: Path, folder: Path) -> dict:
    flags = {"model_name_or_path": tiny / "llama", "train_file": tiny / "chats.jsonl", "validation_split_percentage": 25,
             "num_warmup_steps": 0, "cache_dir": folder / "cache"} | CASES[page]  # fmt: skip
    if rows := flags.pop("rows", None):
        flags["train_file"] = folder / "rows.jsonl"
        flags["train_file"].write_text("".join(json.dumps(row) + "\n" for row in rows))
    return flags


@pytest.mark.parametrize("page", CASES)
def test_a_how_to_is_short_and_prepares_and_plans(tiny, tmp_path, capsys, page):
    file, flags = file_of(page, tmp_path), flags_of(page, tiny, tmp_path)
    assert sum(bool(line.strip()) for line in file.read_text().splitlines()) <= 60, "lines that are not blank"
    line = [str(file), *(str(word) for key, value in flags.items() for word in (f"--{key}", value))]
    assert main(["data", "prepare", *line, "--output_dir", str(tmp_path / "run"), "--preprocessing_num_workers", "2"]) == 0
    assert "rows" not in CASES[page] or "18" in capsys.readouterr().out, "of 24 rows, a quarter is held out"
    assert main(["plan", "--gpus", "2", "--strategies", "zero3,fsdp", *line]) == 0
    assert "zero3" in capsys.readouterr().out


@pytest.fixture(scope="module")
def trained(tiny, tmp_path_factory):
    """A page's file, trained under a strategy; each is launched once."""

    @cache
    def run(page, strategy):
        ranks, micro = {"single": (1, 6), "zero2": (2, 1), "zero3": (2, 1), "fsdp": (2, 3)}[strategy]
        folder = tmp_path_factory.mktemp(page)
        return launch(
            strategy, ranks, str(file_of(page, folder)), folder / strategy, per_device_train_batch_size=micro,
            gradient_accumulation_steps=6 // (ranks * micro), max_train_steps=4, logging_steps=1, eval_steps=2,
            per_device_eval_batch_size=2, **flags_of(page, tiny, folder),
        )  # fmt: skip

    return run


@pytest.mark.launch
@pytest.mark.parametrize("page, strategy", sampled([*product(CASES, ["zero3", "fsdp"]), ("dpo_full", "zero2")], *SAMPLE))
def test_a_how_to_trains_equal_to_one_process(trained, page, strategy):
    one, run = trained(page, "single"), trained(page, strategy)
    assert one.losses[-1] < one.losses[0] or page.startswith("dpo")
    assert run.losses == pytest.approx(one.losses, rel=1e-5) and run.norms == pytest.approx(one.norms, rel=1e-5)
    for ours, reference in zip(run.steps, one.steps, strict=True):
        assert set(ours.get("metrics", {})) == METRICS.get(page, set())
        assert ours.get("metrics", {}) == pytest.approx(reference.get("metrics", {}), rel=1e-4, abs=1e-5)
    assert run.event("eval")["loss"] == pytest.approx(one.event("eval")["loss"], rel=1e-5)
    if page == "evaluation":
        assert run.event("eval")["metrics"] == pytest.approx(one.event("eval")["metrics"])


@pytest.mark.launch
@pytest.mark.parametrize(
    "strategy, processes, dtype",
    [
        *sampled([("single", 1, "float32"), ("ddp", 2, "float32"), ("zero3", 2, "bfloat16")]),
        ("zero2", 2, "bfloat16"),
        ("fsdp", 2, "bfloat16"),
        pytest.param("fsdp_tensor", 2, "float32", marks=NEEDS_MODEL_PARALLELISM),
    ],
)
def test_a_reference_computes_as_the_model_that_is_trained(tiny, tmp_path, strategy, processes, dtype):
    """Before the first update, both have the same weights."""
    file = file_of("dpo_full", tmp_path)
    line = "return self.log_likelihood(self.reference_model"
    # Some weights stay gathered, in bf16, after the first pass.
    check = f"assert 'torch.{dtype}' in {{str(p.dtype) for p in self.reference_model.parameters()}}; {line}"
    file.write_text(file.read_text().replace(line, check))

    run = launch(
        strategy, processes, str(file), tmp_path / "run", per_device_train_batch_size=3, max_train_steps=2, logging_steps=1,
        mixed_precision="bf16", **flags_of("dpo_full", tiny, tmp_path),
    )  # fmt: skip

    margins = [step["metrics"]["reward_margin"] for step in run.steps]
    assert margins[0] == 0.0 < margins[1]


@pytest.mark.launch
def test_the_strategy_files_of_the_how_to_train_equal_to_one_process(tiny, tmp_path, capsys):
    text = (FOLDER / "strategy_file.md").read_text()
    flags = flags_of("custom_loss", tiny, tmp_path) | {"max_train_steps": 4, "logging_steps": 1, "max_grad_norm": 1.0}
    del flags["z_weight"]
    one = launch("single", 1, "causal_lm", tmp_path / "one", per_device_train_batch_size=6, **flags).read()
    for name, said in (("my_zero3", "ZeRO-3 (optimizer: cpu offload)"), ("my_fsdp", "FSDP2")):
        block = re.search(rf"```yaml\n# {name}\.yaml\n.*?```", text, re.S)
        assert block
        file = tmp_path / f"{name}.yaml"
        file.write_text(block[0].removeprefix("```yaml\n").removesuffix("```"))
        assert main(["doctor", "--config_file", str(file)]) == 0 and said in capsys.readouterr().out
        run = launch(str(file), 2, "causal_lm", tmp_path / name, per_device_train_batch_size=3, **flags).read()
        assert run.event("run_start")["live"]["strategy"] == said
        assert run.losses == pytest.approx(one.losses, rel=1e-5) and run.norms == pytest.approx(one.norms, rel=1e-5)
