"""Runs a recipe whose model has persistent buffers that change in training.

    accelerate launch ... buffers.py recipes/NAME.py [flags]

``seen`` (int64) counts the training forwards, ``average`` (fp32) follows it, ``router_bias`` (fp32) stays as it is.
"""

import runpy
import sys

import torch

from zerobook.training.hooks import Hook

BIAS = [1.0001, -2.0003, 3.0005]


class Buffers(Hook):
    def before_prepare(self, trainer, model):
        layer = next(module for module in model.modules() if isinstance(module, torch.nn.ModuleList))[0]
        layer.register_buffer("seen", torch.tensor([1001]))
        layer.register_buffer("average", torch.zeros(2))
        layer.register_buffer("router_bias", torch.tensor(BIAS))

        def before_forward(module, args):
            if module.training:
                module.seen += 1
                module.average.mul_(0.9).add_(0.1 * module.seen)

        layer.register_forward_pre_hook(before_forward)


if __name__ == "__main__":
    recipe = sys.argv[1]
    sys.argv = [*sys.argv[1:], "--hooks", f"{__file__}:Buffers"]
    runpy.run_path(recipe, run_name="__main__")
