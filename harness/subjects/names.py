"""The subjects' names, readable without torch."""

# On ggml's graphs; `@vulkan` on its Vulkan backend.
GGML = {
    "ggml": "subject:Ggml",
    "ggml@vulkan": "subject:GGML_VULKAN",
    "ggml-shipped": "subject:GGML_SHIPPED",
    "ggml-shipped@vulkan": "subject:GGML_VULKAN_SHIPPED",
    "ggml-split@vulkan": "subject:GGML_SPLIT",
    "ggml-sdcpp-order": "sdcpp:SdcppOrder",
    "ggml-sdcpp-order@vulkan": "sdcpp:SDCPP_ORDER_VULKAN",
    "ggml-sdcpp-head@vulkan": "sdcpp:SDCPP_HEAD_VULKAN",
    "ggml-full-diff": "subject:GgmlFullDiff",
    "ggml-full-diff@vulkan": "subject:GGML_FULL_DIFF_VULKAN",
}
OURS = {
    "full-diff": "fulldiff.harness.subjects.full_diff:FullDiff",
    "full-diff-alive": "fulldiff.harness.subjects.alive:FullDiffAlive",
    "streamed": "fulldiff.harness.subjects.streamed:Streamed",
    "runtime-lokr": "fulldiff.harness.subjects.runtime_lokr:RuntimeLokr",
    "hybrid": "fulldiff.harness.subjects.hybrid:Hybrid",
    "planned": "fulldiff.harness.subjects.planned:Planned",
    "merged": "fulldiff.harness.subjects.merged:Merged",
    "ljl": "fulldiff.harness.subjects.ljl:Ljl",
    **{name: f"fulldiff.harness.subjects.ggml.{target}" for name, target in GGML.items()},
}
# What others wrote; each says how to install what it needs.
PEERS = {
    "peft": "fulldiff.harness.subjects.peers.peft:Peft",
    "peft-merged": "fulldiff.harness.subjects.peers.peft:PeftMerged",
    "peft-file": "fulldiff.harness.subjects.peers.peft_file:PeftFile",
    "peft-unloaded": "fulldiff.harness.subjects.peers.peft_file:PeftUnloaded",
    "lycoris": "fulldiff.harness.subjects.peers.lycoris:Lycoris",
    "lycoris-bypass": "fulldiff.harness.subjects.peers.lycoris:LycorisBypass",
    "lycoris-merge": "fulldiff.harness.subjects.peers.lycoris:LycorisMerge",
    "lycoris-file": "fulldiff.harness.subjects.peers.lycoris_file:LycorisFile",
    "lycoris-functional": "fulldiff.harness.subjects.peers.lycoris_file:LycorisFunctional",
    "diffusers": "fulldiff.harness.subjects.peers.diffusers:Diffusers",
    "diffusers-fused": "fulldiff.harness.subjects.peers.diffusers:DiffusersFused",
}
FAULT = "fault:"
# A command of the user's, in any language: see `program`.
PROGRAM = "program:"
# The bare layer as a way of a bench: the yardstick, no subject.
NO_ADAPTER = "no adapter"
# The bare layer once more, as if it were a way: its ratio is the noise floor.
AGAIN = "no adapter (A/A)"
