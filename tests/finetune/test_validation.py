"""Held-out samples: exact judgement, the loss of training, and a network left as it was."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from apollo_cli import engine
from apollo_cli.config import GenerationOptions, SamplingOptions
from apollo_cli.engine import Apollo
from apollo_cli.finetune.data.samples import Sample, Visual
from apollo_cli.finetune.training.examples import ExampleBuilder
from apollo_cli.finetune.training.trainee import Trainee
from apollo_cli.finetune.training.validation import Score, is_right, validate
from apollo_cli.model.prompt import Turn
from tests.cases import FOLDER

NANO = Path(__file__).parents[2] / "weights" / "nano"
EXAMPLE = Path(__file__).parents[2] / "examples" / "toybox.mp4"
CHOICES = ("a red ball", "The blue square", "two", "A green star.")


def judged(answer: str, wanted: str, choices: tuple[str, ...] = ()) -> bool:
    return is_right(Sample("s", (Turn("what?", wanted),), (), choices), answer)


@pytest.mark.parametrize(
    ("answer", "wanted"),
    [
        ("Red.", "red"),
        ("a  red ball", "Red ball."),
        ("THE END", "the end."),
        ('"yes"', "Yes"),
        ("a", "a"),
    ],
)
def test_case_full_stop_article_and_quotes_do_not_count(answer: str, wanted: str):
    assert judged(answer, wanted)


@pytest.mark.parametrize(
    ("answer", "wanted"),
    [("red", "blue"), ("red ball", "red"), ("yes no", "yes"), ("", "no"), ("3", "3.5")],
)
def test_another_answer_is_wrong(answer: str, wanted: str):
    assert not judged(answer, wanted)


@pytest.mark.parametrize("wanted", ["B", "B. The blue square", "the blue square"])
@pytest.mark.parametrize("answer", ["b", "(B)", "B.", "B) the blue square", "blue square."])
def test_a_choice_is_named_by_letter_or_text(answer: str, wanted: str):
    assert judged(answer, wanted, CHOICES)


@pytest.mark.parametrize("answer", ["A", "red ball", "E", "", "both", "a blue circle"])
def test_another_choice_is_wrong(answer: str):
    assert not judged(answer, "B", CHOICES)


def test_letters_that_are_the_choices_themselves_are_texts():
    assert judged("b", "B", ("B", "A"))
    assert not judged("a", "B", ("B", "A"))


@pytest.fixture(scope="module")
def nano() -> Apollo:
    return engine.load(NANO, use_cache=False)


@pytest.fixture
def builder(nano: Apollo) -> Iterator[ExampleBuilder]:
    with ExampleBuilder(nano.planner, SamplingOptions()) as made:
        yield made


def told_by_nano(nano: Apollo, question: str, visual: bool = True) -> str:
    memory = nano.watch(EXAMPLE) if visual else None
    return nano.ask(memory, question, GenerationOptions(max_new_tokens=32)).text


QUESTIONS = ("What colour is the circle?", "What shape is red?", "How many things are there?")


def test_the_judged_answer_is_the_one_ask_gives(nano: Apollo, builder: ExampleBuilder):
    visual = (Visual(EXAMPLE, "video"),)
    answers = [told_by_nano(nano, question) for question in QUESTIONS]
    right = [
        Sample(q, (Turn(q, a),), visual, (a, "x", "y"))
        for q, a in zip(QUESTIONS, answers, strict=True)
    ]
    wrong = [Sample(q, (Turn(q, "never"),), visual) for q in QUESTIONS]
    score = validate(Trainee(nano.network), builder, [*right, *wrong])
    assert (score.right, score.judged, score.answered) == (3, 6, 6)
    assert score.accuracy == 0.5


def test_the_loss_is_that_of_training_over_all_tokens(nano: Apollo, builder: ExampleBuilder):
    samples = [
        Sample("one", (Turn(QUESTIONS[0], "Red."),), (Visual(EXAMPLE, "video"),)),
        Sample("two", (Turn("Who are you?", "This is a somewhat longer answer in words."),)),
    ]
    trainee = Trainee(nano.network)
    score = validate(trainee, builder, samples)
    with torch.no_grad():
        loss, tokens = trainee([builder.build(sample) for sample in samples])
    assert score.tokens == tokens
    assert score.loss == pytest.approx(float(loss) / tokens, rel=1e-5)
    assert (score.judged, score.answered) == (1, 2)


def test_without_short_answers_there_is_no_accuracy(nano: Apollo, builder: ExampleBuilder):
    long = Sample("one", (Turn("Who are you?", "This is a longer answer."),))
    score = validate(Trainee(nano.network), builder, [long])
    assert score.accuracy is None
    assert score.loss is not None
    assert Score().loss is None


def test_the_network_is_left_as_it_was(builder: ExampleBuilder):
    network = engine.load(NANO, use_cache=False).network
    network.connector.train().requires_grad_(True)
    trainee = Trainee(network)
    modes = [module.training for module in network.modules()]
    assert len(set(modes)) == 2
    validate(trainee, builder, [Sample("one", (Turn("Who are you?", "Me."),))])
    assert [module.training for module in network.modules()] == modes
    loss, _ = trainee([builder.build(Sample("one", (Turn("Who are you?", "Me."),)))])
    assert torch.is_grad_enabled()
    assert torch.isfinite(loss)


def test_a_broken_sample_is_counted_and_left_out(nano: Apollo, builder: ExampleBuilder):
    bad = Sample("bad", (Turn("what?", "no"),), (Visual(FOLDER / "html_page.mp4", "video"),))
    good = Sample("good", (Turn("Who are you?", "Me."),))
    told: list[tuple[int, int]] = []
    score = validate(Trainee(nano.network), builder, [bad, good], lambda *n: told.append(n))
    assert (score.broken, score.answered) == (1, 1)
    assert told == [(1, 2), (2, 2)]


def test_scores_of_processes_add_up():
    total = Score(6.0, 3, 1, 2, 2) + Score(2.0, 1, 1, 1, 3, 1)
    assert total.loss == 2.0
    assert total.accuracy == pytest.approx(2 / 3)
    assert (total.answered, total.broken) == (5, 1)
