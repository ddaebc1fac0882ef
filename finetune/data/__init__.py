"""From data files to samples in an order: read, checked, measured, mixed."""
