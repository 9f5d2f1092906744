"""peft-unloaded: raised at layer.py:1781: RuntimeError

Written by `fulldiff peers` from the case runtime/conv3d-1x2-k1x1x1/lora[up.1x1x1x1x1+down.1x2x1x1x1]/f32-1x2x1x1x1/exact/a8a0235891.
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
base = nn.Conv3d(2, 1, (1, 1, 1), stride=(1, 1, 1), padding=(0, 0, 0), dilation=(1, 1, 1), groups=1, bias=True, padding_mode='zeros').to(torch.float32).eval().requires_grad_(False)
nn.init.zeros_(base.weight)
nn.init.zeros_(base.bias)
x = torch.tensor([[[[[1]]], [[[0]]]]], dtype=torch.float32)
# y = (W + ΔW) x in float64, and the error that rounding explains.
expected = torch.tensor([[[[[-1]]]]], dtype=torch.float64)
allowed = 0.0


def run():
    at = model = nn.Module()
    at.add_module("conv_in", base)
    folder = tempfile.mkdtemp()
    save_file({
        "base_model.model.conv_in.lora_A.weight": torch.tensor([[[[[1.0]]], [[[-1.0]]]]], dtype=torch.float32),
        "base_model.model.conv_in.lora_B.weight": torch.tensor([[[[[-1.0]]]]], dtype=torch.float32),
    }, f"{folder}/adapter_model.safetensors")
    config = {'alpha_pattern': {},
     'lora_alpha': 1.0,
     'peft_type': 'LORA',
     'r': 1,
     'rank_pattern': {},
     'target_modules': ['conv_in'],
     'use_dora': False}
    json.dump(config, open(f"{folder}/adapter_config.json", "w"))
    model = peft.PeftModel.from_pretrained(model, folder, "a0")
    model.base_model.set_adapter(['a0'])
    layer = model.base_model.model.get_submodule("conv_in")
    layer.set_scale("a0", 1.0)
    model.eval()
    return model.merge_and_unload().get_submodule("conv_in")(x)


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
