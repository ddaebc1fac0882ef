"""Tests of names, downloads and checkpoints."""
