"""Plans by formula: of models whose class cannot be built."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.planning import UNPLANNED
from zerobook.cli.main import main
from zerobook.errors import ConfigError
from zerobook.plan import formulas
from zerobook.plan.fallback import Decoder
from zerobook.plan.hardware import CONTEXT
from zerobook.plan.job import read_config

ROOT = Path(__file__).resolve().parents[1]
FILES = sorted((ROOT / "accelerate_configs").glob("*.yaml"))
TOMORROW = {
    "model_type": "of-tomorrow", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "vocab_size": 32000,
    "intermediate_size": 11008, "tie_word_embeddings": False,
}  # fmt: skip
PARAMETERS = 32 * (4 * 4096**2 + 3 * 4096 * 11008) + 2 * 32000 * 4096
TWO_NODES = ["--gpus", "8", "--nodes", "2", "--gpu", "a100-80gb", "--interconnect", "400Gbps", "--host_memory", "1TB"]


@pytest.fixture
def tomorrow(tmp_path) -> Path:
    file = tmp_path / "tomorrow.json"
    file.write_text(json.dumps(TOMORROW))
    return file


def planned(capsys, line: list[str]) -> dict:
    main(["plan", "--json", "-", *line])
    return json.loads(capsys.readouterr().out)


def worth(words: str, **names: float) -> float:
    """A formula as it is printed, computed."""
    words = words.replace(",", "").partition(" bytes")[0].partition(" = ")[0].replace("^", "**").replace(" x ", " * ")
    return eval(re.sub(r"(?<=[\w)]) (?=[A-Z(])", "*", words), {}, names)


def test_an_unknown_class_is_planned_by_formula_and_said_so(tomorrow, tmp_path, capsys):
    target = tmp_path / "plan.json"
    line = [*TWO_NODES, "--json", str(target), "--recommend", "--png", str(tmp_path / "plan.png")]
    flags = ["--mixed_precision", "bf16", "--per_device_train_batch_size", "2"]
    assert main(["plan", *line, str(tomorrow), *flags]) == 0
    said = capsys.readouterr().out
    assert "by formula, not counted or traced" in said and "of-tomorrow" in said and "best by formula" in said
    assert "L (2 H A + 2 H K + 3 H F) + 2 V H = " in said and "no advice" in said
    assert all(file.stem in said for file in FILES)
    found = json.loads(target.read_text())
    assert "of-tomorrow" in found["by_formula"] and found["parameters"] == PARAMETERS
    assert len(found["rows"]) == len(FILES) and all(row["by_formula"] for row in found["rows"])
    rows = {row["file"]: row for row in found["rows"]}
    for name, stage in [("ddp", 0), ("zero1", 1), ("zero2", 2), ("zero3", 3), ("fsdp", 3)]:
        row, states = rows[name], formulas.model_states(PARAMETERS, stage, 16, mixed=True)
        device = row["memory"]["device"]
        assert device["parameters"] + device["gradients"] + device["optimizer"] == pytest.approx(states.total, abs=3)
        layers = formulas.activations(32, 2, 1024, 4096, 32, fused=True, checkpointing=False)
        assert device["activations"] == int(layers + formulas.logits(2, 1024, 32000))
        assert device["other"] == CONTEXT
        ring = formulas.ring(formulas.traffic(stage), 16) * 2 * PARAMETERS
        assert row["sent"] == row["between"] == pytest.approx(ring)
        rule = formulas.between_nodes_rule(PARAMETERS, 2)
        assert row["paper"]["rule"] == (rule if stage == 3 else None)
    assert rows["zero2"]["sent"] == 2 / 3 * rows["zero3"]["sent"], "by the paper; DeepSpeed sends as much"
    assert rows["zero3"]["fits"] and not rows["ddp"]["fits"], "6.7 billion with Adam are 108 GB"
    fits = [row["fits"] for row in found["rows"]]
    assert fits == sorted(fits, reverse=True), "what fits goes first"
    rates = [row["tokens_per_second"] for row in found["rows"] if row["fits"]]
    assert rates[0] > 0.95 * max(rates)
    assert rows["zero3_offload"]["memory"]["host"] == pytest.approx(8 / 16 * 16 * PARAMETERS, rel=1e-6)
    assert rows["zero3_nvme"]["memory"]["disk"] == rows["zero3_offload"]["memory"]["host"]


@pytest.mark.parametrize("flags", [["--mixed_precision", "bf16"], ["--activation_checkpointing"],
                                   ["--mixed_precision", "bf16", "--attn_implementation", "eager"]])  # fmt: skip
def test_formulas_are_what_was_computed(tomorrow, capsys, flags):
    """Each is printed in a form that can be computed again."""
    found = planned(capsys, [*TWO_NODES, str(tomorrow), *flags])
    names = {"L": 32, "H": 4096, "V": 32000, "A": 4096, "K": 4096, "F": 11008}
    assert {row["file"] for row in found["rows"] if row["memory"] is None} == UNPLANNED
    for row in found["rows"]:
        if row["memory"] is None:
            continue
        words, device, paper = row["formula"], row["memory"]["device"], row["paper"]
        assert worth(words["parameters"], **names) == PARAMETERS
        assert worth(words["activations"]) + worth(words["logits"]) == device["activations"]
        assert (words["gathered"] == "nothing" and not device["buffers"]) or worth(words["gathered"]) == device["buffers"]
        everywhere = worth(re.sub(r" \((host|disk)\)", "", paper["formula"]["states"]), P=PARAMETERS)
        assert everywhere == pytest.approx(sum(paper["states"].values()))
        for what in ("sent", "between"):
            words = paper["formula"][what]
            assert paper[what] == (0 if words == "nothing" else pytest.approx(worth(words, P=PARAMETERS))), (row["file"], what)


def test_code_of_a_repository_runs_only_where_it_is_trusted(tiny, tmp_path, capsys, monkeypatch):
    from transformers import dynamic_module_utils

    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.syspath_prepend(str(tmp_path / "modules"))
    folder, marker = tmp_path / "own", tmp_path / "it ran"
    folder.mkdir()
    facts = json.loads((tiny / "llama" / "config.json").read_text()) | {
        "model_type": "own", "architectures": ["OwnModel"],
        "auto_map": {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"},
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(facts))
    (folder / "own.py").write_text(
        "from pathlib import Path\nfrom transformers import LlamaConfig, LlamaForCausalLM\n"
        f"Path({str(marker)!r}).touch()\n"
        "class OwnConfig(LlamaConfig):\n    model_type = 'own'\n"
        "class OwnModel(LlamaForCausalLM):\n    config_class = OwnConfig\n"
    )
    line = ["--strategies", "ddp,zero3", "--gpus", "2", str(folder), "--block_size", "64"]
    found = planned(capsys, line)
    assert "--trust_remote_code" in found["by_formula"] and not marker.exists()
    assert found["parameters"] == pytest.approx(106_816, rel=0.01)
    found = planned(capsys, [*line, "--trust_remote_code"])
    assert found["by_formula"] is None and found["parameters"] == 106_816 and marker.exists()


def test_a_class_that_cannot_be_built_or_stepped_is_no_traceback(tmp_path, tiny, capsys, monkeypatch):
    file = tmp_path / "config.json"
    file.write_text(json.dumps(TOMORROW | {"model_type": "clip"}))  # known, and no language model
    assert main(["plan", str(file)]) == 2
    assert "no class of clip" in capsys.readouterr().err
    file.write_text(json.dumps({"model_type": "gpt2", "n_embd": "wide"}))
    assert main(["plan", str(file)]) == 2
    assert "n_embd: 'wide' is no number" in capsys.readouterr().err
    import zerobook.plan.rows as rows

    def fails(*_, **__):
        raise RuntimeError("no kernel for fake tensors")

    monkeypatch.setattr(rows, "trace", fails)
    line = ["--strategies", "ddp", str(tiny / "llama"), "--block_size", "64"]
    assert "no kernel for fake tensors" in planned(capsys, line)["by_formula"]


@pytest.mark.parametrize(
    "changes, said",
    [
        ({"hidden_size": None, "vocab_size": None}, ["hidden_size / n_embd / d_model", "vocab_size", "none of them"]),
        ({"num_hidden_layers": "many"}, ["num_hidden_layers: 'many'", "no number"]),
        ({"num_attention_heads": 0}, ["num_attention_heads: 0", "1 or more"]),
        ({"num_hidden_layers": True}, ["num_hidden_layers: True", "no number"]),
        ({"num_local_experts": 8}, ["num_local_experts: 8", "one MLP each"]),
        ({"ffn_config": {"moe_num_experts": 16}}, ["moe_num_experts: 16", "one MLP each"]),
    ],
)
def test_what_formulas_lack_or_do_not_know_is_named(tmp_path, capsys, changes, said):
    file = tmp_path / "tomorrow.json"
    file.write_text(json.dumps({key: value for key, value in (TOMORROW | changes).items() if value is not None}))
    assert main(["plan", str(file)]) == 2
    text = capsys.readouterr().err
    assert all(word in text for word in [*said, "tomorrow", "--formulas --parameters"]), text


def test_why_the_class_failed_comes_before_what_the_formulas_lack(tmp_path, capsys):
    file = tmp_path / "model.json"
    file.write_text(json.dumps({"model_type": "llama", "hidden_size": 4096, "num_attention_heads": 30}))
    assert main(["plan", str(file)]) == 2
    text = capsys.readouterr().err
    assert text.index("cannot be built here") < text.index("30") < text.index("num_hidden_layers"), text


def test_host_ram_at_load_is_what_is_counted(tomorrow, tmp_path, capsys):
    """The recipes train fp32 weights, whatever they are loaded in."""
    known = tmp_path / "known.json"
    known.write_text(json.dumps(TOMORROW | {"model_type": "llama", "num_key_value_heads": 32}))
    line = [*TWO_NODES, "--strategies", "zero2,zero3"]
    flags = ["--mixed_precision", "bf16", "--dtype", "bfloat16", "--per_device_train_batch_size", "1"]
    counted, formula = (
        {row["file"]: row["memory"]["host_at_load"] for row in planned(capsys, [*line, str(file), *flags])["rows"]}
        for file in (known, tomorrow)
    )
    assert formula == {"zero2": 8 * 4 * PARAMETERS, "zero3": 4 * (PARAMETERS + 2 * 8 * 32000 * 4096)}
    assert formula == pytest.approx(counted, rel=0.001)


def test_formulas_know_no_adapters_and_no_encoders(tomorrow, tmp_path, capsys):
    assert main(["plan", str(ROOT / "recipes" / "lora_finetune.py"), "--model_name_or_path", str(tomorrow)]) == 2
    text = capsys.readouterr().err
    assert "adapters" in text and "recipes/causal_lm.py" in text and "of-tomorrow" in text
    both = tmp_path / "both.json"
    both.write_text(json.dumps(TOMORROW | {"is_encoder_decoder": True}))
    assert main(["plan", str(both)]) == 2
    assert "encoder-decoders" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="decoders alone"):
        Decoder.of("both", TOMORROW | {"is_encoder_decoder": True})


def test_a_file_without_keys_is_named(tmp_path):
    file = tmp_path / "config.json"
    file.write_text("[]")
    with pytest.raises(ConfigError, match="holds a list"):
        read_config(str(file))


def test_names_and_shapes_of_decoders():
    gpt2 = {"n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 100}
    plain = Decoder.of("gpt2", gpt2)
    assert plain.parameters == 12 * 2 * 64**2 + 100 * 64 and plain.formula.startswith("12 L H^2 + V H = 104,704")
    assert Decoder.of("untied", gpt2 | {"tie_word_embeddings": False}).parameters == plain.parameters + 100 * 64
    shared = Decoder.of("shared", gpt2 | {"num_key_value_heads": 1})
    assert plain.layer - shared.layer == 2 * 64 * (64 - 16), "keys and values have one head of 16"
    gated = Decoder.of("gated", gpt2 | {"hidden_act": "silu"})
    assert gated.layer - plain.layer == 64 * 256
    assert Decoder.of("gated by its width", gpt2 | {"n_inner": 172}).gated
    assert not Decoder.of("said not to be", gpt2 | {"n_inner": 172, "activation_function": "relu"}).gated
