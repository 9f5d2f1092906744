"""Joined files: what is planned, written and refused, and that the product is the sum."""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from written import DOWN, UP, made, read_delta, row_named, stored_ranges, values

from fulldiff.cases.model import DType
from fulldiff.cases.tables import TableRow, load_table
from fulldiff.harness.files import stitching
from fulldiff.harness.files.base import table
from fulldiff.harness.files.container import FileError, read_header
from fulldiff.harness.files.fold import save
from fulldiff.harness.files.joined import parts_of
from fulldiff.harness.files.joining import distinct, family_of, plan, widest
from fulldiff.harness.files.layout import Layout
from fulldiff.harness.files.match import match
from fulldiff.harness.files.piece import Piece
from fulldiff.harness.files.writers import Writer, whole
from fulldiff.harness.join import worker as join_worker
from fulldiff.harness.protocol import Join

QUERY = row_named("sd15", "down_blocks.0.attentions.0.transformer_blocks.0.attn1.to_q")
KEY = row_named("sd15", "down_blocks.0.attentions.0.transformer_blocks.0.attn1.to_k")
CONV = row_named("sd15", "conv_in")
TEXT = row_named("sd15", "text_model.encoder.layers.0.self_attn.v_proj")
MID = "lora_mid.weight"


def pair(row: TableRow, rank: int, seed: int = 1, form: str = "lora", **numbers: float) -> Piece[Tensor]:
    """A LoRA of this rank on a layer, f64 unless cast."""
    draw = random.Random(seed)
    out, inp, *kernel = row.weight_shape
    ones = [1] * len(kernel)
    tensors = {UP: values(draw, out, rank, *ones), DOWN: values(draw, rank, inp, *(ones if form == "mid" else kernel))}
    if form == "mid":
        tensors[MID] = values(draw, rank, rank, *kernel)
    return Piece((row,), "lora", tensors | {n: torch.tensor(v, dtype=torch.float64) for n, v in numbers.items()})


def cast(piece: Piece[Tensor], dtype: torch.dtype) -> Piece[Tensor]:
    return Piece(piece.rows, piece.kind, {n: t.to(dtype) for n, t in piece.tensors.items()}, piece.stored)


def file(folder: Path, name: str, *pieces: Piece[Tensor], family: Writer = "kohya") -> Path:
    path = folder / name / "adapter_model.safetensors" if family == "peft" else folder / f"{name}.safetensors"
    path.parent.mkdir(exist_ok=True)
    save(path, family, pieces)
    return path


def deltas(path: Path, model: str = "sd15") -> dict[str, Tensor]:
    """The delta of each layer of a file, all of it applied."""
    found = match(read_header(path), table(model))
    assert not (found.unmatched or found.refused), found.describe()
    total: dict[str, Tensor] = {}
    for target in found.targets:
        zero = torch.zeros(target.layer.weight_shape, dtype=torch.float64)
        total[target.name] = total.get(target.name, zero) + read_delta(target, zero)
    return total


def join(
    paths: Sequence[Path],
    weights: Sequence[float],
    out: Path,
    dtype: DType | None = None,
    family: Writer = "kohya",
    model: str = "sd15",
) -> Path:
    stitching.write(plan(paths, weights, model, family, dtype), family, out)
    return out


def check(paths: Sequence[Path], weights: Sequence[float], out: Path, model: str = "sd15", rtol: float = 1e-12) -> None:
    """The joined file's deltas are the weighted sums, on the same layers."""
    wanted: dict[str, Tensor] = {}
    for path, weight in zip(paths, weights, strict=True):
        for name, delta in deltas(path, model).items():
            wanted[name] = wanted.get(name, torch.zeros_like(delta)) + weight * delta
    found = deltas(out, model)
    assert found.keys() == wanted.keys()
    for name, delta in wanted.items():
        torch.testing.assert_close(found[name], delta, rtol=0, atol=rtol * max(1.0, float(delta.abs().max())))


def test_unequal_ranks_missing_modules_and_parts(tmp_path: Path) -> None:
    one = file(tmp_path, "one", pair(QUERY, 2, alpha=1.0), pair(CONV, 3))
    two = file(tmp_path, "two", pair(QUERY, 4, 2), pair(KEY, 1, 3, alpha=5.0), family="diffusers")
    text = file(tmp_path, "text", pair(TEXT, 2, 4), family="peft")
    out = join([one, two, text], [0.7, -1.5, 2.0], tmp_path / "out.safetensors")
    check([one, two, text], [0.7, -1.5, 2.0], out)
    parts = parts_of(read_header(out))
    assert (parts.files, parts.weights) == (("one", "two", "adapter_model"), (0.7, -1.5, 2.0))
    name = "lora_unet_down_blocks_0_attentions_0_transformer_blocks_0_attn1_to"
    assert parts.ranks == {
        "lora_te_text_model_encoder_layers_0_self_attn_v_proj": (0, 0, 2),
        f"{name}_q": (2, 4, 0),
        f"{name}_k": (0, 1, 0),
        "lora_unet_conv_in": (3, 0, 0),
    }
    stored = load_file(out)
    assert stored[f"{name}_q.alpha"].item() == 6
    assert stored[f"{name}_q.lora_down.weight"].shape == (6, 320)


@pytest.mark.parametrize("family", ["kohya", "lycoris", "diffusers", "peft", "cloneofsimo"])
def test_every_family_is_read_and_written(tmp_path: Path, family: Writer) -> None:
    pieces = [pair(QUERY, 2, alpha=1.0), pair(KEY, 3, 2)]
    paths = [file(tmp_path, "one", *pieces, family=family), file(tmp_path, "two", pair(QUERY, 1, 3), family=family)]
    (tmp_path / "out").mkdir()
    assert family_of(paths, "sd15") == family
    out = join(paths, [0.5, -2.0], tmp_path / "out" / "adapter_model.safetensors", family=family)
    check(paths, [0.5, -2.0], out)
    assert match(read_header(out), table("sd15")).targets[0].adapter.spelling == family


@pytest.mark.parametrize("forms", [("mid", "mid"), ("mid", "lora"), ("lora", "mid"), ("lora", "lora")])
def test_convolutions_with_and_without_a_core(tmp_path: Path, forms: tuple[str, str]) -> None:
    row = row_named("sd15", "down_blocks.0.downsamplers.0.conv")
    for at in (CONV, row):
        paths = [file(tmp_path, f"{at.out}{n}{at.inp}", pair(at, n + 2, n, f, alpha=3.0)) for n, f in enumerate(forms)]
        out = join(paths, [1.0, -0.5], tmp_path / f"out{at.inp}.safetensors")
        check(paths, [1.0, -0.5], out)
        assert any(name.endswith("mid.weight") for name in load_file(out)) == (forms == ("mid", "mid"))


def test_a_flat_1x1_convolution_joins_one_that_is_not(tmp_path: Path) -> None:
    row = row_named("sd15", "down_blocks.0.attentions.0.proj_in")
    other = pair(row, 2, 2)
    flat = Piece(other.rows, "lora", {name: tensor.flatten(1) for name, tensor in other.tensors.items()})
    paths = [file(tmp_path, "one", pair(row, 1)), file(tmp_path, "two", flat)]
    check(paths, [1.0, 3.0], join(paths, [1.0, 3.0], tmp_path / "out.safetensors"))


@pytest.mark.parametrize("family", ["kohya", "diffusers"])
@pytest.mark.parametrize("split", [False, True])
def test_fused_layers_stay_whole_or_are_split(tmp_path: Path, family: Writer, split: bool) -> None:
    query = row_named("flux", "transformer_blocks.0.attn.to_q")
    rows = whole((query,))
    draw, out = random.Random(3), sum(row.out for row in rows)
    fused = Piece(rows, "lora", {UP: values(draw, out, 2).float(), DOWN: values(draw, 2, 3072).float()}, stored=True)
    second = cast(pair(query, 1, 7), torch.float32) if split else fused
    paths = [file(tmp_path, "one", fused), file(tmp_path, "two", second)]
    joined = join(paths, [1.0, -2.0], tmp_path / "out.safetensors", family=family, model="flux")
    kept = family == "kohya" and not split
    targets = match(read_header(joined), table("flux")).targets
    assert len(targets) == (1 if kept else 3)
    parts = {name: own for made in targets for name, own in [(made.name, made)]}
    zero = torch.zeros(3072, 3072, dtype=torch.float64)
    whole_delta = fused.tensors[UP].double() @ fused.tensors[DOWN].double()
    wanted = stored_ranges(query, whole_delta)
    wanted = wanted - 2 * (second.tensors[UP].double() @ second.tensors[DOWN].double() if split else wanted)
    got = read_delta(targets[0], torch.zeros(out, 3072).double()) if kept else read_delta(parts[query.name], zero)
    torch.testing.assert_close(stored_ranges(query, got) if kept else got, wanted, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("dtypes", "kept"),
    [(("f16", "f16"), "f16"), (("f16", "bf16"), "f32"), (("f16", "f64"), "f64"), (("f8_e4m3", "f16"), "f32")],
)
def test_dtypes_are_kept_or_the_widest(dtypes: tuple[str, ...], kept: str) -> None:
    assert widest(dtypes) == kept  # type: ignore[arg-type]


def test_a_named_dtype_is_written(tmp_path: Path) -> None:
    path = file(tmp_path, "one", pair(QUERY, 2))
    out = join([path], [1.0], tmp_path / "out.safetensors", dtype="bf16")
    assert {tensor.dtype for name, tensor in load_file(out).items() if "lora" in name.split(".")[1]} == {torch.bfloat16}
    check([path], [1.0], out, rtol=0.02)


def test_a_small_scale_keeps_the_digits_of_f16_factors(tmp_path: Path) -> None:
    """1e-4 times 1/64 is subnormal in f16: the scale goes into the other factor."""
    piece = pair(QUERY, 4, alpha=4 / 64)
    small = cast(Piece(piece.rows, "lora", piece.tensors | {UP: piece.tensors[UP] * 1e-4}), torch.float16)
    path = file(tmp_path, "one", small)
    out = join([path], [1.0], tmp_path / "out.safetensors")
    (got,), (want,) = deltas(out).values(), deltas(path).values()
    assert float((got - want).norm() / want.norm()) < 2**-11


def test_a_weight_of_0_takes_nothing_of_a_file_that_is_not_finite(tmp_path: Path) -> None:
    broken = pair(QUERY, 2, 2)
    broken.tensors[UP][0, 0] = torch.nan  # type: ignore[index]
    paths = [file(tmp_path, "one", pair(QUERY, 1)), file(tmp_path, "two", broken)]
    out = join(paths, [1.0, 0.0], tmp_path / "out.safetensors")
    check(paths[:1], [1.0], out)
    with pytest.raises(FileError, match=r"two.safetensors: lora_unet_.*to_q.lora_up.weight holds nan; leave the file"):
        join(paths, [1.0, 0.1], tmp_path / "no.safetensors")


def test_learned_tokens_are_renamed_and_kept(tmp_path: Path) -> None:
    tokens = [{"<s2>": torch.rand(768), "<s1>": torch.rand(768)}, {"<cat>": torch.rand(768).half()}]
    for at, own in enumerate(tokens):
        save_file(own, tmp_path / f"{at}.safetensors", dict.fromkeys(own, "<embed>"))
    paths = [tmp_path / "0.safetensors", file(tmp_path, "lora", pair(QUERY, 2)), tmp_path / "1.safetensors"]
    out = join(paths, [1.0] * 3, tmp_path / "out.safetensors")
    stored, metadata = load_file(out), read_header(out).metadata
    wanted = {"<s0-0>": tokens[0]["<s1>"], "<s0-1>": tokens[0]["<s2>"], "<s2-0>": tokens[1]["<cat>"]}
    assert {name for name in stored if name.startswith("<")} == wanted.keys()
    for name, token in wanted.items():
        assert stored[name].dtype == token.dtype
        assert torch.equal(stored[name], token)
        assert metadata[name] == "<embed>"


@pytest.mark.parametrize(
    ("form", "message"),
    [
        ("lokr", "a lokr has no rank to join by; only LoRAs"),
        ("loha", "a loha has no rank to join by"),
        ("diff", "a diff has no rank to join by"),
        ("dora", "a LoRA with dora_scale is no plain sum of ranks"),
        ("bias", "a LoRA with diff_b is no plain sum of ranks|a diff has no rank"),
    ],
)
def test_other_kinds_are_refused_by_name(tmp_path: Path, form: str, message: str) -> None:
    kind, tensors = made(random.Random(1), QUERY, form if form in ("lokr", "loha", "diff") else "lora")
    tensors |= {"dora": {"dora_scale": torch.ones(320, 1)}, "bias": {"diff_b": torch.ones(320)}}.get(form, {})
    path = file(tmp_path, "other", Piece((QUERY,), kind, tensors))
    with pytest.raises(FileError, match=f"{re.escape(str(path))}: cannot be joined on sd15: .*({message})"):
        plan([path], [1.0], "sd15", "kohya")


def test_what_cannot_be_joined_is_refused_by_name(tmp_path: Path) -> None:
    good = file(tmp_path, "good", pair(QUERY, 2), pair(CONV, 2))
    stranger = tmp_path / "stranger.safetensors"
    save_file({"lora_unet_no_such.lora_up.weight": torch.ones(2, 1)}, stranger)
    empty = tmp_path / "empty.safetensors"
    save_file({}, empty)
    odd = file(tmp_path, "classes", pair(QUERY, 2), family="cloneofsimo")
    tensors, header = load_file(odd), read_header(odd)
    save_file(tensors, odd, dict(header.metadata) | {"unet": '["GEGLU"]'})
    for paths, weights, family, message in (
        ([good], [1.0, 2.0], "kohya", "1 files and 2 weights: give one weight for each file"),
        ([stranger], [1.0], "kohya", "stranger.safetensors: cannot be joined on sd15: lora_unet_no_such"),
        ([empty], [1.0], "kohya", "empty.safetensors: has no LoRA and no learned token"),
        ([odd], [1.0], "kohya", "its position counts modules of"),
        ([good], [1.0], "cloneofsimo", "not joined as cloneofsimo: sd15 conv_in: cloneofsimo files do not count it"),
    ):
        with pytest.raises(FileError, match=re.escape(message)):
            join(paths, weights, tmp_path / "no.safetensors", family=family)  # type: ignore[arg-type]


def test_a_value_beyond_the_dtype_is_named(tmp_path: Path) -> None:
    path = file(tmp_path, "one", pair(QUERY, 2))
    with pytest.raises(FileError, match=r"unet.*to_q: .* leaves the range of f16; write it as f32"):
        join([path], [1e12], tmp_path / "no.safetensors", dtype="f16")


def test_files_get_distinct_names() -> None:
    assert distinct([Path("a/x.safetensors"), Path("b/y.safetensors")]) == ["x", "y"]
    assert distinct([Path("/a/x.safetensors"), Path("/b/x.safetensors")]) == ["a/x", "b/x"]
    assert distinct([Path("/a/x.safetensors")] * 2) == ["a/x#0", "a/x#1"]


def test_a_layout_is_aligned_and_whole(tmp_path: Path) -> None:
    path, tensors = (
        tmp_path / "x.safetensors",
        {"a": torch.rand(3).half(), "b": torch.rand(2, 2).double(), "c": torch.rand(5)},
    )
    shapes: Mapping[str, tuple[str, tuple[int, ...]]] = {"a": ("F16", (3,)), "b": ("F64", (2, 2)), "c": ("F32", (5,))}
    with Layout(path, shapes, {"k": "v"}) as layout:
        for name in ("c", "a", "b"):
            layout.put(name, stitching.raw_bytes(tensors[name]))
    header = read_header(path)
    for name, tensor in load_file(path).items():
        assert torch.equal(tensor, tensors[name])
        assert (header.data + header.tensors[name].begin) % tensors[name].element_size() == 0
    with pytest.raises(FileError, match="c has 6 bytes, its shape takes 20"), Layout(path, shapes, {}) as layout:
        layout.put("c", stitching.raw_bytes(tensors["a"]))
    with pytest.raises(FileError, match="3 tensors were not written, a first"), Layout(path, shapes, {}):
        pass


def test_memory_does_not_grow_with_the_file(tmp_path: Path) -> None:
    """Layer by layer: three times as many layers of one size take no more memory, less than the output."""
    rows = [row for row in load_table("sd15") if row.part == "unet" and row.weight_shape == (1280, 1280)][:30]
    peaks = []
    for count in (10, 30):
        pieces = [cast(pair(row, 32), torch.float16) for row in rows[:count]]
        paths = tuple(str(file(tmp_path, f"{count}-{n}", *pieces)) for n in range(2))
        made_of = Join(paths, (1.0, -1.0), "sd15", "kohya", str(tmp_path / f"{count}.safetensors"))
        peaks.append(join_worker.write(made_of)["peak_bytes"])
    if None in peaks:
        pytest.skip("the system does not tell a process's peak memory")
    assert (tmp_path / "30.safetensors").stat().st_size > 9e6
    assert peaks[1] - peaks[0] < 3e6
