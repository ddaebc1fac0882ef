"""The recipe: a flat TOML file that says all about a training run; every fault is named at once."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Collection, Iterator
from dataclasses import MISSING, dataclass, field, fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal

from apollo_cli.config import SamplingOptions
from apollo_cli.errors import ApolloError, DataError
from apollo_cli.finetune.places import TABLES, list_doubles, list_missing, list_overlaps
from apollo_cli.finetune.stages import METHODS, STAGES, Method, Part, StageName
from apollo_cli.finetune.values import CHECKS, SOURCE_CHECKS, spell
from apollo_cli.finetune.words import count, describe_place, tidy
from apollo_cli.values import Check
from apollo_cli.weights.registry import known_models, resolve

Format = Literal["auto", "jsonl", "llava", "messages", "csv"]
# A recipe is short and flat. A key of thousands of parts takes the square of them in memory.
_LARGEST_FILE, _MOST_DOTS = 100_000, 200
# What to write for keys without a default.
_NEEDED = {
    "model": 'name one, such as "apollo-3b"',
    "stage": f"allowed are {', '.join(map(spell, STAGES))}",
    "method": f"allowed are {', '.join(map(spell, METHODS))}",
    "output": 'name a folder for the result, such as "out"',
    "data": "write [[data]], then path = ...",
}


@dataclass(frozen=True)
class DataSource:
    """One file of samples.

    Attributes:
        path: the file.
        share: its part of the mixture; None leaves it to the number of samples.
        format: how it is written; ``auto`` looks.
        media: folder that paths in it start from and may not leave; None is the file's own.
    """

    path: Path
    share: float | None = None
    format: Format = "auto"
    media: Path | None = None


@dataclass(frozen=True)
class Recipe:
    """A training run. The names are the keys of the file.

    Attributes:
        path: the recipe file. model: known name, folder or ``owner/repository[@revision]``.
        adapters: results of earlier runs that are put on the model first, in this order.
        stage, method, train: what is trained, and how.
        output: folder of the result, its checkpoints and its log.
        data, validation: files of samples. validation_share: share of data held out when no
            file of validation is named.
        device, dtype, template: None chooses as ``apollo ask`` does.
        learning_rate: of the language model; with the other two, None follows the paper.
        batch_size: samples of one step over all processes. micro_batch_size: at a time on one.
        epochs, steps: length of training; ``steps`` wins.
        fps, max_clips, max_tokens: how videos are sampled; ``max_tokens`` bounds a whole sample.
        readers: threads that read samples. read_seconds: longest reading of one sample.
        images_in_stage_2: train encoders on images against the paper's finding.
        cache_features: keep what frozen encoders and connector say of each video on disk.
    """

    path: Path = field(compare=False)
    model: str
    stage: StageName
    method: Method
    train: tuple[Part, ...]
    output: Path
    data: tuple[DataSource, ...]
    adapters: tuple[Path, ...] = ()
    validation: tuple[DataSource, ...] = ()
    validation_share: float = 0.05
    device: str | None = None
    dtype: Literal["bfloat16", "float32"] | None = None
    template: str | None = None
    learning_rate: float | None = None
    connector_learning_rate: float | None = None
    encoder_learning_rate: float | None = None
    lora_rank: int = 16
    lora_alpha: float = 32.0
    lora_dropout: float = 0.0
    lora_encoders: bool = False
    optimizer: Literal["adamw", "adamw8bit"] = "adamw"
    weight_decay: float = 0.0
    clip_norm: float = 1.0
    warmup_share: float = 0.03
    epochs: float = 1.0
    steps: int | None = None
    batch_size: int = 8
    micro_batch_size: int = 1
    gradient_checkpointing: bool = True
    length_grouped: bool = True
    seed: int = 0
    fps: float | None = None
    max_clips: int | None = None
    max_tokens: int | None = None
    save_every: int = 100
    keep_checkpoints: int = 2
    validate_every: int = 100
    readers: int = 2
    read_seconds: float = 120.0
    images_in_stage_2: bool = False
    cache_features: bool = True
    tensorboard: bool = False

    @property
    def sampling(self) -> SamplingOptions:
        """Which moments of each video are looked at."""
        return SamplingOptions(fps=self.fps, max_clips=self.max_clips)

    @property
    def own_rates(self) -> dict[Part, float]:
        """Learning rates that the file names itself."""
        rates: dict[Part, float] = {}
        for part, key in RATE_KEYS.items():
            if getattr(self, key) is not None:
                rates[part] = getattr(self, key)
        return rates

    def total_steps(self, samples: int) -> int:
        """Number of steps.

        Args:
            samples: number of samples that can be trained on.
        """
        return self.steps or max(1, math.ceil(self.epochs * samples / self.batch_size))


RATE_KEYS: dict[Part, str] = {
    "llm": "learning_rate",
    "connector": "connector_learning_rate",
    "encoders": "encoder_learning_rate",
}


def load_recipe(path: Path | str, *, coming: Collection[Path] | None = ()) -> Recipe:
    """Read and check a recipe.

    Relative paths in it start from its own folder.

    Args:
        path: the TOML file.
        coming: results that need not be there yet; None is any.

    Raises:
        DataError: it cannot be read, or has faults; all of them are listed.
    """
    values, faults = read_recipe(path, coming=coming)
    if faults:
        raise DataError(f"{tidy(path)} has {count(len(faults), 'fault')}", faults=faults)
    return Recipe(path=tidy(path), **values)


def read_recipe(
    path: Path | str, *, coming: Collection[Path] | None = ()
) -> tuple[dict[str, Any], list[str]]:
    """The values of a recipe, by field, and all that is wrong with it.

    A field with a fault has no value. The arguments are those of ``load_recipe``.

    Raises:
        DataError: it cannot be read at all.
    """
    path = tidy(path)
    values, faults = _checked(_parse(path), path.parent)
    faults += list_missing(values, coming)
    faults += list_overlaps(path, values)
    faults += list_doubles(values)
    faults += _rule_faults(values)
    return values, faults


def _parse(path: Path) -> dict[str, Any]:
    try:
        if not path.is_file():
            raise DataError(
                f"recipe {path} {describe_place(path)}",
                next_step="apollo finetune new FOLDER --data FILE writes one",
            )
        if path.stat().st_size > _LARGEST_FILE:
            raise DataError(
                f"{path} has over {_LARGEST_FILE} bytes", "a recipe is a short TOML file"
            )
        text = path.read_text("utf-8-sig")
        for number, line in enumerate(text.split("\n"), start=1):
            if line.count(".") > _MOST_DOTS:
                raise DataError(
                    f"{path}, line {number}, has {line.count('.')} dots",
                    f"up to {_MOST_DOTS} are read: keys of a recipe have none",
                )
        return tomllib.loads(text)
    except ValueError as error:
        raise DataError(f"{path} is not valid TOML ({error})") from None
    except RecursionError:
        raise DataError(f"{path} is not valid TOML (brackets in brackets without end)") from None
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror or error})") from None


def _checked(raw: dict[str, Any], folder: Path) -> tuple[dict[str, Any], list[str]]:
    """Values of the fields, and faults; a field with a fault has no value."""
    faults: list[str] = []
    tables = {name: raw.pop(name) for name in TABLES if name in raw}
    values = _check_keys(raw, CHECKS, "", faults)
    for name, table in tables.items():
        if not isinstance(table, list) or not all(isinstance(row, dict) for row in table):
            faults.append(f"{name} is written as tables: [[{name}]], then path = ...")
            continue
        known = dict(SOURCE_CHECKS)
        if name == "validation":
            del known["share"]
        rows = [
            _check_keys(row, known, f"{name} {number}: ", faults)
            for number, row in enumerate(table, start=1)
        ]
        faults += [
            f"{name} {n}: path is missing" for n, row in enumerate(table, 1) if "path" not in row
        ]
        values[name] = tuple(_build_source(row, folder) for row in rows if "path" in row)
    for key in ("output", "adapters"):
        if key in values:
            found = values[key]
            values[key] = (
                _at(folder, found) if key == "output" else tuple(_at(folder, p) for p in found)
            )
    if "model" in values:
        values["model"] = _locate(values["model"], folder, faults)
    if "stage" in values and "train" not in raw:
        values["train"] = STAGES[values["stage"]].trains
    needed = [f.name for f in fields(Recipe) if f.default is MISSING and f.name != "path"]
    given = {*raw, *tables, *values}
    faults += [
        f"{key} is missing; {_NEEDED[key]}" for key in needed if key not in given and key != "train"
    ]
    return values, faults


def _check_keys(
    raw: dict[str, Any], checks: dict[str, Check], where: str, faults: list[str]
) -> dict[str, Any]:
    values = {}
    for key, value in raw.items():
        if key not in checks:
            if where and key in CHECKS:
                faults.append(
                    f"{where}{key} belongs to the whole recipe: write it above the first [[...]], "
                    "since every line below belongs to that table"
                )
                continue
            if key in SOURCE_CHECKS:
                faults.append(f"{where}{key} belongs to a file of data: write it below [[data]]")
                continue
            near = get_close_matches(key, [*checks, *TABLES] if not where else list(checks), n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            # All keys of a table are few enough to be listed.
            hint = hint or (f"; known here are {', '.join(checks)}" if where else "")
            faults.append(f"{where}{key[:60]} is not a key of a recipe{hint}")
            continue
        try:
            values[key] = checks[key](value)
        except ValueError as error:
            faults.append(f"{where}{key} = {spell(value)[:80]}: {error}")
    return values


def _at(folder: Path, text: str) -> Path:
    return tidy(folder / Path(text).expanduser())


def _build_source(row: dict[str, Any], folder: Path) -> DataSource:
    places = {key: _at(folder, row[key]) for key in ("path", "media") if key in row}
    return DataSource(**{**row, **places})


def _locate(model: str, folder: Path, faults: list[str]) -> str:
    """A model folder beside the recipe as an absolute path; names as they are."""
    known = model.partition("@")[0].lower() in known_models()
    if not known and _at(folder, model).is_dir():
        return str(_at(folder, model))
    try:
        resolve(model)
    except ApolloError as error:
        faults.append(f"model: {error.message}")
    return model


def _rule_faults(values: dict[str, Any]) -> Iterator[str]:
    """Faults of keys that are fine each for itself."""
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
    batch = values.get("batch_size", Recipe.batch_size)
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


def to_toml(recipe: Recipe) -> str:
    """The recipe with every value spelled out, as a file that loads to the same recipe."""
    lines = []
    for item in fields(Recipe):
        value = getattr(recipe, item.name)
        if item.name not in ("path", *TABLES) and value is not None:
            lines.append(f"{item.name} = {spell(value)}")
    for name in TABLES:
        for source in getattr(recipe, name):
            lines += ["", f"[[{name}]]"]
            rows = ((f.name, getattr(source, f.name)) for f in fields(DataSource))
            lines += [f"{key} = {spell(value)}" for key, value in rows if value is not None]
    return "\n".join(lines) + "\n"
