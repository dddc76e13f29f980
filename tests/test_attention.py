"""The kernels of torch's attention on a GPU: cuDNN's is not tried, and query heads share keys only where a kernel can."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from tests.alone import train
from zerobook.models.result import load_result
from zerobook.utils import attention

VARIABLE = "TORCH_CUDNN_SDPA_DEPRIORITIZED"


@pytest.fixture(autouse=True)
def settings_of_torch(monkeypatch):
    """Begin with the settings of a new process, and restore those of this one."""
    monkeypatch.delenv(VARIABLE, raising=False)
    was_enabled = torch.backends.cuda.cudnn_sdp_enabled()
    registered = ALL_ATTENTION_FUNCTIONS["sdpa"]
    torch.backends.cuda.enable_cudnn_sdp(True)
    ALL_ATTENTION_FUNCTIONS["sdpa"] = sdpa_attention_forward
    yield
    torch.backends.cuda.enable_cudnn_sdp(was_enabled)
    ALL_ATTENTION_FUNCTIONS["sdpa"] = registered


@pytest.fixture
def key_heads(monkeypatch):
    """Return the list of the key heads that each attention of torch gets."""
    heads = []
    plain_attention = torch.nn.functional.scaled_dot_product_attention

    def attend(query, key, value, **options):
        heads.append(key.shape[1])
        return plain_attention(query, key, value, **options)

    monkeypatch.setattr("torch.nn.functional.scaled_dot_product_attention", attend)
    return heads


def grouped_heads(device="cpu", dtype=torch.float32):
    """Return a module and its queries of 6 heads, keys and values of 2. Tensors on ``meta`` stand for those of a GPU."""
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(2, 6, 5, 4, generator=generator).requires_grad_()
    key, value = torch.randn(2, 2, 2, 5, 4, generator=generator).requires_grad_().unbind()
    module = SimpleNamespace(num_key_value_groups=3, is_causal=True)
    if device != "cpu":
        query, key, value = (torch.empty(tensor.shape, device=device, dtype=dtype) for tensor in (query, key, value))
    return module, query, key, value


@pytest.mark.parametrize("value, tries_cudnn", [(None, False), ("0", True), ("1", True)])
def test_a_loaded_model_does_not_try_cudnn_unless_the_user_has_chosen(tiny, monkeypatch, value, tries_cudnn):
    if value is not None:
        monkeypatch.setenv(VARIABLE, value)
    load_result(tiny / "llama")
    assert torch.backends.cuda.cudnn_sdp_enabled() is tries_cudnn


def test_a_training_does_not_try_cudnn_and_repeats_keys(tiny, tmp_path):
    flags = {"model_name_or_path": tiny / "llama", "train_file": tiny / "text.txt", "block_size": 16}
    train(tmp_path, validation_split_percentage=0, max_train_steps=1, **flags)
    assert not torch.backends.cuda.cudnn_sdp_enabled()
    assert ALL_ATTENTION_FUNCTIONS["sdpa"] is attention.attend_fused


@pytest.mark.parametrize("shares", [True, False])
def test_repeated_keys_attend_as_shared_ones_do(monkeypatch, key_heads, shares):
    module, query, key, value = grouped_heads()
    expected, _ = sdpa_attention_forward(module, query, key, value, None)
    expected_gradients = torch.autograd.grad(expected.square().sum(), (query, key, value))
    key_heads.clear()
    monkeypatch.setattr(attention, "has_flash_attention", lambda *_: shares)
    output, _ = attention.attend_fused(module, query, key, value, None)
    assert key_heads == [2 if shares else 6]
    torch.testing.assert_close(output, expected)
    torch.testing.assert_close(torch.autograd.grad(output.square().sum(), (query, key, value)), expected_gradients)


def test_attention_that_is_not_causal_stays_so(monkeypatch):
    module, *tensors = grouped_heads()
    module.is_causal = False
    expected, _ = sdpa_attention_forward(module, *tensors, None)
    monkeypatch.setattr(attention, "has_flash_attention", lambda *_: False)
    output, _ = attention.attend_fused(module, *tensors, None)
    torch.testing.assert_close(output, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gpu_shares_keys_only_where_torch_has_a_flash_kernel(monkeypatch, key_heads, dtype):
    monkeypatch.setattr(
        "torch.backends.cuda.can_use_flash_attention", lambda parameters: parameters.query.dtype == torch.bfloat16
    )
    attention.prepare_attention()
    module, *tensors = grouped_heads("meta", dtype)
    ALL_ATTENTION_FUNCTIONS["sdpa"](module, *tensors, None)
    assert key_heads == [2 if dtype == torch.bfloat16 else 6]


def test_the_dtype_of_autocast_decides(monkeypatch):
    dtypes = []
    monkeypatch.setattr(attention, "has_flash_attention", lambda dtype, *_: dtypes.append(dtype) or True)
    module, *tensors = grouped_heads()
    # torch.autocast refuses a device that this machine does not have.
    torch.set_autocast_enabled("cuda", True)
    torch.set_autocast_dtype("cuda", torch.bfloat16)
    try:
        attention.attend_fused(module, *tensors, None)
    finally:
        torch.set_autocast_enabled("cuda", False)
        torch.set_autocast_dtype("cuda", torch.float16)
    assert dtypes == [torch.bfloat16]


def test_the_ring_keeps_its_own_order():
    """torch's context parallelism is entered with flash attention first, and cuDNN before the last resort."""
    from torch.nn.attention import SDPBackend, _cur_sdpa_kernel_backends

    from zerobook.strategy.token_split import Ring

    class Unpatched(Ring):
        def _attending_around_ring(self):
            from contextlib import nullcontext

            return nullcontext()

    attention.prepare_attention()
    ring = object.__new__(Unpatched)
    with ring.attention():
        order = _cur_sdpa_kernel_backends(with_priority=True)
    assert order == [SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]
    assert not torch.backends.cuda.cudnn_sdp_enabled()


def test_compiled_layers_are_not_cut():
    _, *tensors = grouped_heads("meta")

    class Layer(torch.nn.Module):
        num_key_value_groups = 3
        is_causal = True

        def forward(self, query, key, value):
            return attention.attend_fused(self, query, key, value, None, dropout=0.0)[0]

    compiled = torch.compile(Layer(), backend="eager", fullgraph=True)
    assert compiled(*tensors).shape == (2, 5, 6, 4)
