"""Tests that hold the house itself: sizes, packaging, layers, docs, options."""
