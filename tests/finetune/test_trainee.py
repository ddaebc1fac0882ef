"""The loss: of trained tokens only, the same in any batch, and with gradients where they belong."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from peft import LoraConfig, inject_adapter_in_model

from apollo_cli.config import SamplingOptions
from apollo_cli.finetune.data.samples import Sample, Visual
from apollo_cli.finetune.training.examples import IGNORED, Example, ExampleBuilder
from apollo_cli.finetune.training.trainee import Trainee
from apollo_cli.model.apollo import ApolloModel
from apollo_cli.model.prompt import Turn
from apollo_cli.planner import load_planner
from apollo_cli.weights.load import load_model
from tests import tiny
from tests.cases import FOLDER
from tests.tiny import Tiny

CLIP = Visual(FOLDER / "cfr30.mp4", "video")
LONGER = Visual(FOLDER / "one_key_60s.mp4", "video", 0, 20)
PHOTO = Visual(FOLDER / "photo.jpg", "image")
SAMPLES = (
    Sample("a", (Turn("what?", "a test"), Turn("why?", "because of it")), (LONGER,)),
    Sample("b", (Turn("what?", "nothing"),)),
    Sample("c", (Turn("which?", "both"),), (CLIP, PHOTO)),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save(tmp_path_factory.mktemp("tiny") / "checkpoint", Tiny(tied=True))


@pytest.fixture(scope="module")
def examples(folder: Path) -> Iterator[list[Example]]:
    planner = load_planner(load_model(folder)[1])
    with ExampleBuilder(planner, SamplingOptions()) as builder:
        yield [builder.build(sample) for sample in SAMPLES]


def fresh(folder: Path, *trained: str, **options: object) -> ApolloModel:
    network, _ = load_model(folder, **options)  # pyright: ignore[reportArgumentType]
    for name in trained:
        network.get_submodule(name).requires_grad_(True).train()
    return network


def gradients(network: ApolloModel) -> dict[str, torch.Tensor]:
    return {n: p.grad.clone() for n, p in network.named_parameters() if p.grad is not None}


def train_once(trainee: Trainee, batches: Sequence[Sequence[Example]]) -> tuple[float, int]:
    """Losses, trained tokens and gradients of one step in micro batches."""
    trainee.network.zero_grad()
    total, tokens = 0.0, 0
    for batch in batches:
        loss, count = trainee(batch)
        loss.backward()
        total, tokens = total + float(loss.detach()), tokens + count
    return total, tokens


def straight_loss(network: ApolloModel, example: Example) -> torch.Tensor:
    """As a textbook has it: logits of everything, shifted by one, ignored where not trained."""
    tokens = None
    if example.pixels is not None:
        tokens = network.encode_clips(example.pixels).flatten(0, 1)
    embedded = network.embed(example.ids, tokens)
    logits = network.llm(inputs_embeds=embedded, use_cache=False).logits[0]
    targets = torch.tensor(example.labels[1:])
    return F.cross_entropy(logits[:-1], targets, ignore_index=IGNORED, reduction="sum")


def test_the_loss_is_that_of_a_straight_computation(folder: Path, examples: list[Example]):
    network = fresh(folder, "llm", "connector")
    for example in examples:
        loss, tokens = Trainee(network)([example])
        assert tokens == example.trained_tokens
        assert loss.dtype == torch.float32
        assert torch.allclose(loss, straight_loss(network, example), atol=1e-4)


@pytest.mark.parametrize("trained", [["llm"], ["connector"], ["encoders"], ["llm", "connector"]])
def test_a_batch_is_the_sum_of_its_examples(
    folder: Path, examples: list[Example], trained: list[str]
):
    network = fresh(folder, *trained)
    trainee = Trainee(network, gradient_checkpointing=False)
    seen = [examples[0], examples[2]]
    together = train_once(trainee, [examples])
    grads = gradients(network)
    apart = train_once(trainee, [[e] for e in (examples if "llm" in trained else seen)])
    if "llm" not in trained:
        apart = (apart[0] + float(trainee([examples[1]])[0]), apart[1] + examples[1].trained_tokens)
    assert together[1] == apart[1] == sum(e.trained_tokens for e in examples)
    assert together[0] == pytest.approx(apart[0], abs=1e-5 * together[1])
    assert grads.keys() == gradients(network).keys()
    for name, grad in gradients(network).items():
        assert torch.allclose(grad, grads[name], atol=1e-5 * (1 + float(grad.abs().max()))), name


@pytest.mark.parametrize("trained", [["llm"], ["connector"], ["encoders"]])
def test_computing_activations_again_changes_nothing(
    folder: Path, examples: list[Example], trained: list[str]
):
    network = fresh(folder, *trained)
    plain = train_once(Trainee(network, gradient_checkpointing=False), [examples])
    grads = gradients(network)
    again = Trainee(network, gradient_checkpointing=True)
    again.encode_batch = 3
    assert train_once(again, [examples])[0] == pytest.approx(plain[0], rel=1e-6)
    assert gradients(network).keys() == grads.keys()
    for name, grad in gradients(network).items():
        assert torch.allclose(grad, grads[name], atol=1e-5 * (1 + float(grad.abs().max()))), name


@pytest.mark.parametrize("trained", ["llm", "connector", "encoders"])
def test_gradients_are_where_something_is_trained(
    folder: Path, examples: list[Example], trained: str
):
    network = fresh(folder, trained)
    train_once(Trainee(network), [examples])
    got = {name.split(".")[0] for name in gradients(network)}
    assert got == {trained}


def test_a_frozen_language_model_drops_its_activations_too(folder: Path, examples: list[Example]):
    network = fresh(folder, "connector")
    assert not network.llm.training

    def kept_bytes(checkpointing: bool) -> int:
        network.llm.activation_checkpointing_disable()
        trainee, kept = Trainee(network, checkpointing), [0]

        def note(tensor: torch.Tensor) -> torch.Tensor:
            kept[0] += tensor.nbytes
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            trainee([examples[0]])
        return kept[0]

    assert kept_bytes(True) < kept_bytes(False) / 4


def test_cached_tokens_give_the_same_loss(folder: Path, examples: list[Example]):
    network = fresh(folder, "llm")
    trainee = Trainee(network)
    visual = trainee.visual_tokens(examples)
    cached = [
        Example(e.name, e.ids, e.labels, None, tokens)
        for e, tokens in zip(examples, visual, strict=True)
    ]
    plain = train_once(trainee, [examples])
    grads = gradients(network)
    assert train_once(trainee, [cached]) == plain
    assert all(torch.equal(grad, grads[name]) for name, grad in gradients(network).items())


def test_parts_that_are_set_aside_come_back_for_what_is_not_cached(
    folder: Path, examples: list[Example]
):
    trainee = Trainee(fresh(folder, "llm"))
    plain = train_once(trainee, [examples])
    places = []
    trainee.set_aside()
    for part in (trainee.network.encoders, trainee.network.connector):
        move = part.to
        part.to = lambda device, move=move: places.append(str(device)) or move(device)  # pyright: ignore
    assert train_once(trainee, [examples]) == plain
    assert places == ["cpu"] * 4
    text = Example("text", examples[0].ids[:3], examples[0].labels[:3], None, None)
    trainee.visual_tokens([text])
    assert len(places) == 4


@pytest.mark.parametrize("quant", [None, "4bit"])
def test_adapters_are_trained_on_a_frozen_base(
    folder: Path, examples: list[Example], quant: str | None
):
    network = fresh(folder, "connector", quant=quant)
    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"])
    inject_adapter_in_model(config, network.llm)
    trainee = Trainee(network)
    optimizer = torch.optim.AdamW([p for p in network.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for _ in range(6):
        losses.append(train_once(trainee, [examples[:2], examples[2:]])[0])
        optimizer.step()
    assert losses[-1] < 0.8 * losses[0]
    names = gradients(network)
    assert all("lora_" in name or name.startswith("connector.") for name in names)
    assert sum("lora_A" in name for name in names) == 6


def test_bfloat16_by_autocast_stays_near(folder: Path, examples: list[Example]):
    network = fresh(folder, "llm", "connector")
    exact = train_once(Trainee(network), [examples])[0]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss, _ = Trainee(network)(examples)
    loss.backward()
    assert loss.dtype == torch.float32
    assert float(loss.detach()) == pytest.approx(exact, rel=0.05)
    assert all(grad.dtype == torch.float32 for grad in gradients(network).values())


def test_trained_float32_parts_fit_a_frozen_bfloat16_rest(folder: Path, examples: list[Example]):
    network = fresh(folder, "connector", dtype=torch.bfloat16)
    network.connector.float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss, _ = Trainee(network)(examples)
    loss.backward()
    assert torch.isfinite(loss)
    assert all(grad.dtype == torch.float32 for grad in gradients(network).values())


def test_logits_are_made_for_trained_positions_only(folder: Path, examples: list[Example]):
    network, rows = fresh(folder, "llm"), []
    network.llm.lm_head.register_forward_hook(lambda _m, given, _out: rows.append(len(given[0])))
    with torch.no_grad():
        Trainee(network)(examples)
    assert rows == [sum(e.trained_tokens for e in examples)]
