"""Tests of how apollo-nano is made."""
