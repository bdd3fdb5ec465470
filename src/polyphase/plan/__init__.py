"""What decides how a pass is computed: `planner`, what was `measured`, and what is kept on the disk."""
