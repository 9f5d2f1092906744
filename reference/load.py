"""Loading several adapter files onto one model, as the ComfyUI and Forge lineage does it: the naive loader.

What is given: a `Base` (the names of a model's weights, as plain data: `key_maps`) and `File`s (tensors by name,
and the user's two strengths). What comes out: `Loaded`, the patches of each weight in load order, and each file's
fate.

For every file in turn the loader

1. makes two `key_maps`, candidate name → target: the denoiser's (for each weight of a UNet six spellings) and the
   text encoders';
2. tests EVERY candidate of a map against every suffix it knows (21 lookups in the file's dictionary for a
   candidate that is not there), first the denoiser's map, then the text encoders' on what is left over. A tensor
   belongs to one candidate at most. Two candidates that mean one target: the later one in the map's order wins;
3. judges what is left after both maps, the unmatched tensors, by the `Rejection` policy: a rejected file
   contributes nothing;
4. drops targets that the model has no weight for: they are skipped, not unmatched;
5. enters the rest under (file, strength), the denoiser's with ``strength``, the text encoders' with
   ``text_strength``: the same file at the same strength again takes the place of the first, so it counts once.

Orphans: an alpha or dora_scale alone is consumed silently; a down alone is never looked at and so unmatched; an up
(or any factor that begins a kind) without its partners is a `LoadError`. So is a LoKr that is not whole, where the
lineage would fail later, in the merge.

Cost: (names of both maps) × 21 lookups a file, whatever the file's size. Operations are counted (``names_tried``;
lookups by a dictionary that counts them), so that nobody can make the naive loader slow. What patches mean for the
weights is in `fulldiff.reference.merge`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from fulldiff.reference.key_maps import Base, Target, bias_of, denoiser_names, text_names

Part = Literal["denoiser", "text"]
# One adapter's factors as they are in the file: its kind, and its tensors by canonical factor name.
Found = tuple[str, dict[str, Any]]
Entered = dict[Part, dict[tuple[str, float], Mapping[Target, Found]]]

# up, down and mid of a LoRA in five spellings; the first that is there wins.
LORA = (
    (".lora_up.weight", ".lora_down.weight", ".lora_mid.weight"),
    ("_lora.up.weight", "_lora.down.weight", ""),
    (".lora_B.weight", ".lora_A.weight", ""),
    (".lora.up.weight", ".lora.down.weight", ""),
    (".lora_linear_layer.up.weight", ".lora_linear_layer.down.weight", ""),
)
LOHA = ("hada_w1_a", "hada_w1_b", "hada_w2_a", "hada_w2_b")
GLORA = ("a1.weight", "a2.weight", "b1.weight", "b2.weight")
# Factor and suffix of those that are tested one by one.
BESIDE = tuple((name, f".{name}") for name in ("alpha", "dora_scale"))
LOKR = tuple((f"lokr_{n}", f".lokr_{n}") for n in ("w1", "w2", "w1_a", "w1_b", "w2_a", "w2_b", "t2"))
WHOLE = tuple((name, f".{name}") for name in ("w_norm", "b_norm", "diff", "diff_b", "set_weight"))
BIASES = ("b_norm", "diff_b")


class LoadError(ValueError):
    """A file that cannot be loaded; the message names the file, the tensor and what is missing."""


@dataclass(frozen=True)
class File:
    """An adapter file: its tensors by name. ``name`` is its identity; ``text_strength`` is the text encoders'."""

    name: str
    tensors: Mapping[str, Any]
    strength: float = 1.0
    text_strength: float = 1.0


@dataclass(frozen=True)
class Rejection:
    """When a file is taken for another model's: more unmatched tensors than a number, or than a share of all."""

    tensors: int | None = None
    share: float | None = None

    def rejects(self, unmatched: int, total: int) -> bool:
        """Whether so many unmatched tensors of ``total`` reject the file."""
        too_many = self.tensors is not None and unmatched > self.tensors
        return too_many or (self.share is not None and unmatched > self.share * total)


REJECTIONS = {"12-tensors": Rejection(tensors=12), "half": Rejection(share=0.5), "never": Rejection()}


class Patch(NamedTuple):
    """One adapter to add to a weight, with the strength that the user gave its file for this part."""

    kind: str
    tensors: Mapping[str, Any]
    strength: float
    rows: tuple[int, int] | None
    file: str


@dataclass(frozen=True)
class Fate:
    """What became of a file: patches by part (none if rejected), tensors left over, targets without a weight."""

    file: str
    rejected: bool
    unmatched: tuple[str, ...]
    patches: Mapping[Part, Mapping[Target, Found]] = field(default_factory=dict)
    skipped: tuple[Target, ...] = ()


@dataclass(frozen=True)
class Loaded:
    """The result of a load call: each weight's patches in load order, each file's fate, candidates tested."""

    patches: Mapping[str, Sequence[Patch]]
    fates: Sequence[Fate]
    names_tried: int = 0


class Naive:
    """The steps of the module's docstring. A fault, or a faster loader, overrides one of them."""

    # As the lineage spells a name. Concatenation takes a third of the time: reports show both.
    spell: Callable[[str, str], str] = staticmethod("{}{}".format)

    def load(self, base: Base, files: Sequence[File], rejection: Rejection) -> Loaded:
        """Load the files in their order; raises LoadError, and then nothing was loaded."""
        self.names_tried = 0
        weights = frozenset((*base.denoiser, *base.text))
        entered: Entered = {"denoiser": {}, "text": {}}
        fates = []
        for file in files:
            fate = self.fate(base, file, rejection, weights)
            self.enter(entered, file, fate)
            fates.append(fate)
        return Loaded(self.listed(entered), fates, self.names_tried)

    def fate(self, base: Base, file: File, rejection: Rejection, weights: frozenset[str]) -> Fate:
        """Steps 1 to 4 for one file."""
        denoiser, left = self.scan(self.denoiser_map(base), file.tensors, file)
        text, left = self.scan(self.text_map(base), left, file)
        if rejection.rejects(len(left), len(file.tensors)):
            return Fate(file.name, True, tuple(left))
        skipped = tuple(target for target in (*denoiser, *text) if target.weight not in weights)
        parts: dict[Part, Mapping[Target, Found]] = {
            "denoiser": {target: found for target, found in denoiser.items() if target.weight in weights},
            "text": {target: found for target, found in text.items() if target.weight in weights},
        }
        return Fate(file.name, False, tuple(left), parts, skipped)

    def denoiser_map(self, base: Base) -> Mapping[str, Target]:
        return denoiser_names(base)

    def text_map(self, base: Base) -> Mapping[str, Target]:
        return text_names(base)

    def enter(self, entered: Entered, file: File, fate: Fate) -> None:
        """Step 5: a dictionary keeps the first place of a key that is entered again."""
        for part, strength in self.strengths(file):
            entered[part][file.name, strength] = fate.patches.get(part, {})

    def strengths(self, file: File) -> tuple[tuple[Part, float], ...]:
        return (("denoiser", file.strength), ("text", file.text_strength))

    def listed(self, entered: Entered) -> dict[str, list[Patch]]:
        """Each weight's patches, in load order."""
        lists: dict[str, list[Patch]] = {}
        for files in entered.values():
            for (file, strength), patches in files.items():
                for target, (kind, tensors) in patches.items():
                    lists.setdefault(target.weight, []).append(Patch(kind, tensors, strength, target.rows, file))
        return lists

    def scan(
        self, names: Mapping[str, Target], tensors: Mapping[str, Any], file: File
    ) -> tuple[dict[Target, Found], dict[str, Any]]:
        """Step 2 with one map: what was found for each target, and the tensors that are left over."""
        found: dict[Target, Found] = {}
        used: set[str] = set()
        for name, target in names.items():
            self.module(name, target, tensors, file, found, used)
        self.names_tried += len(names)
        return found, {name: tensor for name, tensor in tensors.items() if name not in used}

    def module(
        self,
        name: str,
        target: Target,
        tensors: Mapping[str, Any],
        file: File,
        found: dict[Target, Found],
        used: set[str],
    ) -> None:
        """Test one candidate ``name``: enter in ``found`` what its tensors mean, in ``used`` their names.

        Of several kinds on one target the last one counts.
        """
        spell = self.spell
        beside = {}
        for factor, suffix in BESIDE:
            if (key := spell(name, suffix)) in tensors:
                beside[factor] = tensors[key]
                used.add(key)
        for up, down, mid in LORA:
            if (key := spell(name, up)) in tensors:
                keys = {"lora_up.weight": key, "lora_down.weight": spell(name, down)}
                if mid and (key := spell(name, mid)) in tensors:
                    keys["lora_mid.weight"] = key
                found[target] = ("lora", take(keys, tensors, used, file) | beside)
                break
        if spell(name, ".hada_w1_a") in tensors:
            cores = ("hada_t1", "hada_t2") if spell(name, ".hada_t1") in tensors else ()
            keys = {factor: spell(name, "." + factor) for factor in (*LOHA, *cores)}
            found[target] = ("loha", take(keys, tensors, used, file) | beside)
        lokr = {factor: key for factor, suffix in LOKR if (key := spell(name, suffix)) in tensors}
        if lokr:
            check_lokr(lokr, name, file)
            found[target] = ("lokr", take(lokr, tensors, used, file) | beside)
        if spell(name, ".a1.weight") in tensors:
            keys = {factor: spell(name, "." + factor) for factor in GLORA}
            found[target] = ("glora", take(keys, tensors, used, file) | beside)
        for factor, suffix in WHOLE:
            if (key := spell(name, suffix)) in tensors and (factor != "b_norm" or spell(name, ".w_norm") in tensors):
                meant = bias_of(target) if factor in BIASES else target
                kind = factor if factor == "set_weight" else "diff"
                found[meant] = (kind, {kind: tensors[key]})
                used.add(key)


def take(keys: Mapping[str, str], tensors: Mapping[str, Any], used: set[str], file: File) -> dict[str, Any]:
    """The tensors by factor, noted as used; raises LoadError for one that is not there."""
    if absent := [key for key in keys.values() if key not in tensors]:
        raise LoadError(
            f"{file.name}: {next(iter(keys.values()))} has no {absent[0]} beside it; "
            "mend the file, or remove what is left of the layer"
        )
    used.update(keys.values())
    return {factor: tensors[key] for factor, key in keys.items()}


def check_lokr(factors: Mapping[str, str], name: str, file: File) -> None:
    """Refuse a LoKr whose w1 or w2 is neither whole nor a product of two."""
    for w in ("lokr_w1", "lokr_w2"):
        if w not in factors and not {f"{w}_a", f"{w}_b"} <= factors.keys():
            raise LoadError(
                f"{file.name}: {name} has {', '.join(factors)} but neither {w} nor both {w}_a and {w}_b; "
                "mend the file, or remove what is left of the layer"
            )
