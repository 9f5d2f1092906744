"""lycoris: equals: delta-padding-mode-zeros

Written by `fulldiff peers` from the case runtime/conv2d-8x15-k3x3-p1x1-reflect/lokr[w1.2x3+w2_a.4x2+w2_b.2x45]/f32-1x15x5x5/exact/159c4a6663.
It needs torch and lycoris-lora. Exit code 1: the output is not the expected one; 0: it is.
"""

import sys
import warnings

import torch
from torch import nn
from lycoris import modules

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
    module = modules.LokrModule("layer", base, 1.0, 2, None,
        use_tucker=False, bypass_mode=False, full_matrix=False).to(base.weight.dtype).eval()
    # LyCORIS chooses sizes of its own; these are the file's, with the flags its constructor sets for them.
    for own in [own for own in module._parameters if own.startswith("lokr_")]:
        del module._parameters[own]
    module.lokr_w1 = nn.Parameter(torch.tensor([[0, 1, -1], [1, 0, 0]], dtype=torch.float32).reshape((2, 3)))
    module.lokr_w2_a = nn.Parameter(torch.tensor([[-1, -1], [-1, 1], [1, -1], [-1, 0]], dtype=torch.float32).reshape((4, 2)))
    module.lokr_w2_b = nn.Parameter(torch.tensor([[0, 0, 0, -1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0,
      -1, 0, 0, 0, 0, 0, 0, 0],
     [0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0,
      0, 0, 0, 0, 0, 0, 0]], dtype=torch.float32).reshape((2, 45)))
    module.use_w1, module.use_w2, module.tucker = True, False, False
    module.scale = 1.0
    module.apply_to()
    return base(x)


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
