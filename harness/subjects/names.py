"""The subjects' names, readable without torch."""

OURS = {
    "full-diff": "fulldiff.harness.subjects.full_diff:FullDiff",
    "runtime-lokr": "fulldiff.harness.subjects.runtime_lokr:RuntimeLokr",
}
FAULT = "fault:"
# The bare layer as a way of a bench: the yardstick, no subject.
NO_ADAPTER = "no adapter"
