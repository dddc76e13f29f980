r"""Train a causal language model: a new one from a config, or one whose weights are loaded.

On GPUs, here eight:

    accelerate launch --config_file accelerate_configs/zero3.yaml --num_processes 8 recipes/causal_lm.py \
        --model_name_or_path tiiuae/falcon-7b --dataset_name Salesforce/wikitext \
        --dataset_config_name wikitext-2-raw-v1 --block_size 1024 --mixed_precision bf16 --output_dir outputs/falcon

The same on a laptop's CPU, two processes:

    accelerate launch --config_file accelerate_configs/zero3.yaml --num_processes 2 recipes/causal_lm.py \
        --model_name_or_path embedded:smollm2 --dataset_name embedded:stdlib --block_size 64 --max_eval_samples 16 \
        --per_device_train_batch_size 1 --max_train_steps 4 --output_dir outputs/causal_lm
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from zerobook.config import RecipeConfig
from zerobook.data.templates import CausalEncoder
from zerobook.training.recipe import Recipe
from zerobook.training.run import run

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class CausalLMConfig(RecipeConfig):
    length_key: ClassVar[str] = "block_size"

    config_name: str | None = Field(None, description="architecture to train from scratch: hub name or local folder")
    block_size: int = Field(1024, ge=2, description="tokens per block of text; for chats, the maximum number of tokens")
    assistant_only_loss: bool = Field(
        True,
        description="true: learn only the assistant's turns of a chat; false: learn all its tokens, except where the data "
        "itself says what to learn (a prompt with a completion, or a key such as train or weight)",
    )

    @property
    def initialised_from(self) -> str | None:
        return self.config_name

    def problems(self) -> list[str]:
        problems = super().problems()
        # Exactly one of the two has to be given.
        if (self.model_name_or_path is None) == (self.config_name is None):
            problems.append(
                f"model_name_or_path: it is {self.model_name_or_path!r} and config_name is {self.config_name!r}. Give one: "
                "--model_name_or_path to continue from weights, --config_name to start from scratch."
            )
        return problems


class CausalLM(Recipe[CausalLMConfig]):
    """Trains all weights to predict each token from the tokens before it. Everything else is inherited from `Recipe`."""

    config_class = CausalLMConfig

    def encoder(self, tokenizer: PreTrainedTokenizerBase) -> CausalEncoder:
        # Text becomes blocks of block_size tokens; chats keep their lengths.
        config = self.config
        return CausalEncoder(tokenizer, length=config.block_size, assistant_only_loss=config.assistant_only_loss)


if __name__ == "__main__":
    run(CausalLM)
