"""lycoris-functional: equals: tucker-a-not-transposed

Written by `fulldiff peers` from the case runtime/conv1d-2x1-k1/lokr[w1.1x1+t2.2x2x1+w2_a.2x2+w2_b.2x1]/f32-1x1x1/exact/cf7f0c0257.
It needs torch and lycoris-lora. Exit code 1: the output is not the expected one; 0: it is.
"""

import sys
import warnings

import torch
from torch import nn
from math import inf, nan

import lycoris.functional.locon, lycoris.functional.loha, lycoris.functional.lokr

warnings.simplefilter("ignore")
base = nn.Conv1d(1, 2, (1,), stride=(1,), padding=(0,), dilation=(1,), groups=1, bias=True, padding_mode='zeros').to(torch.float32).eval().requires_grad_(False)
nn.init.zeros_(base.weight)
nn.init.zeros_(base.bias)
x = torch.tensor([[[1]]], dtype=torch.float32)
# y = (W + ΔW) x in float64, and the error that rounding explains.
expected = torch.tensor([[[-2], [0]]], dtype=torch.float64)
allowed = 0.0


def run():
    y = bare = base(x)
    options = {"stride": base.stride, "padding": base.padding, "dilation": base.dilation}
    factors = [
        torch.tensor([[-1.0]], dtype=torch.float32),
        None,
        None,
        None,
        torch.tensor([[1.0, 0.0], [1.0, 0.0]], dtype=torch.float32),
        torch.tensor([[-1.0], [-1.0]], dtype=torch.float32),
        torch.tensor([[[-1.0], [-1.0]], [[-1.0], [1.0]]], dtype=torch.float32),
    ]
    call = lycoris.functional.lokr.bypass_forward_diff
    y = y + call(x, bare, *factors, gamma=2.0, extra_args=options) * 1.0
    return y


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
