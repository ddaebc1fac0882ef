"""Tests of the training code and of the drawn world it trains on."""
