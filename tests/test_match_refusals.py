"""Every way a module can be wrong is refused by name; what is left is named; where alpha comes from."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import pytest
from headers import DOWN, GOOD, LAYER, WIDE, account, header, only_refusal, pair

from fulldiff.cases.model import Shape
from fulldiff.harness.files.base import table
from fulldiff.harness.files.container import FileError
from fulldiff.harness.files.match import match, matched

# Refusals.


@pytest.mark.parametrize(
    ("factor", "shape", "kind"),
    [
        ("oft_blocks", (4, 160, 160), "OFT"),
        ("oft_diag", (160,), "OFT"),
        ("boft_R.default", (1, 4, 160, 160), "BOFT"),
        ("rescale", (640, 1), "BOFT"),
        ("a1.weight", (4, 640), "GLoRA"),
        ("b2.weight", (640, 4), "GLoRA"),
        ("set_weight", (640, 640), "replaced weight"),
        ("w_norm", (640,), "normalisation"),
        ("b_norm", (640,), "normalisation"),
        ("on_input", (), "IA3"),
        ("vera_lambda_b", (640,), "VeRA"),
        ("lora_B.default.bias", (640,), "bias"),
        ("lora_embedding_A", (4, 640), "embedding"),
    ],
)
def test_an_unknown_kind_is_refused_by_name_with_all_its_tensors(factor: str, shape: Shape, kind: str) -> None:
    plain = pair(LAYER, 640, 640)
    assert kind in only_refusal({f"{LAYER}.{factor}": shape})
    assert kind in only_refusal(plain | {f"{LAYER}.{factor}": shape})


BAD: dict[str, tuple[dict[str, Shape], str]] = {
    "orphan up": ({"lora_up.weight": (640, 4), "alpha": ()}, r"orphan lora_up.weight: its lora_down.weight is absent"),
    "orphan down": ({"lora_down.weight": (4, 640)}, r"orphan lora_down.weight: its lora_up.weight is absent"),
    "orphan mid": ({"lora_mid.weight": (4, 4)}, "orphan lora_mid.weight"),
    "rank": ({"lora_up.weight": (640, 8), "lora_down.weight": (4, 640)}, r"rank mismatch: lora_up is \(640, 8\)"),
    "rank 0": ({"lora_up.weight": (640, 0), "lora_down.weight": (0, 640)}, "rank mismatch"),
    "1-D": ({"lora_up.weight": (640,), "lora_down.weight": (4, 640)}, "needs two axes"),
    "size": ({"lora_up.weight": (320, 4), "lora_down.weight": (4, 640)}, r"\(320, 4\).*\(640, 640\)"),
    "kernel": ({"lora_up.weight": (640, 4, 1, 1), "lora_down.weight": (4, 640, 3, 3)}, r"\(4, 640, 3, 3\)"),
    "w1 twice": ({"lokr_w1": (8, 8), "lokr_w1_a": (8, 2), "lokr_w2": (80, 80)}, "lokr_w1 is given both"),
    "w1 absent": ({"lokr_w2": (80, 80)}, "neither lokr_w1 nor"),
    "w2 half": ({"lokr_w1": (8, 8), "lokr_w2_a": (80, 4)}, "neither lokr_w2 nor all of lokr_w2_a and lokr_w2_b"),
    "w1 divides": ({"lokr_w1": (7, 8), "lokr_w2": (80, 80)}, "does not divide"),
    "w2 size": ({"lokr_w1": (8, 8), "lokr_w2": (80, 40)}, r"is \(640, 320\), the layer is \(640, 640\)"),
    "w2 rank": ({"lokr_w1": (8, 8), "lokr_w2_a": (80, 4), "lokr_w2_b": (5, 80)}, "rank mismatch: lokr_w2_a"),
    "loha half": ({"hada_w1_a": (640, 4), "hada_w1_b": (4, 640)}, "its hada_w2_a and hada_w2_b is absent"),
    "diff": ({"diff": (640, 320)}, r"diff is \(640, 320\)"),
    "diff_b": ({"diff": (640, 640), "diff_b": (320,)}, r"diff_b is \(320,\)"),
    "magnitude alone": ({"dora_scale": (640, 1)}, "DoRA magnitude without"),
    "magnitude of a diff": ({"dora_scale": (640, 1), "diff": (640, 640)}, "DoRA magnitude without"),
    "magnitude size": (
        {"lora_up.weight": (640, 4), "lora_down.weight": (4, 640), "dora_scale": (640, 640)}, "dora_scale is"
    ),
    "alpha": ({"lora_up.weight": (640, 4), "lora_down.weight": (4, 640), "alpha": (2,)}, "should be one number"),
    "scale": ({"lokr_w1": (8, 8), "lokr_w2": (80, 80), "scale": ()}, "only a LoRA's scale"),
    "two kinds": (
        {"lora_up.weight": (640, 4), "lora_down.weight": (4, 640), "lokr_w1": (8, 8), "lokr_w2": (80, 80), "alpha": ()},
        "lora and lokr factors share one name",
    ),
    "twice": ({"lora_A": (4, 640), "lora_A.weight": (4, 640), "lora_B.weight": (640, 4)}, "are the same factor"),
    "whose alpha": (
        {"lora_A.a.weight": (4, 640), "lora_B.a.weight": (640, 4), "lora_A.b.weight": (4, 640),
         "lora_B.b.weight": (640, 4), "alpha": ()},
        "alpha could belong to any of 2",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_a_module_that_is_wrong_is_refused_whole(case: str) -> None:
    factors, reason = BAD[case]
    assert re.search(reason, only_refusal({f"{LAYER}.{name}": shape for name, shape in factors.items()}))


@pytest.mark.parametrize(
    "factors",
    [
        {"lora_up.weight": (2048, 4), "lora_down.weight": (4, 640)},
        {"lokr_w1": (8, 8), "lokr_w2": (256, 80)},
        {"lokr_w1": (8, 8), "lokr_w2_a": (256, 4), "lokr_w2_b": (4, 80)},
        {"hada_w1_a": (2048, 4), "hada_w1_b": (4, 640), "hada_w2_a": (2048, 4), "hada_w2_b": (4, 640)},
        {"diff": (2048, 640)},
    ],
)
def test_a_transposed_product_is_refused_never_reshaped(factors: dict[str, Shape]) -> None:
    module = WIDE.replace("lora_unet", "lycoris")
    assert "transposed" in only_refusal({f"{module}.{name}": shape for name, shape in factors.items()})


@pytest.mark.parametrize("dtype", ["I8", "U8", "BOOL", "F8_E8M0"])
def test_a_dtype_that_holds_no_factor_is_refused(dtype: str) -> None:
    found = matched(header(pair(LAYER, 640, 640), dtype), table("sdxl"))
    assert f"stored as {dtype}: convert" in found.refused[0].reason


@pytest.mark.parametrize(
    ("up", "down", "adapter"),
    [
        ("F8_E4M3", "F8_E4M3", "f8_e4m3"),
        ("F8_E5M2", "BF16", "bf16"),
        ("F16", "BF16", "f32"),
        ("F32", "F16", "f32"),
        ("F64", "F32", "f64"),
    ],
)
def test_an_adapter_is_as_wide_as_its_widest_factor(up: str, down: str, adapter: str) -> None:
    head = header(pair(LAYER, 640, 640), up)
    tensors = dict(head.tensors)
    name = f"{LAYER}.lora_down.weight"
    tensors[name] = dataclasses.replace(tensors[name], dtype=down)
    (target,) = match(dataclasses.replace(head, tensors=tensors), table("sdxl")).targets
    assert target.adapter.dtype == adapter


# What is left, and where alpha comes from.


def test_orphan_alphas_foreign_text_encoders_and_strangers_are_named() -> None:
    orphan = f"{LAYER}.alpha"
    t5 = {n.replace("te1", "te3"): s for n, s in pair("lora_te1_encoder_block_0_q", 64, 64).items()}
    shapes: dict[str, Shape] = GOOD | t5 | {orphan: (), "hello": (3,), "lora_unet_nowhere.lora_up.weight": (4, 4)}
    found = match(header(shapes), table("sdxl"))
    account(found, shapes)
    assert found.unmatched == ("lora_unet_nowhere.lora_up.weight", "hello")
    reasons = {skipped.tensor: skipped.reason for skipped in found.skipped}
    assert set(reasons) == {orphan, *t5}
    assert reasons[orphan] == "an orphan alpha: the module has no factors"
    assert "sdxl has no layers of its text_encoder_3" in reasons["lora_te3_encoder_block_0_q.alpha"]
    text = found.describe()
    assert "unmatched hello" in text
    assert f"skipped {orphan}: an orphan alpha" in text
    assert "unet: 3 matched, 1 skipped" in text


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_an_alpha_tensor_is_one_number_of_any_shape(shape: Shape) -> None:
    shapes = GOOD | {f"{WIDE}.alpha": shape}
    (target,) = match(header(shapes, metadata={"ss_network_alpha": "64"}), table("sdxl")).targets
    assert target.alpha == "tensor"
    assert target.adapter.alpha.form == "absent"
    assert target.adapter.source and target.adapter.source.tensors["alpha"] == f"{WIDE}.alpha"
    assert "alpha" not in target.adapter.factors


def test_metadata_alpha_counts_only_where_no_tensor_gives_one() -> None:
    bare = {name: shape for name, shape in pair(LAYER, 640, 640).items() if not name.endswith("alpha")}
    found = match(header(GOOD | bare, metadata={"ss_network_alpha": "8.0"}), table("sdxl"))
    assert [(target.alpha, target.adapter.alpha.form) for target in found.targets] == [
        ("tensor", "absent"),
        ("metadata", "0d"),
    ]
    assert found.targets[1].adapter.alpha.value == 8.0
    assert found.alphas == {"tensor": 1, "metadata": 1}


@pytest.mark.parametrize("text", ["None", "dynamic", "nan", "inf", "[1"])
def test_a_metadata_alpha_that_is_no_number_is_none(text: str) -> None:
    bare = {name: shape for name, shape in GOOD.items() if not name.endswith("alpha")}
    metadata = {"ss_network_alpha": text, "ss_network_args": text, "lora_adapter_metadata": text}
    (target,) = match(header(bare, metadata=metadata), table("sdxl")).targets
    assert target.alpha == "assumed"


@pytest.mark.parametrize(
    ("config", "alpha"),
    [
        ({"r": 4, "lora_alpha": 8}, 8.0),
        ({"r": 4, "lora_alpha": 8, "use_rslora": True}, 16.0),
        ({"r": 16, "lora_alpha": 8, "rank_pattern": {"attn1.to_q": 4}}, 8.0),
        ({"r": 4, "lora_alpha": 8, "alpha_pattern": {"to_q": 2, "to_k": 1}}, 2.0),
        ({"r": 4, "lora_alpha": 8, "alpha_pattern": {"o_q": 2}}, 8.0),
    ],
)
def test_a_peft_configs_alpha_becomes_the_scale_that_peft_has(
    tmp_path: Path, config: dict[str, object], alpha: float
) -> None:
    """Scale = alpha / 4, the file's rank."""
    module = f"base_model.model.{DOWN}attn1.to_q"
    head = header({f"{module}.lora_A.weight": (4, 640), f"{module}.lora_B.weight": (640, 4)})
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    (beside,) = match(dataclasses.replace(head, path=tmp_path / "adapter_model.safetensors"), table("sdxl")).targets
    named = {name.replace("base_model.model", "unet"): info for name, info in head.tensors.items()}
    metadata = {"lora_adapter_metadata": json.dumps({f"unet.{key}": value for key, value in config.items()})}
    (inside,) = match(dataclasses.replace(head, tensors=named, metadata=metadata), table("sdxl")).targets
    for target in (beside, inside):
        assert (target.alpha, target.adapter.alpha.value) == ("metadata", alpha)


@pytest.mark.parametrize("name", ["", ".default"])
def test_the_alpha_of_pefts_lokr_is_in_its_config(tmp_path: Path, name: str) -> None:
    """Its factors have LyCORIS's names, its alpha is nowhere in the tensors."""
    module = f"base_model.model.{DOWN}attn1.to_q"
    shapes = {"lokr_w1": (8, 8), "lokr_w2_a": (80, 4), "lokr_w2_b": (4, 80)}
    head = header({f"{module}.{factor}{name}": shape for factor, shape in shapes.items()})
    (tmp_path / "adapter_config.json").write_text(json.dumps({"peft_type": "LOKR", "r": 4, "alpha": 16}))
    (target,) = match(dataclasses.replace(head, path=tmp_path / "adapter_model.safetensors"), table("sdxl")).targets
    assert (target.alpha, target.adapter.alpha.value) == ("metadata", 16.0)


def test_dora_without_its_magnitude_is_refused() -> None:
    plain = pair(LAYER, 640, 640)
    metadata = {"ss_network_args": json.dumps({"dora_wd": "True"})}
    good = GOOD | {f"{WIDE}.dora_scale": (1, 2048)}
    found = match(header(good | plain, metadata=metadata), table("sdxl"))
    assert [target.adapter.factors["dora_scale"] for target in found.targets] == [(1, 2048)]
    assert "magnitude is absent" in found.refused[0].reason
    assert found.refused[0].module == LAYER


def test_two_products_under_one_name_sum_where_nothing_is_shared() -> None:
    products: dict[str, Shape] = {"lora_up.weight": (640, 4), "lora_down.weight": (4, 640)}
    products |= {"lokr_w1": (8, 8), "lokr_w2": (80, 80)}
    shapes = {f"{LAYER}.{name}": shape for name, shape in products.items()}
    found = match(header(shapes), table("sdxl"))
    account(found, shapes)
    assert [target.adapter.kind for target in found.targets] == ["lora", "lokr"]


def test_a_bias_difference_goes_with_the_product_and_a_whole_one_apart() -> None:
    shapes = GOOD | {f"{WIDE}.diff_b": (640,)}
    (target,) = match(header(shapes), table("sdxl")).targets
    assert target.adapter.kind == "lora" and target.adapter.factors["diff_b"] == (640,)
    shapes |= {f"{WIDE}.diff": (640, 2048)}
    found = match(header(shapes), table("sdxl"))
    account(found, shapes)
    assert [(t.adapter.kind, "diff_b" in t.adapter.factors) for t in found.targets] == [("lora", True), ("diff", False)]


@pytest.mark.parametrize("flat", [False, True])
def test_a_convolution_of_1_by_1_may_be_flat(flat: bool) -> None:
    module = "lora_unet_down_blocks_0_attentions_0_proj_in"
    ones = () if flat else (1, 1)
    shapes = {f"{module}.lora_up.weight": (320, 4, *ones), f"{module}.lora_down.weight": (4, 320, *ones)}
    (target,) = match(header(shapes), table("sd15")).targets
    assert target.layer.kind == "conv2d"


def test_positions_of_other_classes_are_refused() -> None:
    shapes = {"unet:0:up": (320, 4), "unet:0:down": (4, 320)}
    metadata = {"unet": '["ResnetBlock2D", "CrossAttention", "Attention", "GEGLU"]'}
    assert "only the order of" in only_refusal(shapes, "sd15", metadata=metadata)
    known = header(shapes, metadata={"unet": '["GEGLU", "Attention", "CrossAttention"]'})
    assert len(match(known, table("sd15")).targets) == 1


def test_nothing_known_says_so() -> None:
    with pytest.raises(FileError, match=r"made\.safetensors.*no known model has layers of these names"):
        match(header(pair("lora_unet_blocks_0_q", 8, 8)), table("flux"))
    with pytest.raises(FileError, match="0 tensors"):
        match(header({}), table("flux"))
