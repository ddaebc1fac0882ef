"""The stages of the paper as data: their rates, their parts, and the schedules it compared."""

from __future__ import annotations

import pytest

from apollo_cli.finetune.stages import (
    HIGHEST_RATE,
    PARTS,
    REFERENCE_PARAMETERS,
    STAGES,
    learning_rates,
)
from apollo_cli.model.sizes import llm_sizes
from apollo_cli.weights.network import released_network
from apollo_cli.weights.registry import known_models


def test_the_rates_at_3b_are_those_of_the_paper():
    assert learning_rates(1, REFERENCE_PARAMETERS) == {"connector": 1e-4}
    assert learning_rates(2, REFERENCE_PARAMETERS) == {"encoders": 5e-6}
    third = learning_rates(3, REFERENCE_PARAMETERS)
    assert (third["llm"], third["connector"]) == (3e-5, 1e-4)


def test_the_reference_is_the_language_model_of_3b():
    config = released_network(known_models()["apollo-3b"]).config
    assert llm_sizes(config.llm).values == REFERENCE_PARAMETERS


def test_a_quarter_of_the_size_takes_twice_the_rate():
    small = learning_rates(3, REFERENCE_PARAMETERS // 4)
    assert small["llm"] == pytest.approx(6e-5)
    assert small["connector"] == pytest.approx(2e-4)


def test_low_rank_factors_take_ten_times_the_rate_and_nothing_else_does():
    rates = learning_rates(3, REFERENCE_PARAMETERS, ["llm"])
    assert rates["llm"] == pytest.approx(3e-4)
    assert rates["connector"] == pytest.approx(1e-4)


def test_no_rate_of_a_toy_leaves_all_bounds():
    assert max(learning_rates("custom", 1000, PARTS).values()) == HIGHEST_RATE


def test_encoders_are_never_trained_beside_a_language_model_in_a_stage_of_the_paper():
    for stage in (STAGES[1], STAGES[2], STAGES[3]):
        assert set(stage.trains) <= set(stage.allowed)
        assert not {"llm", "encoders"} <= set(stage.allowed)
    assert STAGES[2].kinds == STAGES[1].kinds == ("video",)
