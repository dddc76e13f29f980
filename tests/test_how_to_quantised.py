"""docs/how-to/quantised_export.md: its file writes a folder that loads again, in 4 bits, and computes nearly the same."""

from __future__ import annotations

import re
import runpy
import sys

import torch
from transformers import AutoModelForCausalLM

from tests.harness import ROOT
from zerobook.models.result import load_result


def test_the_file_of_the_page_writes_a_model_in_four_bits(tiny, tmp_path, monkeypatch):
    text = (ROOT / "docs" / "how-to" / "quantised_export.md").read_text()
    (code,) = re.findall(r"```python\n(# quantise\.py\n.*?)```", text, re.S)
    (tmp_path / "quantise.py").write_text(code)
    source = tiny / "llama"
    monkeypatch.setattr(sys, "argv", ["quantise.py", str(source), str(tmp_path / "nf4")])

    runpy.run_path(str(tmp_path / "quantise.py"), run_name="__main__")

    loaded = load_result(tmp_path / "nf4")
    assert loaded.model.config.quantization_config.load_in_4bit
    # Two numbers of four bits share a byte.
    assert {weight.dtype for name, weight in loaded.model.named_parameters() if "proj" in name} == {torch.uint8}
    ids = torch.arange(20)[None]
    with torch.no_grad():
        expected = AutoModelForCausalLM.from_pretrained(source)(ids).logits
        logits = loaded.model(ids).logits.float()
    assert (logits - expected).norm() < 0.3 * expected.norm()
