"""Any layer on tensor cores, operands gathered element by element."""
