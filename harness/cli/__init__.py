"""The program ``fulldiff``."""
