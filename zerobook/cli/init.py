"""``zerobook init``: make a folder to work in, with the recipes, their configs and the strategy files.

zerobook init my-training

The files are copies to be edited. A clone has them at its root.
"""

import argparse
import shlex
import shutil
from pathlib import Path

from zerobook.cli.arguments import Parser
from zerobook.utils.files import require_new
from zerobook.utils.shipped import shipped
from zerobook.utils.terminal import say

# Shipped folder -> pattern of the files in it.
_COPIED = {"recipes": "[!_]*.py", "recipes/configs": "**/*.*", "accelerate_configs": "**/*.yaml", "ds_configs": "**/*.json"}
_CONFIG = """\
# LoRA on a small chat model. Every key is a flag, too; recipes/lora_finetune.py --help prints all of them.
model_name_or_path: HuggingFaceTB/SmolLM2-135M-Instruct  # a hub name or a folder
train_file: chats.jsonl  # your data; a line is a chat:
# {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]}
max_seq_length: 512
per_device_train_batch_size: 4
learning_rate: 1e-3
lr_scheduler_type: cosine
# mixed_precision: bf16  # on GPUs; fp16 on those that lack bf16
max_train_steps: 100
save_steps: 25
output_dir: outputs/first
"""
_LAUNCH = "--config_file accelerate_configs/zero2.yaml --num_processes 2 recipes/lora_finetune.py --config config.yaml"
_CHECK = f"zerobook doctor {_LAUNCH}"
_TRAIN = f"accelerate launch {_LAUNCH}"
_README = f"""\
# Training with Zerobook

| | |
|---|---|
| `config.yaml` | the model, the data and the flags of a first run; edit it |
| `recipes/` | what is trained: a Python file each, with examples in `recipes/configs/` |
| `accelerate_configs/` | how it is spread over processes: a strategy file each, with what it costs in its header |
| `ds_configs/` | the DeepSpeed settings that some of the strategy files name |

Commands are typed in this folder.

```bash
# what would happen, and what disagrees; nothing is started
{_CHECK}
# train
{_TRAIN}
# what happened
zerobook runlog status outputs/first
```

`zerobook launch --strategy zero2 --num_processes 2 lora_finetune --config config.yaml` is the same launch: names stand for the
files of this folder.

`zerobook --help` lists the other commands. `zerobook plan recipes/lora_finetune.py --config config.yaml` prints the memory
and the time of every strategy file.
"""


def init(arguments: list[str]) -> int:
    """Run the command with its arguments, and return the exit code."""
    parser = Parser("zerobook init", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", help="the folder to write; it must not exist, or be empty")
    folder = Path(parser.parse_args(arguments).folder).expanduser()
    require_new(folder, "folder")
    for name, pattern in _COPIED.items():
        (folder / name).mkdir(parents=True)
        for file in sorted(shipped(name).glob(pattern)):
            target = folder / name / file.relative_to(shipped(name))
            target.parent.mkdir(exist_ok=True)
            shutil.copyfile(file, target)
    (folder / "config.yaml").write_text(_CONFIG)
    (folder / "README.md").write_text(_README)
    say(f"wrote {folder}: recipes, strategy files, config.yaml and README.md. Name your data in config.yaml, and go on there:")
    say(f"  cd {shlex.quote(str(folder))}\n  {_CHECK}\n  {_TRAIN}")
    return 0
