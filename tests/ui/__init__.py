"""Tests of the local chat."""
