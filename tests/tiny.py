"""Tiny models of the real classes, a tokenizer and data, made once and kept under .cache/.

The Llamas, the Mixtral and the composite Gemma 3 are trained for a moment, so that adapters on their frozen weights have
something to adapt.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def folder() -> Path:
    """The folder with the models, one folder each, and data files.

    ``wide`` has tensors that are large enough to be swapped; ``vocabulary`` has the embedding of SmolLM2-135M, 49152 x 576.
    """
    key = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:12]
    target = ROOT / ".cache" / "tests" / key
    if not target.exists():
        staging = target.with_name(f"{key}.{os.getpid()}")
        shutil.rmtree(staging, ignore_errors=True)
        staging.mkdir(parents=True)
        _make(staging)
        try:
            staging.rename(target)
        except OSError:
            shutil.rmtree(staging)
    return target


def _make(target: Path) -> None:
    import torch
    from transformers import (
        BartConfig,
        BlenderbotConfig,
        FalconConfig,
        Gemma3Config,
        Gemma3TextConfig,
        GPT2Config,
        LlamaConfig,
        MarianConfig,
        MBartConfig,
        MixtralConfig,
        MllamaConfig,
        PegasusConfig,
        Qwen3MoeConfig,
        RecurrentGemmaConfig,
        SiglipVisionConfig,
        T5Config,
    )

    tokenizer = _tokenizer()
    vocabulary = len(tokenizer)
    special = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2, "vocab_size": vocabulary}
    llama = {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True, **special}
    no_dropout = {"resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0}
    # the start and pad tokens of the released ones, as far as this tokenizer has them
    decoder = {**special, "d_model": 64, "max_position_embeddings": 128, "dropout": 0, "activation_dropout": 0}
    decoder |= {f"{side}_{what}": n for side in ("encoder", "decoder")
                for what, n in (("layers", 2), ("attention_heads", 4), ("ffn_dim", 128))}  # fmt: skip
    seq2seq = {
        "blenderbot": BlenderbotConfig(scale_embedding=True, decoder_start_token_id=1, **decoder),
        "bart": BartConfig(decoder_start_token_id=2, **decoder),
        "marian": MarianConfig(scale_embedding=True, decoder_start_token_id=2, forced_eos_token_id=2, **decoder),
        "mbart": MBartConfig(decoder_start_token_id=1, forced_eos_token_id=2, **decoder),
        "pegasus": PegasusConfig(scale_embedding=True, decoder_start_token_id=2, forced_eos_token_id=2, **decoder),
        "t5": T5Config(
            d_model=64, d_kv=16, d_ff=128, num_layers=2, num_heads=4, dropout_rate=0, decoder_start_token_id=2, **special
        ),
    }
    gemma3 = Gemma3TextConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        sliding_window=32,
        max_position_embeddings=128,
        **special,
    )
    # text never reaches its vision tower and projector
    vision = SiglipVisionConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, image_size=28, patch_size=14
    )
    images = {"mm_tokens_per_image": 4, "image_token_index": 511, "boi_token_index": 510, "eoi_token_index": 509}
    # every second layer attends to an image, and text passes it by
    layers = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, **special}
    frames = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_global_layers": 1, "attention_heads": 2}
    frames |= {"image_size": 28, "patch_size": 14, "vision_output_dim": 64, "intermediate_layers_indices": [0]}
    mllama = MllamaConfig(
        text_config={"num_hidden_layers": 3, "cross_attention_layers": [1], "max_position_embeddings": 128, **layers},
        vision_config=frames,
        image_token_index=vocabulary,
    )
    causal = {
        "gemma3": gemma3,
        "gemma3_composite": Gemma3Config(text_config=gemma3, vision_config=vision, tie_word_embeddings=True, **images),
        "qwen3_moe": Qwen3MoeConfig(
            hidden_size=64, intermediate_size=96, moe_intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, head_dim=16, num_experts=4, num_experts_per_tok=2, output_router_logits=True,
            router_aux_loss_coef=0.5, **special,
        ),
        "mllama": mllama,
        "recurrent": RecurrentGemmaConfig(
            hidden_size=64, intermediate_size=128, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=1,
            head_dim=16, lru_width=64, attention_window_size=32, **special,
        ),
        "llama": LlamaConfig(hidden_size=64, intermediate_size=128, num_hidden_layers=2, **llama),
        "wide": LlamaConfig(hidden_size=128, intermediate_size=8192, num_hidden_layers=1, **llama),
        "vocabulary": LlamaConfig(
            hidden_size=576, intermediate_size=64, num_hidden_layers=1, **(llama | {"vocab_size": 49152})
        ),
        "gpt2": GPT2Config(n_embd=64, n_layer=2, n_head=4, n_positions=128, **no_dropout, **special),
        "mixtral": MixtralConfig(
            hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
            num_local_experts=4, num_experts_per_tok=2, **special,
        ),
        "falcon": FalconConfig(
            hidden_size=64, num_hidden_layers=2, num_attention_heads=4, new_decoder_architecture=False, multi_query=True,
            hidden_dropout=0.0, attention_dropout=0.0, **special,
        ),
    }  # fmt: skip
    from zerobook.utils.model_config import auto_class

    for configs in (causal, seq2seq):
        for name, config in configs.items():
            torch.manual_seed(0)
            model = auto_class(type(config), encoder_decoder=configs is seq2seq).from_config(config)
            if name in ("llama", "mixtral", "gemma3_composite"):
                _train(model, tokenizer, _chats(), epochs=2)
            if name == "wide":  # forty times slower: fewer chats
                _train(model, tokenizer, [chat for chats in _files().values() for chat in chats], epochs=3)
            if name == "bart":
                model.final_logits_bias.normal_(std=0.5)  # 0 in new models, learnt in some released ones
            model.save_pretrained(target / name)
            tokenizer.save_pretrained(target / name)
    # as released files do, it lacks the bias that is 0 in every new model
    from safetensors.torch import load_file, save_file

    weights = target / "blenderbot" / "model.safetensors"
    save_file({k: v for k, v in load_file(weights).items() if k != "final_logits_bias"}, weights, {"format": "pt"})
    # the released BlenderBot keeps how it generates in config.json, as files of its time do
    file = target / "blenderbot" / "config.json"
    (target / "blenderbot" / "generation_config.json").unlink()
    own = {"min_length": 20, "max_length": 60, "num_beams": 10, "length_penalty": 0.65, "no_repeat_ngram_size": 3,
           "encoder_no_repeat_ngram_size": 3, "forced_eos_token_id": 2}  # fmt: skip
    file.write_text(json.dumps(json.loads(file.read_text()) | own, indent=1))
    _data(target)


def _tokenizer():
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=512, special_tokens=special, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    core.train_from_iterator([m["content"] for chat in _chats() for m in chat], trainer)
    # pad equals end of turn, as in many released models
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token="<|im_start|>", eos_token="<|im_end|>", pad_token="<|im_end|>"
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def _chats() -> list[list[dict[str, str]]]:
    from zerobook.data import embedded

    return [row["messages"] for row in embedded.rows("chatterbot")]


def seq2seq_rows(tokenizer, count: int) -> list[dict[str, list[int]]]:
    """First questions and answers of ``count`` dialogues, as token rows for an encoder-decoder model."""
    end = tokenizer.eos_token_id
    pairs = {chat[0]["content"]: chat[1]["content"] for chat in _chats()[::20]}
    ids = [[tokenizer(text)["input_ids"][:40] for text in pair] for pair in list(pairs.items())[:count]]
    return [{"input_ids": source, "labels": [*target, end]} for source, target in ids]


def causal_rows(tokenizer, chats: list[list[dict[str, str]]]) -> list[dict[str, list[int]]]:
    """Chats as token rows of at most 64, with the assistant's turns supervised."""
    from zerobook.data.formats import Chat
    from zerobook.data.templates import CausalEncoder

    encoded = CausalEncoder(tokenizer, length=64).encode([Chat(messages) for messages in chats])
    return [{"input_ids": e.input_ids, "labels": e.labels} for e in encoded]


def mean_loss(model, rows: list[dict[str, list[int]]]):
    """transformers' own loss: the mean over the supervised tokens of ``rows``. It shares nothing with zerobook.training."""
    import torch
    from torch.nn.utils.rnn import pad_sequence

    def padded(key: str, fill: int):
        return pad_sequence([torch.as_tensor(row[key]).long() for row in rows], batch_first=True, padding_value=fill)

    mask = pad_sequence([torch.ones(len(row["input_ids"]), dtype=torch.long) for row in rows], batch_first=True)
    return model(input_ids=padded("input_ids", 0), attention_mask=mask, labels=padded("labels", -100)).loss


def _train(model, tokenizer, chats: list[list[dict[str, str]]], epochs: int) -> None:
    import torch

    torch.set_num_threads(1)
    rows = causal_rows(tokenizer, chats)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for epoch in range(epochs):
        random.Random(epoch).shuffle(rows)
        for start in range(0, len(rows), 8):
            mean_loss(model, rows[start : start + 8]).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    with torch.no_grad():
        for name, chats in _files().items():
            loss = mean_loss(model, causal_rows(tokenizer, chats)).item()
            assert loss < 4, f"{name}: a tiny Llama is not trained: loss {loss:.2f}, and chance is ln 512 = 6.24"


def _files() -> dict[str, list[list[dict[str, str]]]]:
    """The chats of each data file."""
    chats = [chat for chat in _chats() if 20 < sum(len(m["content"]) for m in chat) < 120]
    chats = list({json.dumps(chat): chat for chat in chats}.values())  # the corpus repeats itself
    return {"chats": chats[:96], "few": chats[:8], "epoch24": chats[100:124]}


def _data(target: Path) -> None:
    for name, part in _files().items():
        lines = [json.dumps({"messages": chat}) for chat in part]
        (target / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    text = "\n".join(m["content"] for chat in _chats()[:400] for m in chat)
    (target / "text.txt").write_text(text)


if __name__ == "__main__":
    print(folder())
