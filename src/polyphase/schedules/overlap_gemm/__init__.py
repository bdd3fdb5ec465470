"""One schedule: its configurations, what they cost, and how they are launched."""
