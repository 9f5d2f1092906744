"""The suite ``load``: several files onto a model."""
