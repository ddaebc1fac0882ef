"""Video in: what to look at, and the pixels of it. Knows nothing of models."""
