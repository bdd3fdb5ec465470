"""Measuring the layer: what is asked of it (`layers`), how it is timed and checked, and how that is shown.

Nothing here is imported by the rest of the package. Start at `runner` for a benchmark and at `check` for a model file.
"""
