"""peft-file: equals: delta-padding-mode-zeros

Written by `fulldiff peers` from the case runtime/conv2d-8x15-k3x3-p1x1-reflect/lokr[w1.2x3+w2_a.4x2+w2_b.2x45]/f32-1x15x5x5/exact/159c4a6663.
It needs torch and peft. Exit code 1: the output is not the expected one; 0: it is.
"""

import sys
import warnings

import torch
from torch import nn
import json
import tempfile
from math import inf, nan

import peft
from safetensors.torch import save_file

warnings.simplefilter("ignore")
base = nn.Conv2d(15, 8, (3, 3), stride=(1, 1), padding=(1, 1), dilation=(1, 1), groups=1, bias=True, padding_mode='reflect').to(torch.float32).eval().requires_grad_(False)
nn.init.zeros_(base.weight)
nn.init.zeros_(base.bias)
x = torch.tensor([[[[1, -1, 1, 1, -1], [-1, -1, 1, 0, 0], [1, 1, 1, 0, -1], [1, -1, 1, 1, 0], [-1, -1, 1, 1, -1]],
  [[-1, -1, 1, -1, 0], [0, 1, 1, -1, -1], [-1, -1, 0, -1, -1], [1, -1, -1, 1, 1], [-1, 1, -1, -1, 1]],
  [[-1, 0, 1, -1, -1], [-1, -1, 0, -1, 1], [1, 1, 0, -1, -1], [-1, 1, -1, 1, 1], [0, 0, -1, 1, 0]],
  [[-1, -1, 1, 0, -1], [-1, 1, 1, 1, 1], [1, -1, 1, -1, -1], [1, 1, -1, -1, -1], [0, 1, 0, -1, 1]],
  [[1, -1, 0, 1, 0], [1, -1, 1, 0, -1], [-1, 1, 0, 1, -1], [1, 1, 0, -1, -1], [-1, -1, -1, 1, -1]],
  [[1, -1, -1, 0, 0], [-1, 1, -1, 1, -1], [-1, 1, 1, 0, 1], [-1, -1, 1, -1, -1], [1, -1, -1, -1, -1]],
  [[1, 1, 1, -1, 0], [-1, 1, -1, -1, 1], [-1, 1, -1, 1, -1], [1, -1, -1, 1, 1], [0, 0, -1, 1, -1]],
  [[1, 1, -1, 1, 0], [1, -1, -1, -1, 1], [1, 1, 1, -1, 1], [-1, 1, 1, 1, 1], [-1, 0, 1, -1, 1]],
  [[-1, -1, -1, 1, 1], [1, -1, -1, 1, -1], [0, 1, 1, 1, -1], [1, -1, 1, -1, -1], [1, 1, -1, 1, 1]],
  [[-1, 1, 0, 1, 1], [-1, 1, -1, -1, 1], [1, 1, -1, -1, 1], [0, -1, 1, -1, 1], [-1, -1, 1, 1, 1]],
  [[1, 0, 1, -1, 1], [-1, 1, 1, 1, 1], [1, 1, 1, -1, -1], [-1, -1, -1, 1, 1], [-1, -1, -1, -1, 1]],
  [[-1, 1, 1, -1, -1], [1, -1, 0, -1, 1], [0, 1, -1, 1, 1], [1, 1, 1, 1, 1], [1, -1, -1, 1, 0]],
  [[1, 1, -1, 0, 0], [1, -1, 1, -1, -1], [-1, -1, -1, -1, 0], [1, 1, -1, 1, -1], [-1, -1, 1, -1, 1]],
  [[-1, 1, 1, 1, 1], [1, 1, -1, -1, -1], [0, 1, -1, 1, -1], [0, -1, -1, 1, -1], [1, -1, -1, 1, 0]],
  [[-1, 1, 1, -1, -1], [-1, 1, 1, -1, 1], [-1, -1, 0, 1, -1], [-1, 0, 1, -1, -1], [-1, -1, -1, -1, 1]]]], dtype=torch.float32)
# y = (W + ΔW) x in float64, and the error that rounding explains.
expected = torch.tensor([[[[0, 0, -3, 0, -1], [0, 2, -1, 0, 2], [-2, -2, -2, -1, 0], [2, 0, -1, -4, 2], [0, -1, 0, 0, 2]],
  [[-2, 0, -3, -4, 3], [0, -2, -1, 0, 2], [2, -2, -2, 1, 2], [2, 4, -1, 4, -2], [2, 3, 0, 0, 2]],
  [[2, 0, 3, 4, -3], [0, 2, 1, 0, -2], [-2, 2, 2, -1, -2], [-2, -4, 1, -4, 2], [-2, -3, 0, 0, -2]],
  [[-1, 0, -3, -2, 1], [0, 0, -1, 0, 2], [0, -2, -2, 0, 1], [2, 2, -1, 0, 0], [1, 1, 0, 0, 2]],
  [[1, -2, 2, 1, 0], [2, -1, 1, 0, 1], [0, -1, 2, 1, 0], [-2, 2, -1, 0, -2], [1, 2, -1, -1, -2]],
  [[-1, 2, -2, 1, 0], [-2, -3, -3, 4, -1], [4, 1, 2, 1, -2], [-2, 2, -1, 4, 2], [-1, -2, -1, 1, 2]],
  [[1, -2, 2, -1, 0], [2, 3, 3, -4, 1], [-4, -1, -2, -1, 2], [2, -2, 1, -4, -2], [1, 2, 1, -1, -2]],
  [[0, 0, 0, 1, 0], [0, -2, -1, 2, 0], [2, 0, 2, 1, -1], [-2, 2, -1, 2, 0], [0, 0, -1, 0, 0]]]], dtype=torch.float64)
allowed = 0.0


def run():
    at = model = nn.Module()
    at.add_module("conv_in", base)
    folder = tempfile.mkdtemp()
    save_file({
        "base_model.model.conv_in.lokr_w1": torch.tensor([[0.0, 1.0, -1.0], [1.0, 0.0, 0.0]], dtype=torch.float32),
        "base_model.model.conv_in.lokr_w2_a": torch.tensor([[-1.0, -1.0], [-1.0, 1.0], [1.0, -1.0], [-1.0, 0.0]], dtype=torch.float32),
        "base_model.model.conv_in.lokr_w2_b": torch.tensor([[0.0, 0.0, 0.0, -1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0,
      0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, -1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0,
      0.0],
     [0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0,
      0.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0,
      0.0]], dtype=torch.float32),
    }, f"{folder}/adapter_model.safetensors")
    config = {'alpha': 2.0,
     'alpha_pattern': {},
     'decompose_both': False,
     'decompose_factor': -1,
     'peft_type': 'LOKR',
     'r': 2,
     'rank_pattern': {},
     'target_modules': ['conv_in'],
     'use_effective_conv2d': False}
    json.dump(config, open(f"{folder}/adapter_config.json", "w"))
    model = peft.PeftModel.from_pretrained(model, folder, "a0")
    model.base_model.set_adapter(['a0'])
    layer = model.base_model.model.get_submodule("conv_in")
    layer.set_scale("a0", 1.0)
    model.eval()
    return layer(x)


try:
    with torch.no_grad():
        got = run().double()
except Exception as error:
    sys.exit(f"got {type(error).__name__}: {error}\nexpected {expected.tolist()}\ndiffers")
print("got", got.tolist())
print("expected", expected.tolist())
if got.shape != expected.shape or bool(((got - expected).abs() > allowed).any()):
    sys.exit("differs")
print("right")
