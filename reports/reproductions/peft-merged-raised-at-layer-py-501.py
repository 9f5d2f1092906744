"""peft-merged: raised at layer.py:501: RuntimeError

Written by `fulldiff peers` from the case runtime/conv2d-2x4-k2x1/lokr[w1.1x2+t2.1x1x2x1+w2_a.1x2+w2_b.1x2]/f32-1x4x2x1/exact/9ea9e9b511.
It needs torch and peft. Exit code 1: the output is not the expected one; 0: it is.
"""

import sys
import warnings

import torch
from torch import nn
import peft

warnings.simplefilter("ignore")
base = nn.Conv2d(4, 2, (2, 1), stride=(1, 1), padding=(0, 0), dilation=(1, 1), groups=1, bias=True, padding_mode='zeros').to(torch.float32).eval().requires_grad_(False)
nn.init.zeros_(base.weight)
nn.init.zeros_(base.bias)
x = torch.tensor([[[[1], [0]], [[1], [-1]], [[-1], [-1]], [[1], [1]]]], dtype=torch.float32)
# y = (W + ΔW) x in float64, and the error that rounding explains.
expected = torch.tensor([[[[3]], [[0]]]], dtype=torch.float64)
allowed = 0.0


def run():
    model = nn.Module()
    model.layer = base
    config = peft.LoKrConfig(r=1, alpha=1.0, target_modules=["layer"], init_weights=False)
    peft.inject_adapter_in_model(config, model, "a0")
    layer = model.layer
    # PEFT chooses sizes of its own; these are the file's.
    for own in layer.adapter_layer_names:
        if "a0" in getattr(layer, own):
            del getattr(layer, own)["a0"]
    layer.create_adapter_parameters("a0", 1, ((1, 2), (2, 2), 2, 1), True, False, True)
    layer.lokr_t2["a0"].data = torch.tensor([[[[-1], [-1]]]], dtype=torch.float32).reshape(layer.lokr_t2["a0"].shape)
    layer.lokr_w1["a0"].data = torch.tensor([[1, -1]], dtype=torch.float32).reshape(layer.lokr_w1["a0"].shape)
    layer.lokr_w2_a["a0"].data = torch.tensor([[1, 0]], dtype=torch.float32).reshape(layer.lokr_w2_a["a0"].shape)
    layer.lokr_w2_b["a0"].data = torch.tensor([[-1, 0]], dtype=torch.float32).reshape(layer.lokr_w2_b["a0"].shape)
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
