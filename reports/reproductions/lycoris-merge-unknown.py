"""lycoris-merge: unknown (not finite)

Written by `fulldiff peers` from the case runtime/linear-5x5/lora[up.5x1+down.1x5]&loha[hada_w1_a.5x1+hada_w1_b.1x5+hada_w2_a.5x1+hada_w2_b.1x5]/f16-5/special/c2959dc58f.
It needs torch and lycoris-lora. Exit code 1: the output is not the expected one; 0: it is.
"""

import sys
import warnings

import torch
from torch import nn
from lycoris import modules

warnings.simplefilter("ignore")
base = nn.Linear(5, 5, bias=True).to(torch.float16).eval().requires_grad_(False)
nn.init.zeros_(base.weight)
nn.init.zeros_(base.bias)
x = torch.tensor([1.625, 4.55859375, -3.07421875, 0.2122802734375, -7.9375], dtype=torch.float16)
# y = (W + ΔW) x in float64, and the error that rounding explains.
expected = torch.tensor([-115.34933080696409, 49.85558524458475, -3.792044548846192, -10.491530571388896, -10266.856369177782], dtype=torch.float64)
allowed = 91.28597663548895


def run():
    module = modules.LoConModule("layer", base, 1.0, 1, None,
        use_tucker=False, bypass_mode=False).to(base.weight.dtype).eval()
    module.lora_down.weight.data = torch.tensor([[3.552734375, 2.671875, 0.0, -0.0703125, 0.19775390625]], dtype=torch.float16).reshape(module.lora_down.weight.shape)
    module.lora_up.weight.data = torch.tensor([[0.0726318359375], [0.01003265380859375], [0.046875], [0.47900390625], [2.36328125]], dtype=torch.float16).reshape(module.lora_up.weight.shape)
    module.merge_to(1.0)
    module = modules.LohaModule("layer", base, 1.0, 1, 7.0,
        use_tucker=False, bypass_mode=False).to(base.weight.dtype).eval()
    module.hada_w1_a.data = torch.tensor([[-0.050750732421875], [-0.01241302490234375], [-0.1387939453125], [-0.141357421875], [19.1875]], dtype=torch.float16).reshape(module.hada_w1_a.shape)
    module.hada_w1_b.data = torch.tensor([[-0.13037109375, 1.2783203125, 1.083984375, -0.203369140625, 1.0087890625]], dtype=torch.float16).reshape(module.hada_w1_b.shape)
    module.hada_w2_a.data = torch.tensor([[8.1875], [-14.2734375], [0.11712646484375], [0.46240234375], [-1.9150390625]], dtype=torch.float16).reshape(module.hada_w2_a.shape)
    module.hada_w2_b.data = torch.tensor([[-0.1622314453125, -0.006038665771484375, -5.27734375, -0.52734375, -2.8046875]], dtype=torch.float16).reshape(module.hada_w2_b.shape)
    module.merge_to(1.0)
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
