"""Optimizers in one process: their state, steps that are skipped, checkpoints, and what is refused before a launch."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from recipes.causal_lm import CausalLMConfig
from tests.harness import read_tensors
from tests.test_resolve import CPU, WORKER, deepspeed, plan_for
from tests.test_strategy import Fp16OnCpu, make, step, two_layers  # noqa: F401  a fixture
from zerobook.checkpoint import state, store
from zerobook.checkpoint.progress import Progress
from zerobook.checkpoint.save import Saver
from zerobook.errors import CheckpointError, ConfigError
from zerobook.optimizer import OPTIMIZERS, optimizer_spec
from zerobook.plan.sharding import ShardingSpec
from zerobook.plan.state_bytes import ModelWeights, Weight, count_states

FIXTURES = Path(__file__).parent / "fixtures"
OWN = """
import torch
from zerobook.optimizer import OptimizerSpec

class Plain(torch.optim.Optimizer):
    def __init__(self, groups, lr):
        super().__init__(groups, {"lr": lr, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    last = self.state[weight].setdefault("last", torch.zeros_like(weight))
                    weight.sub_(last.copy_(weight.grad), alpha=group["lr"])

class Own(OptimizerSpec):
    def build(self, groups, config):
        return Plain(groups, config.learning_rate)

    def state_shapes(self, shape):
        return {"last": shape}

class Unfinished(OptimizerSpec):
    def build(self, groups, config): ...
"""


@pytest.fixture
def own(tmp_path):
    file = tmp_path / "own.py"
    file.write_text(OWN)
    return f"{file}:Own"


@pytest.fixture(params=[*OPTIMIZERS, "own"])
def said(request, own):
    return own if request.param == "own" else request.param


def wide():
    """A model with weights that have 8-bit state, one of them with a last block that is not full."""
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 2500), torch.nn.Linear(2500, 1))


def held(strategy):
    return {
        f"{key}/{name}": strategy.get_tensor(p, key).clone()
        for name, p in strategy.trainable()
        for key in (None, *strategy.state_shapes(p))
    }


def same(one, other):
    return set(one) == set(other) and all(torch.equal(one[name], other[name]) for name in one)


def test_a_step_is_torchs_own(make):  # noqa: F811
    """Three steps of the strategy, clipped by nothing, against the plain optimizer on the same gradients."""
    built = {
        "adamw": lambda p: torch.optim.AdamW(p, weight_decay=0.1),
        "sgd": lambda p: torch.optim.SGD(p, momentum=0.9, weight_decay=0.1),
        "adafactor": lambda p: torch.optim.Adafactor(p, weight_decay=0.1),
        "paged_adamw": lambda p: torch.optim.AdamW(p, weight_decay=0.1),
        "adamw_8bit": lambda p: torch.optim.AdamW(p, weight_decay=0.1),  # the moments of small weights are fp32
    }
    for name, build in built.items():
        strategy, plain = make(optimizer=name, weight_decay=0.1, max_grad_norm=0), two_layers()
        matrices, vectors = [p for p in plain.parameters() if p.dim() > 1], [p for p in plain.parameters() if p.dim() < 2]
        optimizer = build([{"params": matrices}, {"params": vectors, "weight_decay": 0.0}])
        for rate in (1e-2, 2e-2, 1e-3):
            with strategy.micro_batch(last=True):
                strategy.backward(strategy.model(torch.ones(2, 4)).sum())
            strategy.optimizer_step(rate)
            plain(torch.ones(2, 4)).sum().backward()
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizer.step()
            optimizer.zero_grad()
        for mine, theirs in zip(strategy.model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-7, msg=name)


@pytest.mark.parametrize("scaled", [False, True])
def test_a_gradient_that_is_not_finite_changes_nothing_and_counts_no_step(make, said, scaled):  # noqa: F811
    """The first step of all, too: torch leaves the buffers of a fused SGD without values there."""
    kind = {"kind": Fp16OnCpu} if scaled else {}
    strategy, clean = make(optimizer=said, weight_decay=0.1, **kind), make(optimizer=said, weight_decay=0.1, **kind)
    _, norm = step(strategy, scale=float("nan"))
    assert not math.isfinite(norm) and strategy.optimizer_steps() == 0
    for _ in range(2):
        step(strategy)
        step(clean)
    before = held(strategy)
    assert strategy.optimizer_steps() == 2 and same(before, held(clean))
    assert all(tensor.isfinite().all() for tensor in before.values())
    step(strategy, scale=float("inf"))
    assert strategy.optimizer_steps() == 2 and same(held(strategy), before)
    step(strategy)
    assert strategy.optimizer_steps() == 3 and not same(held(strategy), before)


def save(strategy, folder, optimizer, taken=2):
    saver = Saver(strategy, str(folder), keep=None)
    saver.save(Progress(step=taken), {"config": {"optimizer": optimizer}})
    (saved,) = saver.results()
    assert saved.problem is None, saved.problem
    return saved.checkpoint


def test_a_checkpoint_goes_on_bit_for_bit(make, said, tmp_path):  # noqa: F811
    strategy = make(optimizer=said, model=wide())
    step(strategy), step(strategy)
    checkpoint = save(strategy, tmp_path, said)
    assert store.find_damage(checkpoint, thorough=True) is None
    assert {t.dtype for t in read_tensors(checkpoint).values()} == {torch.float32}
    tensors, now = read_tensors(checkpoint), held(strategy)
    assert same(tensors, {name.replace("None/", "weight/"): tensor for name, tensor in now.items()})
    resumed = make(optimizer=said, model=wide())
    state.load(resumed, checkpoint)
    assert resumed.optimizer_steps() == 2
    step(strategy), step(resumed)
    assert same(held(strategy), held(resumed)) and resumed.optimizer_steps() == 3


def test_a_checkpoint_without_the_state_of_a_changed_optimizer_is_refused(make, own, tmp_path):  # noqa: F811
    strategy = make(optimizer=own)
    step(strategy)
    checkpoint = save(strategy, tmp_path / "run", own)
    for name, new in (("other", '{"other": shape}'), ("smaller", '{"last": shape[:1]}')):
        file = tmp_path / f"{name}.py"
        file.write_text(OWN.replace('{"last": shape}', new))
        with pytest.raises(CheckpointError, match=f"the optimizer state {'other' if name == 'other' else 'last'}/0.weight is"):
            state.load(make(optimizer=f"{file}:Own"), checkpoint)


def bits(strategy):
    states = strategy.optimizer.optimizer.state.values()
    return [state[key] for state in states for key in ("state1", "state2") if state[key].dtype == torch.uint8]


def test_a_checkpoint_brings_back_the_very_bits(make, tmp_path):  # noqa: F811
    """Also those of blocks whose largest number is negative, which bitsandbytes itself would round another time."""
    strategy = make(optimizer="adamw_8bit", model=wide())
    for scale in (1.0, -2.0, 0.5):
        step(strategy, scale=scale)
    checkpoint = save(strategy, tmp_path, "adamw_8bit")
    resumed = make(optimizer="adamw_8bit", model=wide())
    state.load(resumed, checkpoint)
    before, after = bits(strategy), bits(resumed)
    assert len(before) == len(after) == 2 and len(before[0].unique()) > 100
    assert all(torch.equal(*pair) for pair in zip(before, after, strict=True))
    weight = resumed.model[0].weight
    moment, largest = resumed.get_tensor(weight, "exp_avg").flatten(), resumed.get_tensor(weight, "exp_avg_scale")
    blocks = list(moment.split(256))
    assert len(blocks) == len(largest) == 40 and len(blocks[-1]) == 16
    shrunk = [block.abs().max() / scale for block, scale in zip(blocks, largest, strict=True)]
    assert min(shrunk) < 0.999 < max(shrunk), "both kinds of blocks"


def test_moments_in_8_bits_are_near_those_in_fp32(make):  # noqa: F811
    strategy, exact = (make(optimizer=said, model=wide()) for said in ("adamw_8bit", "adamw"))
    for scale in (1.0, -2.0, 0.5, 1.0):
        step(strategy, scale=scale)
        step(exact, scale=scale)
    for (name, mine), (_, theirs) in zip(strategy.trainable(), exact.trainable(), strict=True):
        for key in ("exp_avg", "exp_avg_sq"):
            ours, reference = strategy.get_tensor(mine, key), exact.get_tensor(theirs, key)
            assert (ours - reference).norm() < 0.03 * reference.norm(), (name, key)


@pytest.mark.parametrize(
    "written, now",
    [("adamw_8bit", "adamw"), ("adamw_8bit", "paged_adamw_8bit"), ("paged_adamw", "adamw"), ("adamw", "paged_adamw")],
)
def test_a_checkpoint_goes_on_under_an_optimizer_whose_state_it_holds(make, tmp_path, written, now):  # noqa: F811
    strategy = make(optimizer=written, model=wide())
    step(strategy), step(strategy, scale=-2.0)
    checkpoint = save(strategy, tmp_path, written)
    resumed = make(optimizer=now, model=wide())
    state.load(resumed, checkpoint)
    assert resumed.optimizer_steps() == 2
    before, after = held(strategy), held(resumed)
    assert any("exp_avg_sq/" in name for name in after) and all(torch.equal(after[name], before[name]) for name in after)
    step(strategy, scale=0.5), step(resumed, scale=0.5)
    for mine, theirs in zip(strategy.model.parameters(), resumed.model.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)


GPU = pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")])


@pytest.mark.parametrize("device", ["cpu", GPU])
@pytest.mark.parametrize("said", ["adamw_8bit", "paged_adamw", "paged_adamw_8bit"])
def test_state_is_read_and_written_where_it_lies(said, device):
    """The weight is large enough to be paged, which only a GPU does."""
    spec, config = optimizer_spec(said), CausalLMConfig(model_name_or_path="x", dataset_name="x", learning_rate=1e-2)
    torch.manual_seed(0)
    weights = [torch.nn.Parameter(torch.zeros(400, 300, device=device)) for _ in range(2)]
    one, other = (spec.build([{"params": [weight], "weight_decay": 0.0}], config) for weight in weights)
    gradients = [torch.randn(400, 300).to(device) for _ in range(3)]
    for gradient in gradients[:2]:
        weights[0].grad = gradient.clone()
        one.step()
    spec.init_state(other, weights[1])
    with torch.no_grad():
        weights[1].copy_(weights[0])
        for key, shape in spec.state_shapes(weights[0].shape).items():
            value = spec.get_state(one, weights[0], key)
            assert value.dtype == torch.float32 and value.shape == shape
            spec.set_state(other, weights[1], key, value.clone())
    spec.set_step(other, 2)
    for optimizer, weight in zip((one, other), weights, strict=True):
        weight.grad = gradients[2].clone()
        optimizer.step()
    assert torch.equal(*weights) and weights[0].abs().max() > 0 and spec.get_step(other) == 3


def test_adamws_checkpoints_stay_of_the_format_that_earlier_versions_read(make, tmp_path):  # noqa: F811
    """A checkpoint that an earlier version wrote is read, and the same training gives the same tensors and index."""
    old = FIXTURES / "format4" / "step-000003"
    assert store.find_damage(old, thorough=True) is None
    torch.manual_seed(0)
    strategy = make(model=torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 1)))
    for scale in (1.0, 2.0, 3.0):
        step(strategy, scale=scale)
    new = save(strategy, tmp_path, "adamw", taken=3)
    assert store.read_json(new / store.MANIFEST)["format_version"] == 4
    found, before = read_tensors(new), read_tensors(old)
    assert set(found) == set(before)
    for name in before:
        torch.testing.assert_close(found[name], before[name], rtol=1e-5, atol=1e-6)
    assert json.loads((new / "tensors.json").read_text()) == json.loads((old / "tensors.json").read_text())
    resumed = make()
    state.load(resumed, old)
    assert resumed.optimizer_steps() == 3


def test_other_optimizers_checkpoints_have_a_format_that_earlier_versions_refuse(make, tmp_path):  # noqa: F811
    strategy = make(optimizer="adafactor")
    step(strategy)
    checkpoint = save(strategy, tmp_path, "adafactor")
    assert store.read_json(checkpoint / store.MANIFEST)["format_version"] == 5
    shapes = read_tensors(checkpoint)
    assert shapes["row_var/0.weight"].shape == (8, 1) and shapes["col_var/0.weight"].shape == (1, 4)
    assert shapes["variance/0.bias"].shape == (8,)


def test_a_checkpoint_of_another_optimizer_is_refused_with_both_names(make, own, tmp_path):  # noqa: F811
    for written, now in (("sgd", "adamw"), ("adamw", "sgd"), (own, "sgd"), ("adafactor", own), ("adamw", "adamw_8bit")):
        strategy = make(optimizer=written)
        checkpoint = save(strategy, tmp_path / written.replace("/", "_") / now.replace("/", "_"), written)
        with pytest.raises(CheckpointError) as refused:
            state.load(make(optimizer=now), checkpoint)
        name = now.rpartition(":")[2]
        assert f"the optimizer {written}" in str(refused.value) and f"this run's is {name}" in str(refused.value)
        config = {"output_dir": str(checkpoint.parents[1]), "resume_from_checkpoint": "auto", "optimizer": now}
        (checkpoint / "config.json").write_text(
            json.dumps({"asked": {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 1},
                        "config": {"optimizer": written}})
        )  # fmt: skip
        from tests.harness import reseal

        reseal(checkpoint)
        problems = plan_for(WORKER, **config)[0].problems
        assert any(p.startswith("resume_from_checkpoint: ") and written in p and name in p for p in problems), problems


def test_what_a_strategy_cannot_step_is_refused_before_anything_starts(tmp_path, own):
    fsdp = WORKER | {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}
    for said in ("adafactor", "adamw_8bit", "paged_adamw", own):
        for environ, name in ((deepspeed(tmp_path), "ZeRO-"), (fsdp, "FSDP2")):
            (problem,) = plan_for(environ, optimizer=said)[0].problems
            assert said in problem and name in problem and "ddp.yaml" in problem and "whole weights" in problem
        assert not plan_for(WORKER, optimizer=said)[0].problems
    for environ in (deepspeed(tmp_path), fsdp, WORKER):
        assert not plan_for(environ, optimizer="sgd")[0].problems
    nvme = deepspeed(tmp_path, zero_optimization={"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": "/x"}})
    (problem,) = plan_for(nvme, CPU, optimizer="sgd")[0].problems
    assert "sgd" in problem and "disk" in problem and "zero3_offload.yaml" in problem
    plan, _ = plan_for(
        deepspeed(tmp_path, zero_optimization={"stage": 2, "offload_optimizer": {"device": "cpu"}}), optimizer="sgd"
    )
    assert not plan.problems and plan.deepspeed_config["zero_force_ds_cpu_optimizer"] is False


def test_an_optimizer_in_the_json_beside_another_is_refused_with_both(tmp_path):
    environ = deepspeed(tmp_path, optimizer={"type": "AdamW", "params": {"lr": "auto"}})
    (problem,) = plan_for(environ, optimizer="sgd")[0].problems
    assert 'optimizer.type is "AdamW"' in problem and "optimizer is sgd (from flag --optimizer)" in problem


@pytest.mark.parametrize(
    "said, words",
    [
        ("adm", "adamw, sgd, adafactor"), ("nowhere.py:Own", "there is no file nowhere.py"),
        ("OWN:Missing", "has no Missing"), ("OWN:Unfinished", "does not define state_shapes"),
        ("BAD:Own", "ZeroDivisionError"),
    ],
)  # fmt: skip
def test_an_optimizer_that_is_not_there_is_refused(tmp_path, own, said, words):
    (tmp_path / "bad.py").write_text("1 / 0\nclass Own: ...\n")
    said = said.replace("OWN", own.rpartition(":")[0]).replace("BAD", str(tmp_path / "bad.py"))
    with pytest.raises(ConfigError) as refused:
        optimizer_spec(said)
    assert words in str(refused.value) and "optimizer" in str(refused.value)
    assert words in plan_for(WORKER, optimizer=said)[0].problems[0]


def test_the_planner_counts_the_state_that_is_held(make, said):  # noqa: F811
    strategy = make(optimizer=said, model=wide())
    step(strategy)
    weights = [Weight(name, tuple(p.shape), 4, trained=True) for name, p in strategy.model.named_parameters()]
    spread = ShardingSpec(kind="single", name="one process", ranks=1, ranks_per_node=1, optimizer=said)
    assert count_states(ModelWeights(weights, [weights]), spread).live.optimizer == strategy.memory()["optimizer"] > 0
