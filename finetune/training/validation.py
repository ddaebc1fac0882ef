"""How good a network is on samples that it is not trained on: loss, and accuracy where it shows."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass, replace

import torch
from torch import nn
from transformers import DynamicCache

from apollo_cli.config import GenerationOptions
from apollo_cli.errors import ApolloError, DataError, FitError, MediaError, UsageError
from apollo_cli.finetune.data.samples import Sample
from apollo_cli.finetune.training.examples import Example, ExampleBuilder
from apollo_cli.finetune.training.stopping import is_out_of_memory, too_large
from apollo_cli.finetune.training.trainee import Trainee
from apollo_cli.model.generate import generate, prefill
from apollo_cli.scoring import LETTERS
from apollo_cli.session import Session

_ARTICLE = re.compile(r"^(?:a|an|the)\s+(?=\S)")
_LETTER = re.compile(r"^\(?([a-j])(?:[).:]|$)")
# Tokens that an answer may be longer than the right one before it is cut.
_SPARE_TOKENS = 8


@dataclass(frozen=True)
class Score:
    """Sums over samples, so that the scores of several processes add up.

    Attributes:
        loss_sum, tokens: of all trained tokens. right: of the judged answers.
        judged: samples whose answer was compared. answered: samples that were measured.
        broken: samples that could not be read.
    """

    loss_sum: float = 0.0
    tokens: int = 0
    right: int = 0
    judged: int = 0
    answered: int = 0
    broken: int = 0

    def __add__(self, other: Score) -> Score:
        return Score(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))

    @property
    def loss(self) -> float | None:
        """Mean over trained tokens; None without any."""
        return self.loss_sum / self.tokens if self.tokens else None

    @property
    def accuracy(self) -> float | None:
        """Share of right answers, 0 to 1; None where no answer could be judged."""
        return self.right / self.judged if self.judged else None


def validate(
    trainee: Trainee,
    builder: ExampleBuilder,
    samples: Sequence[Sample],
    on_progress: Callable[[int, int], None] = lambda done, total: None,
    on_broken: Callable[[Sample, ApolloError], None] = lambda sample, error: None,
) -> Score:
    """Measure a network on samples; it is left as it was found.

    Where a sample has choices or a short last answer, that answer is written greedily and
    compared; its earlier turns are given.

    Args:
        trainee: in any mode; measured in evaluation mode.
        builder: reads the samples. Those that cannot be read are counted and left out.
        on_progress: called with samples done and samples in all.
        on_broken: called with each sample that cannot be read, and why.

    Raises:
        FitError: a sample does not fit the memory of the device.
    """
    score = Score()
    with torch.no_grad(), evaluation_mode(trainee.network):
        for number, sample in enumerate(samples, start=1):
            try:
                example = builder.build(sample)
            except (MediaError, FitError, DataError, UsageError) as error:
                on_broken(sample, error)
                score += Score(broken=1)
            else:
                score += _measure_in_memory(trainee, builder, sample, example)
            on_progress(number, len(samples))
    return score


@contextmanager
def evaluation_mode(network: nn.Module) -> Iterator[None]:
    """Put all modules in evaluation mode, and each back into its own afterwards."""
    modes = {module: module.training for module in network.modules()}
    network.eval()
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode


def is_right(sample: Sample, answer: str) -> bool:
    """Whether an answer is the one of a sample's last turn.

    Case, a full stop at the end, quotes and an article in front do not count. Choices may be
    named by their letter or their text.
    """
    wanted = sample.turns[-1].answer
    if sample.choices:
        chosen = _choice(answer, sample.choices)
        right = _choice(wanted, sample.choices)
        if chosen is not None and right is not None:
            return chosen == right
    return _plain(answer) == _plain(wanted)


def _choice(answer: str, choices: Sequence[str]) -> int | None:
    """Which choice an answer names, by text or by letter."""
    texts = [_plain(choice) for choice in choices]
    told = _plain(answer)
    if told in texts:
        return texts.index(told)
    letter = _LETTER.match(answer.strip().casefold())
    index = LETTERS.index(letter[1].upper()) if letter else len(choices)
    return index if index < len(choices) else None


def _plain(text: str) -> str:
    words = " ".join(text.casefold().split()).strip("\"'")
    return _ARTICLE.sub("", words.removesuffix(".").strip())


def _measure_in_memory(
    trainee: Trainee, builder: ExampleBuilder, sample: Sample, example: Example
) -> Score:
    try:
        return _measure(trainee, builder, sample, example)
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        device = trainee.network.device
        raise too_large("the measurement of a held-out sample", device, [example]) from None


def _measure(trainee: Trainee, builder: ExampleBuilder, sample: Sample, example: Example) -> Score:
    (visual,) = trainee.visual_tokens([example])
    loss, tokens = trainee([replace(example, pixels=None, tokens=visual)])
    judged = sample.is_short_answer
    right = judged and is_right(sample, _write(trainee, builder, sample, example, visual))
    return Score(float(loss), tokens, int(right), int(judged), 1)


def _write(
    trainee: Trainee,
    builder: ExampleBuilder,
    sample: Sample,
    example: Example,
    visual: torch.Tensor | None,
) -> str:
    """The greedy answer to the last question of a sample, as ``ask`` would give it."""
    network, prompts = trainee.network, builder.planner.prompts
    wanted = len(prompts.answer_ids(sample.turns[-1].answer.strip()))
    cache = DynamicCache(config=network.llm.config)
    logits = prefill(network, network.embed(example.ids[:-wanted], visual), cache)
    longest = max(wanted, *(len(prompts.answer_ids(choice)) for choice in ("", *sample.choices)))
    options = GenerationOptions(max_new_tokens=longest + _SPARE_TOKENS)
    ends = Session(network, prompts).eos_ids
    return prompts.tokenizer.decode(list(generate(network, logits, cache, options, ends)))
