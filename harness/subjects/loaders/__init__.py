"""Loaders: subjects of the suite ``load``. To test your own, subclass `Loader` of `base`."""
