"""lycoris-bypass: equals: lora-dilation-ignored or delta-dilation-ignored

Written by `fulldiff peers` from the case runtime/conv1d-1x1-k2-d2/lora[up.1x1x1+down.1x1x2]/f32-1x1x3/exact/c6653ad85f.
It needs torch and lycoris-lora. Exit code 1: the output is not the expected one; 0: it is.
"""

import sys
import warnings

import torch
from torch import nn
from lycoris import modules

warnings.simplefilter("ignore")
base = nn.Conv1d(1, 1, (2,), stride=(1,), padding=(0,), dilation=(2,), groups=1, bias=True, padding_mode='zeros').to(torch.float32).eval().requires_grad_(False)
nn.init.zeros_(base.weight)
nn.init.zeros_(base.bias)
x = torch.tensor([[[-1, 0, 1]]], dtype=torch.float32)
# y = (W + ΔW) x in float64, and the error that rounding explains.
expected = torch.tensor([[[-1]]], dtype=torch.float64)
allowed = 0.0


def run():
    module = modules.LoConModule("layer", base, 1.0, 1, None,
        use_tucker=False, bypass_mode=True).to(base.weight.dtype).eval()
    module.lora_down.weight.data = torch.tensor([[[0, -1]]], dtype=torch.float32).reshape(module.lora_down.weight.shape)
    module.lora_up.weight.data = torch.tensor([[[1]]], dtype=torch.float32).reshape(module.lora_up.weight.shape)
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
