"""The values of the original code on a tiny random checkpoint, and our model on the same."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from apollo_cli.model.apollo import ApolloModel
from apollo_cli.model.tokenizer import TextTokenizer, load_tokenizer
from apollo_cli.weights.load import load_model

TESTS = Path(__file__).parents[1]
FOLDERS = {"tubelet 1": TESTS / "golden", "tubelet 2": TESTS / "golden_tubelet2"}
QUESTION = "What happens in the video?"


@cache
def facts() -> dict[str, Any]:
    return json.loads((TESTS / "golden" / "golden.json").read_text())


@cache
def arrays(variant: str, name: str) -> dict[str, np.ndarray]:
    with np.load(FOLDERS[variant] / f"{name}.npz") as file:
        return dict(file)


@cache
def model(variant: str) -> ApolloModel:
    return load_model(FOLDERS[variant] / "tiny-checkpoint")[0]


@cache
def tokenizer() -> TextTokenizer:
    return load_tokenizer(FOLDERS["tubelet 1"] / "tiny-checkpoint" / "llm")
