"""What to compare: case types, the tensor generator, strategies, the catalogue and the layer tables.

Nothing here imports torch: dtypes are the strings ``f64``, ``f32``, ``bf16`` and ``f16``.
"""
