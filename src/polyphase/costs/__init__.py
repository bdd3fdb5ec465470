"""What predictions are made of: one JSON file for each architecture that was measured, and what reads it."""

from polyphase.costs.table import Costs, UnknownTermError, costs, trial

__all__ = ["Costs", "UnknownTermError", "costs", "trial"]
