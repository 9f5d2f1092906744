"""lycoris: raised at lokr.py:20: RuntimeError

Written by `fulldiff peers` from the case runtime/conv2d-2x4-k2x1/lokr[w1.1x2+t2.1x1x2x1+w2_a.1x2+w2_b.1x2]/f32-1x4x2x1/exact/9ea9e9b511.
It needs torch and lycoris-lora. Exit code 1: the output is not the expected one; 0: it is.
"""

import sys
import warnings

import torch
from torch import nn
from lycoris import modules

warnings.simplefilter("ignore")
base = nn.Conv2d(4, 2, (2, 1), stride=(1, 1), padding=(0, 0), dilation=(1, 1), groups=1, bias=True, padding_mode='zeros').to(torch.float32).eval().requires_grad_(False)
nn.init.zeros_(base.weight)
nn.init.zeros_(base.bias)
x = torch.tensor([[[[1], [0]], [[1], [-1]], [[-1], [-1]], [[1], [1]]]], dtype=torch.float32)
# y = (W + ΔW) x in float64, and the error that rounding explains.
expected = torch.tensor([[[[3]], [[0]]]], dtype=torch.float64)
allowed = 0.0


def run():
    module = modules.LokrModule("layer", base, 1.0, 1, None,
        use_tucker=True, bypass_mode=False, full_matrix=False).to(base.weight.dtype).eval()
    # LyCORIS chooses sizes of its own; these are the file's, with the flags its constructor sets for them.
    for own in [own for own in module._parameters if own.startswith("lokr_")]:
        del module._parameters[own]
    module.lokr_t2 = nn.Parameter(torch.tensor([[[[-1], [-1]]]], dtype=torch.float32).reshape((1, 1, 2, 1)))
    module.lokr_w1 = nn.Parameter(torch.tensor([[1, -1]], dtype=torch.float32).reshape((1, 2)))
    module.lokr_w2_a = nn.Parameter(torch.tensor([[1, 0]], dtype=torch.float32).reshape((1, 2)))
    module.lokr_w2_b = nn.Parameter(torch.tensor([[-1, 0]], dtype=torch.float32).reshape((1, 2)))
    module.use_w1, module.use_w2, module.tucker = True, False, True
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
