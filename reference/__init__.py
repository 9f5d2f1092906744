"""The truth: what adapter factors mean, computed the slow, obvious way in float64.

Read in this order: `factors` (an adapter as given), `truth` (factors → ΔW → y), `layers` (the base
layers), `bounds` (how much error rounding alone may cause), `faults` (known wrong ways, each overriding
one step of the truth). Then `key_maps` and `load` (several files onto one model: which tensor means which weight) and
`merge` (what that makes of the weights).
Nothing here imports the rest of fulldiff, and no optimised code ever serves it.
"""
