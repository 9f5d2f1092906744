"""peft-merged: raised at layer.py:1781: RuntimeError

Written by `fulldiff peers` from the case runtime/conv3d-1x2-k1x1x1/lora[up.1x1x1x1x1+down.1x2x1x1x1]/f32-1x2x1x1x1/exact/a8a0235891.
It needs torch and peft. Exit code 1: the output is not the expected one; 0: it is.
"""

import sys
import warnings

import torch
from torch import nn
import peft

warnings.simplefilter("ignore")
base = nn.Conv3d(2, 1, (1, 1, 1), stride=(1, 1, 1), padding=(0, 0, 0), dilation=(1, 1, 1), groups=1, bias=True, padding_mode='zeros').to(torch.float32).eval().requires_grad_(False)
nn.init.zeros_(base.weight)
nn.init.zeros_(base.bias)
x = torch.tensor([[[[[1]]], [[[0]]]]], dtype=torch.float32)
# y = (W + ΔW) x in float64, and the error that rounding explains.
expected = torch.tensor([[[[[-1]]]]], dtype=torch.float64)
allowed = 0.0


def run():
    model = nn.Module()
    model.layer = base
    config = peft.LoraConfig(r=1, lora_alpha=1.0, target_modules=["layer"], init_lora_weights=False)
    peft.inject_adapter_in_model(config, model, "a0")
    layer = model.layer
    layer.lora_B["a0"].weight.data = torch.tensor([[[[[-1]]]]], dtype=torch.float32).reshape(layer.lora_B["a0"].weight.shape)
    layer.lora_A["a0"].weight.data = torch.tensor([[[[[1]]], [[[-1]]]]], dtype=torch.float32).reshape(layer.lora_A["a0"].weight.shape)
    layer.set_scale("a0", 1.0)
    model.layer.set_adapter(['a0'])
    model.eval()
    model.layer.merge()
    return model.layer(x)


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
