"""``zerobook completion``: completion of commands for bash and zsh.

eval "$(zerobook completion bash)"    in ~/.bashrc
eval "$(zerobook completion zsh)"     in ~/.zshrc
"""

from __future__ import annotations

import argparse

from zerobook.cli.arguments import Parser

ACTIONS = {
    "data": "prepare inspect",
    "checkpoint": "list verify inspect pin unpin prune",
    "runlog": "status why show compare note verify export report replay test-detector",
    "completion": "bash zsh",
}
SCRIPT = """_zerobook() {{
  local words=""
  if [ "$COMP_CWORD" = 1 ]; then words="{commands}"
  elif [ "$COMP_CWORD" = 2 ]; then case "${{COMP_WORDS[1]}}" in
{cases}
    esac
  fi
  COMPREPLY=($(compgen -W "$words" -- "${{COMP_WORDS[COMP_CWORD]}}"))
}}
complete -o default -F _zerobook zerobook
"""


def completion(arguments: list[str]) -> int:
    """Print the script that the shell evaluates."""
    from zerobook.cli.main import COMMANDS

    parser = Parser("zerobook completion", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shell", choices=["bash", "zsh"])
    known = parser.parse_args(arguments)
    if known.shell == "zsh":
        print("autoload -U +X bashcompinit && bashcompinit")
    cases = "\n".join(f'    {command}) words="{actions}";;' for command, actions in ACTIONS.items())
    print(SCRIPT.format(commands=" ".join(COMMANDS), cases=cases), end="")
    return 0
