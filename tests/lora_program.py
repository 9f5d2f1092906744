"""A program for the subject ``program:``, with numpy alone: LoRA on Linear layers in f32.

Its argument is what it does wrong: nothing, ``unscaled`` (alpha is left out) or ``dies``.
"""

import json
import os
import signal
import sys

from safetensors.numpy import load_file, save_file


def run(request, wrong):
    if request["layer"]["kind"] != "linear" or any(a["kind"] != "lora" for a in request["adapters"]):
        return {"unsupported": "only LoRA on Linear"}
    t = load_file(request["input"])
    if t["x"].dtype != "float32" or any(name.endswith(("diff_b", "dora_scale", "scale")) for name in t):
        return {"unsupported": "only plain LoRA in f32"}
    y = t["x"] @ t["weight"].T + t.get("bias", 0)
    for at, adapter in enumerate(request["adapters"]):
        up, down = t[f"{at}.lora_up.weight"].astype("f4"), t[f"{at}.lora_down.weight"].astype("f4")
        scale = float(t[f"{at}.alpha"].reshape(())) / len(down) if f"{at}.alpha" in t else 1.0
        rows = slice(*(adapter["rows"] or (0, y.shape[-1])))
        factor = adapter["strength"] * (1.0 if wrong == "unscaled" else scale)
        y[..., rows] += factor * ((t["x"] @ down.T) @ up.T)
    save_file({"y": y}, request["output"])
    return {}


wrong = "".join(sys.argv[1:])
print(json.dumps({"fulldiff": 1}), flush=True)
for line in sys.stdin:
    if wrong == "dies":
        os.kill(os.getpid(), signal.SIGSEGV)
    print(json.dumps(run(json.loads(line), wrong)), flush=True)
