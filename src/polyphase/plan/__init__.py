"""Decides how a pass is computed: the `planner`, `measured` choices, and rankings on disk."""
