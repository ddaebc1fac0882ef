"""The recipe: a flat TOML file that says all about a training run; every fault is named at once.

A key is a field of ``Recipe``: its check, its comment in the files of ``apollo finetune new``, and
its default stand there and nowhere else.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Collection
from dataclasses import MISSING, dataclass, field, fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal

from apollo_cli.config import SamplingOptions
from apollo_cli.errors import ApolloError, DataError
from apollo_cli.finetune.data.formats import FORMATS
from apollo_cli.finetune.places import (
    TABLES,
    describe_place,
    list_doubles,
    list_missing,
    list_overlaps,
    spell,
    tidy,
)
from apollo_cli.finetune.stages import (
    DEFAULT_BATCH,
    METHODS,
    PARTS,
    RATE_KEYS,
    STAGES,
    Method,
    Part,
    StageName,
    list_conflicts,
)
from apollo_cli.text import count
from apollo_cli.values import Check, flag, list_of, number, one_of, text, whole
from apollo_cli.weights.registry import known_models, resolve

# A run of a step a millisecond would take twelve days.
MOST_STEPS = 1_000_000_000
# A recipe is short and flat. A key of thousands of parts takes the square of them in memory.
_LARGEST_FILE, _MOST_DOTS = 100_000, 200
_RATE = number(0, 1, above=True)


def key(check: Check, comment: str, default: Any = MISSING) -> Any:
    """A key of the file: how its value is checked, what it is for, and its default."""
    return field(default=default, metadata={"check": check, "comment": comment})


@dataclass(frozen=True)
class DataSource:
    """One file of samples.

    Attributes:
        path: the file.
        share: its part of the mixture; None leaves it to the number of samples.
        format: how it is written; ``auto`` looks.
        media: folder that paths in it start from and may not leave; None is the file's own.
    """

    path: Path = key(text, "the file")
    share: float | None = key(number(0, 1, above=True), "its part of the mixture", None)
    format: str = key(one_of("auto", *FORMATS), "its form", "auto")
    media: Path | None = key(text, "folder that paths in it start from", None)


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A training run. The names are the keys of the file, in the order in which it is written."""

    path: Path = field(compare=False)
    model: str = key(text, "what training starts from: known name, folder or owner/repository")
    adapters: tuple[Path, ...] = key(
        list_of(text, once=True), "results of earlier runs that are put on the model first", ()
    )
    stage: StageName = key(
        one_of(*STAGES), "1, 2, 3 or custom: which parts may be trained, on which data"
    )
    method: Method = key(
        one_of(*METHODS),
        "full, lora (small matrices beside frozen weights) or qlora (those in 4 bit)",
    )
    train: tuple[Part, ...] = key(
        list_of(one_of(*PARTS), once=True), "parts that learn: llm, connector, encoders"
    )
    output: Path = key(text, "folder of the result; apollo ask --adapter takes it")
    learning_rate: float | None = key(_RATE, "of the language model", None)
    connector_learning_rate: float | None = key(_RATE, "of the connector", None)
    encoder_learning_rate: float | None = key(_RATE, "of the vision encoders", None)
    lora_rank: int = key(
        whole(1, 1024),
        "inner width of the small matrices: larger learns more and takes more memory",
        16,
    )
    lora_alpha: float = key(
        number(0, 4096, above=True), "their weight is lora_alpha / lora_rank", 32.0
    )
    lora_dropout: float = key(
        number(0, 0.9), "share of their inputs that is dropped while training", 0.0
    )
    lora_encoders: bool = key(
        flag, "train small matrices in the encoders instead of all of their weights", False
    )
    optimizer: Literal["adamw", "adamw8bit"] = key(
        one_of("adamw", "adamw8bit"),
        "adamw, or adamw8bit, which keeps a quarter of the memory",
        "adamw",
    )
    weight_decay: float = key(number(0, 1), "pull of matrices towards zero", 0.0)
    clip_norm: float = key(number(0, 1e6, above=True), "largest norm of a step's gradients", 1.0)
    warmup_share: float = key(
        number(0, 0.9),
        "share of the steps in which the rate rises; then it falls along a cosine",
        0.03,
    )
    epochs: float = key(number(0, 10_000, above=True), "passes over the data", 1.0)
    steps: int | None = key(whole(1, MOST_STEPS), "length of the run; wins over epochs", None)
    batch_size: int = key(whole(1, 65_536), "samples of one step, over all GPUs", DEFAULT_BATCH)
    micro_batch_size: int = key(
        whole(1, 65_536), "samples at a time on one GPU: lower it when memory is short", 1
    )
    gradient_checkpointing: bool = key(
        flag, "compute layers twice instead of keeping them: slower, far smaller", True
    )
    length_grouped: bool = key(flag, "put samples of one length into a batch", True)
    seed: int = key(whole(0), "the same seed gives the same run", 0)
    device: str | None = key(text, "cpu, cuda, mps; left out: the best there is", None)
    dtype: Literal["bfloat16", "float32"] | None = key(
        one_of("bfloat16", "float32"), "bfloat16 or float32; left out: what fits the device", None
    )
    template: str | None = key(
        one_of("qwen_2", "qwen_1_5"), "qwen_2 or qwen_1_5; left out: the model's own", None
    )
    fps: float | None = key(
        number(0, 1000, above=True),
        "frames a second inside a clip; left out: the model's own",
        None,
    )
    max_clips: int | None = key(whole(1), "most clips of one video", None)
    max_tokens: int | None = key(
        whole(32),
        "longest sample: longer videos are seen more sparsely; left out: the context",
        None,
    )
    validation_share: float = key(
        number(0, 0.5), "share of the data that is held out and measured, never learned", 0.05
    )
    validate_every: int = key(whole(1), "steps between measurements", 100)
    save_every: int = key(
        whole(1), "steps between checkpoints; a stopped run resumes from the last one", 100
    )
    keep_checkpoints: int = key(whole(1, 10_000), "how many are kept", 2)
    readers: int = key(whole(1, 256), "threads that read videos ahead", 2)
    read_seconds: float = key(
        number(0, 86_400, above=True),
        "a sample that takes longer to read is left out, and said",
        120.0,
    )
    images_in_stage_2: bool = key(
        flag, "train encoders on images too, against the paper's finding", False
    )
    cache_features: bool = key(
        flag, "encode each video once where encoders and connector do not change", True
    )
    tensorboard: bool = key(flag, "write TensorBoard files besides log.jsonl", False)
    data: tuple[DataSource, ...]
    validation: tuple[DataSource, ...] = ()

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


def checks_of(kind: type[Recipe | DataSource]) -> dict[str, Check]:
    """The check of each key."""
    return {f.name: f.metadata["check"] for f in fields(kind) if f.metadata}


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
    faults += list_conflicts(values)
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
    values = _check_keys(raw, checks_of(Recipe), "", faults)
    for name, table in tables.items():
        if not isinstance(table, list) or not all(isinstance(row, dict) for row in table):
            faults.append(f"{name} is written as tables: [[{name}]], then path = ...")
            continue
        known = checks_of(DataSource)
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
    if "output" in values:
        values["output"] = _at(folder, values["output"])
    if "adapters" in values:
        values["adapters"] = tuple(_at(folder, name) for name in values["adapters"])
    if "model" in values:
        values["model"] = _locate(values["model"], folder, faults)
    if "stage" in values and "train" not in raw:
        values["train"] = STAGES[values["stage"]].trains
    needed = {"data": "write [[data]], then path = ..."}
    needed |= {
        f.name: f.metadata["comment"] for f in fields(Recipe) if f.metadata and f.default is MISSING
    }
    given = {*raw, *tables, *values, "train"}
    faults += [
        f"{key} is missing; {comment}" for key, comment in needed.items() if key not in given
    ]
    return values, faults


def _check_keys(
    raw: dict[str, Any], checks: dict[str, Check], where: str, faults: list[str]
) -> dict[str, Any]:
    values = {}
    for key, value in raw.items():
        if key not in checks:
            faults.append(f"{where}{key[:60]} {_misplaced(key, where, checks)}")
            continue
        try:
            values[key] = checks[key](value)
        except ValueError as error:
            faults.append(f"{where}{key} = {spell(value)[:80]}: {error}")
    return values


def _misplaced(key: str, where: str, checks: dict[str, Check]) -> str:
    """What is wrong with a key that is not one of its table."""
    if where and key in checks_of(Recipe):
        return (
            "belongs to the whole recipe: write it above the first [[...]], since every line below "
            "belongs to that table"
        )
    if key in checks_of(DataSource):
        return "belongs to a file of data: write it below [[data]]"
    near = get_close_matches(key, list(checks) if where else [*checks, *TABLES], n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    # All keys of a table are few enough to be listed.
    hint = hint or (f"; known here are {', '.join(checks)}" if where else "")
    return f"is not a key of a recipe{hint}"


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
