"""The stages of training as data: what each trains, on what, how fast (paper, findings 8-10)."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from apollo_cli.finetune.places import spell

if TYPE_CHECKING:
    from apollo_cli.finetune.data.samples import Kind

Part = Literal["llm", "connector", "encoders"]
StageName = Literal[1, 2, 3, "custom"]
Method = Literal["full", "lora", "qlora"]

PARTS: tuple[Part, ...] = ("llm", "connector", "encoders")
METHODS: tuple[Method, ...] = ("full", "lora", "qlora")
# The key of a recipe that holds the learning rate of a part.
RATE_KEYS: dict[Part, str] = {
    "llm": "learning_rate",
    "connector": "connector_learning_rate",
    "encoders": "encoder_learning_rate",
}
DEFAULT_BATCH = 8
# Values of the language model at which the paper's rates hold.
REFERENCE_PARAMETERS = 3_085_938_688
# Low-rank factors start at zero and move the weights less than full training at the same rate.
LORA_RATE_FACTOR = 10.0
# The rule was made for models of billions; at five times this, the toy forgets what it knew.
HIGHEST_RATE = 1e-3


@dataclass(frozen=True)
class Stage:
    """One stage of training.

    Attributes:
        name: as a recipe calls it.
        summary: what it does, in a few words.
        allowed: parts that may be trained in it. trains: those that are, when none are named.
        kinds: kinds of samples that it takes.
        rates: learning rates at 3B.
        text_share: lowest and highest share of samples without pictures; None: no advice.
        because: the finding behind its limits, in words for an error.
    """

    name: StageName
    summary: str
    allowed: tuple[Part, ...]
    trains: tuple[Part, ...]
    kinds: tuple[Kind, ...]
    rates: Mapping[Part, float]
    text_share: tuple[float, float] | None = None
    because: str = ""


_ALL_KINDS: tuple[Kind, ...] = ("text", "image", "multi-image", "video")
_LAST_RATES: dict[Part, float] = {"llm": 3e-5, "connector": 1e-4, "encoders": 5e-6}

STAGES: dict[StageName, Stage] = {
    1: Stage(
        1,
        "the connector alone, on video",
        ("connector",),
        ("connector",),
        ("video",),
        {"connector": 1e-4},
        because="the paper's stage 1 trains the connector alone, on video",
    ),
    2: Stage(
        2,
        "the vision encoders, on video",
        ("encoders",),
        ("encoders",),
        ("video",),
        {"encoders": 5e-6},
        because="the paper trains encoders on video alone, never on mixed images and video, "
        "with the language model frozen",
    ),
    3: Stage(
        3,
        "language model and connector, on everything",
        ("llm", "connector"),
        ("llm", "connector"),
        _ALL_KINDS,
        _LAST_RATES,
        text_share=(0.10, 0.14),
        because="the paper found 59.2 points with frozen encoders, and 48.1 at best with encoders "
        "that were trained together with the language model",
    ),
    "custom": Stage("custom", "any parts, on everything", PARTS, (), _ALL_KINDS, _LAST_RATES),
}

TEXT_FINDING = (
    "the paper scored 59.0 with 15 % text, 54.1 with 25 %, 47.5 with none and 41.8 with 7 % and "
    "video alone: without text the language model forgets how to talk"
)


# Stages in a row, as the paper compared them: each with its name in a recipe and what it trains.
# The paper's points, best of three settings: 59.2, 57.8, 48.1, 48.7 and 31.0.
SCHEDULES: dict[str, tuple[tuple[StageName, tuple[Part, ...]], ...]] = {
    "three": ((1, ("connector",)), (2, ("encoders",)), (3, ("llm", "connector"))),
    "two-frozen": ((1, ("connector",)), (3, ("llm", "connector"))),
    "two-trained": ((1, ("connector",)), ("custom", PARTS)),
    "one-frozen": ((3, ("llm", "connector")),),
    "one-trained": (("custom", PARTS),),
}


def learning_rates(
    stage: StageName, llm_parameters: int, low_rank: Collection[Part] = ()
) -> dict[Part, float]:
    """Learning rates of a stage for a model of another size.

    The paper gives them at 3B and scales with the square root: half the parameters take 1.41 times
    the rate. Low-rank adapters take ten times the rate of the weights themselves.

    Args:
        stage: which one.
        llm_parameters: number of values of the language model.
        low_rank: parts that are trained through low-rank adapters.
    """
    scale = math.sqrt(REFERENCE_PARAMETERS / llm_parameters)
    rates: dict[Part, float] = {}
    for part, rate in STAGES[stage].rates.items():
        factor = LORA_RATE_FACTOR if part in low_rank else 1.0
        rates[part] = min(rate * scale * factor, HIGHEST_RATE)
    return rates


def list_conflicts(values: Mapping[str, Any]) -> Iterator[str]:
    """Faults of the keys of a recipe that are fine each for itself, in words."""
    train, name = values.get("train"), values.get("stage")
    if train is not None and name is not None:
        stage = STAGES[name]
        refused = [part for part in train if part not in stage.allowed]
        if refused:
            yield (
                f"train = {spell(train)}: stage {name} trains {' and '.join(stage.allowed)}; "
                f'{stage.because}; stage = "custom" trains anything'
            )
        if not train:
            yield f"train names no part; allowed are {', '.join(stage.allowed)}"
        unused = [key for part, key in RATE_KEYS.items() if key in values and part not in train]
        yield from (f"{key} is given, but that part is not trained" for key in unused)
        if values.get("lora_encoders") and "encoders" not in train:
            yield 'lora_encoders = true, but train does not name "encoders"'
    batch = values.get("batch_size", DEFAULT_BATCH)
    if values.get("micro_batch_size", 1) > batch:
        yield f"micro_batch_size is above batch_size, which is {batch}"
    sources = values.get("data")
    if sources is not None and not sources:
        yield "data names no file"
    shares = [source.share for source in sources or () if source.share is not None]
    if shares and len(shares) < len(sources or ()):
        yield "share is given for some data only; give it for all or for none"
    elif shares and abs(sum(shares) - 1) > 0.01:
        yield f"the shares of data sum to {sum(shares):.3g}; they must sum to 1"
