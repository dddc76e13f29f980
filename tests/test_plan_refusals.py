"""Models that cannot be planned: of a class that cannot be built, or whose step cannot be traced."""

from __future__ import annotations

import json

import pytest

from zerobook.cli.main import main
from zerobook.errors import ConfigError
from zerobook.plan.job import read_config


def test_code_of_a_repository_runs_only_where_it_is_trusted(tiny, tmp_path, capsys, monkeypatch):
    from transformers import dynamic_module_utils

    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.syspath_prepend(str(tmp_path / "modules"))
    folder, marker = tmp_path / "own", tmp_path / "it ran"
    folder.mkdir()
    auto_map = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"}
    facts = json.loads((tiny / "llama" / "config.json").read_text())
    facts |= {"model_type": "own", "architectures": ["OwnModel"], "auto_map": auto_map}
    (folder / "config.json").write_text(json.dumps(facts))
    (folder / "own.py").write_text(
        "from pathlib import Path\nfrom transformers import LlamaConfig, LlamaForCausalLM\n"
        f"Path({str(marker)!r}).touch()\n"
        "class OwnConfig(LlamaConfig):\n    model_type = 'own'\n"
        "class OwnModel(LlamaForCausalLM):\n    config_class = OwnConfig\n"
    )
    line = ["plan", "--json", "-", "--strategies", "ddp,zero3", "--gpus", "2", str(folder), "--block_size", "64"]
    assert main(line) == 2
    assert "--trust_remote_code" in capsys.readouterr().err and not marker.exists()
    assert main([*line, "--trust_remote_code"]) == 0
    assert json.loads(capsys.readouterr().out)["parameters"] == 106_816 and marker.exists()


@pytest.mark.parametrize(
    "facts, message",
    [
        ({"model_type": "of-tomorrow"}, "of-tomorrow"),
        ({"model_type": "gpt2", "n_embd": "wide"}, "cannot be built here"),
        ({"model_type": "llama", "hidden_size": 4096, "num_attention_heads": 30}, "30"),
    ],
)
def test_a_class_that_cannot_be_built_is_refused_with_the_reason(tmp_path, capsys, facts, message):
    file = tmp_path / "config.json"
    file.write_text(json.dumps(facts))
    assert main(["plan", str(file)]) == 2
    text = capsys.readouterr().err
    assert message in text and "--formulas" in text


def test_a_step_that_cannot_be_traced_is_refused_with_the_reason(tiny, capsys, monkeypatch):
    import zerobook.plan.traced_job as traced_job

    def fails(*_, **__):
        raise RuntimeError("no kernel for fake tensors")

    monkeypatch.setattr(traced_job, "trace_step", fails)
    assert main(["plan", "--strategies", "ddp", str(tiny / "llama"), "--block_size", "64"]) == 2
    assert "no kernel for fake tensors" in capsys.readouterr().err


def test_a_file_without_keys_is_named(tmp_path):
    file = tmp_path / "config.json"
    file.write_text("[]")
    with pytest.raises(ConfigError, match="holds a list"):
        read_config(str(file))
