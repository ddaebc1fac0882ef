"""The run: from samples to gradients, steps, checkpoints and a result."""
