"""Measuring: what, in which order, and the reports."""
