"""cloneofsimo's positional names, ``unet:{i}:up``: which layer of Stable Diffusion 1.5 position i is.

A file counts the Linear layers below modules of the classes that its metadata lists, in the order of the
module walk of the libraries of that time:

- UNet: down blocks, up blocks, mid block (``mid_block`` was registered last); in a transformer block attn1
  (to_q, to_k, to_v, to_out.0), then the GEGLU of ff (net.0.proj), then attn2: 144. The two real files'
  shapes agree with this order alone.
- Text encoder: each layer's CLIPAttention, in the order transformers' class registers its children:
  k_proj, v_proj, q_proj, out_proj: 48. All are 768 × 768, so shapes cannot show it; the sizes of the real
  deltas do (positions 0 and 2 of a layer pair up, as do 1 and 3: q with k, v with out).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from fulldiff.cases.tables import TableRow

MODEL = "sd15"
# The classes a file's metadata lists for the orders above, in any order.
CLASSES: dict[str, frozenset[str]] = {
    "unet": frozenset({"CrossAttention", "Attention", "GEGLU"}),
    "text_encoder": frozenset({"CLIPAttention"}),
}
BLOCKS = ("down_blocks.", "up_blocks.", "mid_block.")
UNET_ORDER = (
    *(f"attn1.{name}" for name in ("to_q", "to_k", "to_v", "to_out.0")),
    "ff.net.0.proj",
    *(f"attn2.{name}" for name in ("to_q", "to_k", "to_v", "to_out.0")),
)
TEXT_ORDER = tuple(f"self_attn.{name}" for name in ("k_proj", "v_proj", "q_proj", "out_proj"))


def positions(model: str, rows: Iterable[TableRow]) -> Mapping[str, TableRow]:
    """``unet:0`` and so on → the table's row; empty for a model that the format does not know."""
    if model != MODEL:
        return {}
    known = list(rows)
    unet = _ordered([row for row in known if row.part == "unet"], "transformer_blocks.0.", UNET_ORDER)
    unet.sort(key=lambda row: next(at for at, block in enumerate(BLOCKS) if row.name.startswith(block)))
    text = _ordered([row for row in known if row.part == "text_encoder"], "", TEXT_ORDER)
    return {
        f"{part}:{at}": row for part, found in (("unet", unet), ("text_encoder", text)) for at, row in enumerate(found)
    }


def _ordered(rows: list[TableRow], before: str, order: tuple[str, ...]) -> list[TableRow]:
    """The rows whose names end in one of ``order``, block by block in table order, each in that order."""
    blocks: dict[str, dict[str, TableRow]] = {}
    for row in rows:
        for name in order:
            if row.name.endswith(f".{before}{name}"):
                blocks.setdefault(row.name.removesuffix(name), {})[name] = row
    return [found[name] for found in blocks.values() for name in order]
