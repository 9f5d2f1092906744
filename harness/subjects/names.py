"""The subjects' names, readable without torch."""

OURS = {
    "full-diff": "fulldiff.harness.subjects.full_diff:FullDiff",
    "runtime-lokr": "fulldiff.harness.subjects.runtime_lokr:RuntimeLokr",
}
FAULT = "fault:"
