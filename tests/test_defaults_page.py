"""docs/reference/defaults.md names the defaults that the code has."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from recipes.causal_lm import CausalLMConfig
from recipes.lora_finetune import LoraConfig
from zerobook.config import AUTOMATIC, KEPT_AUTOMATICALLY

PAGE = Path(__file__).parents[1] / "docs" / "reference" / "defaults.md"
ROWS = re.findall(r"^\| `--(\w+)`[^|]*\| ([^|]+?) \|", PAGE.read_text(), re.M)
DESCRIBED = {"mixed_precision": None, "resume_from_checkpoint": None, "report_to": []}
"""Defaults that the page gives in words."""


def default(flag):
    fields = LoraConfig.model_fields | CausalLMConfig.model_fields
    return fields[flag].default


@pytest.mark.parametrize(("flag", "shown"), ROWS)
def test_the_page_has_the_default_of_the_code(flag, shown):
    if flag in DESCRIBED:
        assert default(flag) == DESCRIBED[flag]
    elif flag == "save_total_limit":
        assert default(flag) is None and default("save_steps") == AUTOMATIC and shown == str(KEPT_AUTOMATICALLY)
    else:
        value = default(flag)
        words = value if isinstance(value, list) else [str(value).lower()]
        assert re.split(r"[; ]", shown)[0] == " ".join(words)


def test_the_defaults_of_adapters_are_named_too():
    shown = dict(ROWS)
    lora = LoraConfig(model_name_or_path="m", dataset_name="d")
    ia3 = LoraConfig(model_name_or_path="m", dataset_name="d", adapter="ia3")

    assert f"LoRA {lora.learning_rate}, IA3 {ia3.learning_rate}" in shown["learning_rate"]
    assert f"LoRA {lora.warmup_ratio:.0%}".replace("%", " %") in shown["num_warmup_steps"]
    assert len(shown) > 25
