"""What a file says of its adapters outside its tensors: an alpha, and whether they are DoRA.

Sources: kohya's ``ss_network_alpha`` and ``ss_network_args``; diffusers' ``lora_adapter_metadata``; PEFT's
``adapter_config.json`` beside the file. A value that cannot be read counts as not given.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fulldiff.harness.files.container import Header
from fulldiff.harness.files.names import Family

CONFIG = "adapter_config.json"
DIFFUSERS = "lora_adapter_metadata"
PEFT_FAMILIES: frozenset[Family] = frozenset({"peft", "diffusers"})
KOHYA_FAMILIES: frozenset[Family] = frozenset({"kohya", "lycoris"})


@dataclass(frozen=True)
class Declared:
    """A file's metadata as read: kohya's alpha, whether all is DoRA, and PEFT configs by component."""

    alpha: float | None = None
    dora: bool = False
    configs: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def alpha_for(self, family: Family, module: str, rank: int | None) -> float | None:
        """The alpha that a module without an alpha tensor has, for a scale of alpha / ``rank``."""
        if family in KOHYA_FAMILIES:
            return self.alpha
        config = self._config(family, module)
        return peft_alpha(config, module, rank) if config else None

    def dora_for(self, family: Family, module: str) -> bool:
        """Whether the metadata says that a module is DoRA."""
        config = self._config(family, module)
        return self.dora if family in KOHYA_FAMILIES else bool(config and config.get("use_dora"))

    def _config(self, family: Family, module: str) -> Mapping[str, Any] | None:
        if family not in PEFT_FAMILIES:
            return None
        beside = self.configs.get("") if family == "peft" else None
        return self.configs.get(module.split(".")[0]) or beside


def declared(header: Header) -> Declared:
    """Everything that is said beside the tensors of one file."""
    args = _object(header.metadata.get("ss_network_args"))
    dora = str(args.get("dora_wd", "")).lower() in ("true", "1")
    configs = _by_component(_object(header.metadata.get(DIFFUSERS)))
    if (path := header.path.parent / CONFIG).is_file():
        configs[""] = _object(path.read_text(encoding="utf-8", errors="replace"))
    return Declared(number(header.metadata.get("ss_network_alpha")), dora, configs)


def peft_alpha(config: Mapping[str, Any], module: str, rank: int | None) -> float | None:
    """A PEFT config's alpha for one module, rewritten so that alpha / ``rank`` is PEFT's own scale.

    PEFT's scale is alpha / r, or alpha / √r with rsLoRA; either may differ by module.
    """
    alpha = number(_for_module(config.get("alpha_pattern"), module, config.get("lora_alpha", config.get("alpha"))))
    r = number(_for_module(config.get("rank_pattern"), module, config.get("r")))
    if alpha is None or r is None or r <= 0:
        return None
    scale = alpha / math.sqrt(r) if config.get("use_rslora") else alpha / r
    return scale * (r if rank is None else rank)


def number(value: object) -> float | None:
    """A finite number, also one written as text; None for anything else."""
    try:
        read = float(value) if isinstance(value, str | int | float) else math.nan
    except ValueError:
        return None
    return read if math.isfinite(read) else None


def _for_module(pattern: object, module: str, default: object) -> object:
    """PEFT's rule: a key is a regular expression for the end of a module's path."""
    for key, value in pattern.items() if isinstance(pattern, Mapping) else ():
        if re.fullmatch(rf"(.*\.)?({key})", module):
            return value
    return default


def _object(text: str | None) -> dict[str, Any]:
    """A JSON object; empty for bad JSON or another type, which metadata may hold."""
    try:
        value = json.loads(text or "{}")
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def _by_component(flat: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """``{"unet.r": 4}`` as ``{"unet": {"r": 4}}``."""
    found: dict[str, dict[str, Any]] = {}
    for key, value in flat.items():
        component, _, name = key.partition(".")
        found.setdefault(component, {})[name] = value
    return dict(found)
