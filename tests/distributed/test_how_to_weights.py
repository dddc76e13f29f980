"""The files of docs/how-to/ that evaluate other weights than those they train: the same under every strategy, and resumed."""

from __future__ import annotations

import re
import runpy

import pytest
import safetensors.torch
import torch

from tests.harness import ROOT, launch, sampled


def code_of(page, folder):
    """Write a page's Python block under the name in its first line, and return the file."""
    text = (ROOT / "docs" / "how-to" / f"{page}.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert len(code.splitlines()) <= 60
    file = folder / code.splitlines()[0].removeprefix("# ")
    file.write_text(code)
    return file


def flags_of(page, folder, tiny):
    file = code_of(page, folder)
    flags = {
        "ema": {"hooks": f"{file}:EMA"},
        "schedule_free": {
            "hooks": f"{file}:UseMean",
            "optimizer": f"{file}:ScheduleFree",
            "lr_scheduler_type": "constant",
            "weight_decay": 0.1,
        },
    }[page]
    return {
        "model_name_or_path": tiny / "llama",
        "train_file": tiny / "chats.jsonl",
        "validation_split_percentage": 25,
        "block_size": 32,
        "learning_rate": 3e-3,
        "num_warmup_steps": 0,
        "max_train_steps": 6,
        "logging_steps": 1,
        "eval_steps": 2,
        "save_steps": 2,
        **flags,
    }


def run_of(strategy, ranks, output, flags):
    return launch(strategy, ranks, "causal_lm", output, per_device_train_batch_size=4 // ranks, **flags).read()


def held_out_losses(run):
    return {event["step"]: event["loss"] for event in run.events if event["type"] == "eval"}


def saved_model(run):
    return safetensors.torch.load_file(run.output / "model" / "model.safetensors")


@pytest.fixture(scope="module", params=["ema", "schedule_free"])
def runs(request, tiny, tmp_path_factory):
    """The page's name, its flags, and its run in one process."""
    folder = tmp_path_factory.mktemp(request.param)
    flags = flags_of(request.param, folder, tiny)
    return request.param, flags, run_of("single", 1, folder / "one", flags)


def test_the_optimizer_takes_the_steps_of_the_papers_algorithm(tmp_path):
    namespace = runpy.run_path(str(code_of("schedule_free", tmp_path)))
    rate, beta1, beta2, decay = 0.05, 0.9, 0.99, 0.1
    gradients = torch.randn(20, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    weight = torch.nn.Parameter(torch.linspace(-1, 1, 7, dtype=torch.float64))
    x = z = y = weight.detach().clone()
    square = torch.zeros_like(y)
    settings = {"lr": rate, "beta1": beta1, "beta2": beta2, "eps": 1e-8}
    optimizer = namespace["ScheduleFreeAdamW"]([{"params": [weight], "weight_decay": decay}], settings)

    for step, gradient in enumerate(gradients, 1):
        weight.grad = gradient.clone()
        optimizer.step()
        square = beta2 * square + (1 - beta2) * gradient**2
        z = z - rate * (gradient / ((square / (1 - beta2**step)).sqrt() + 1e-8) + decay * y)
        x = (1 - 1 / step) * x + z / step
        y = (1 - beta1) * z + beta1 * x

    torch.testing.assert_close(weight.detach(), y)
    torch.testing.assert_close(weight.detach() - (1 - beta1) * optimizer.state[weight]["lead"], x)


@pytest.mark.launch
@pytest.mark.parametrize(
    "strategy",
    sampled(["ddp", "zero1", "zero2", "zero3", "fsdp", "zero2_offload", "zero3_offload"], "zero2", "zero3", "fsdp"),
)
def test_other_weights_are_evaluated_and_saved_as_in_one_process(runs, strategy, tmp_path):
    _, flags, one = runs
    run = run_of(strategy, 2, tmp_path / "run", flags)
    assert run.losses == pytest.approx(one.losses, rel=1e-5)
    assert held_out_losses(run) == pytest.approx(held_out_losses(one), rel=1e-5)
    weights = saved_model(run)
    for name, expected in saved_model(one).items():
        torch.testing.assert_close(weights[name], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.launch
@pytest.mark.parametrize(
    "before, after",
    [
        ("zero2", "fsdp"),
        pytest.param("fsdp", "zero3", marks=pytest.mark.full),
        pytest.param("zero3", "single", marks=pytest.mark.full),
    ],
)
def test_a_killed_run_goes_on_with_them_under_another_strategy(runs, before, after, tmp_path):
    _, flags, one = runs
    hooks = [flags["hooks"], str(ROOT / "tests" / "distributed" / "run_hooks.py") + ":Dies"]
    launch(before, 2, "causal_lm", tmp_path / "run", per_device_train_batch_size=2, expect=None, **flags | {"hooks": hooks})
    ranks = 1 if after == "single" else 2
    run = run_of(after, ranks, tmp_path / "run", flags | {"resume_from_checkpoint": "auto"})
    assert run.event("resume")["step"] == 4
    assert held_out_losses(run) == pytest.approx(held_out_losses(one), rel=1e-5)
