"""lycoris-functional: raised at lokr.py:276: RuntimeError

Written by `fulldiff peers` from the case runtime/linear-8x15/lokr[w1.2x3+w2_a.4x2+w2_b.2x5]/f32-0x15/normal/75dcf1e340.
It needs torch and lycoris-lora. Exit code 1: the output is not the expected one; 0: it is.
"""

import sys
import warnings

import torch
from torch import nn
from math import inf, nan

import lycoris.functional.locon, lycoris.functional.loha, lycoris.functional.lokr

warnings.simplefilter("ignore")
base = nn.Linear(15, 8, bias=True).to(torch.float32).eval().requires_grad_(False)
nn.init.zeros_(base.weight)
nn.init.zeros_(base.bias)
x = torch.zeros((0, 15), dtype=torch.float32)
# y = (W + ΔW) x in float64, and the error that rounding explains.
expected = torch.zeros((0, 8), dtype=torch.float64)
allowed = 0.0


def run():
    y = bare = base(x)
    options = {}
    factors = [
        torch.tensor([[0.6170654296875, 0.5711669921875, 1.1078948974609375],
     [-0.0909271240234375, 0.233978271484375, -0.3729095458984375]], dtype=torch.float32),
        None,
        None,
        None,
        torch.tensor([[0.28979673981666565, 0.212016761302948], [0.8327801823616028, -0.4633159637451172],
     [-0.08874990046024323, 0.07899469882249832], [-0.8003749847412109, 0.2744351029396057]], dtype=torch.float32),
        torch.tensor([[0.4127100706100464, -0.341427206993103, 0.5371211171150208, 0.2981090843677521, 0.015353409573435783],
     [0.19228993356227875, 0.6203888654708862, 0.2805572748184204, 0.7569266557693481, -0.3718385398387909]], dtype=torch.float32),
        None,
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
