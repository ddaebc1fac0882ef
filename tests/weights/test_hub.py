"""Pulling from a hub on the loopback device: what is asked, fetched, resumed, kept and refused."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from apollo_cli.errors import WeightsError
from apollo_cli.weights import hub as hub_module
from apollo_cli.weights.checkpoint import read_checkpoint
from apollo_cli.weights.files import Manifest, read_manifests
from apollo_cli.weights.hub import PullPlan, fetch_model
from apollo_cli.weights.registry import resolve
from apollo_cli.weights.store import find_local, list_models, remove, require_local, verify
from tests.weights.hub_server import FakeHub, files_of, serve

ROOT = Path(__file__).resolve().parents[2]
TINY = ROOT / "tests" / "golden" / "tiny-checkpoint"
REPOSITORY = "someone/tiny-apollo"
BIG = "llm/model.safetensors"


@pytest.fixture(autouse=True)
def own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setenv("APOLLO_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))
    monkeypatch.delenv("HF_TOKEN", raising=False)


@pytest.fixture
def hub() -> Iterator[FakeHub]:
    extra = {
        "README.md": b"a card",
        "modeling_apollo.py": b"raise SystemExit",
        "llm/pytorch_model.bin": b"\x80\x04.",
        "training/optimizer.pt": b"\x80\x04.",
    }
    with serve(FakeHub(REPOSITORY, files_of(TINY) | extra)) as running:
        yield running


def pull(hub: FakeHub, name: str = REPOSITORY, **options) -> Manifest:
    manifest = fetch_model(
        resolve(name), **{"confirm": lambda plan: True, "endpoint": hub.endpoint, **options}
    )
    assert manifest is not None
    return manifest


def test_a_pulled_model_is_found_read_verified_and_listed(hub: FakeHub):
    manifest = pull(hub)
    source = resolve(REPOSITORY)
    assert find_local(source) == manifest.folder
    assert read_checkpoint(manifest.folder).encoder_names == (
        "internvideo2",
        "siglip-so400m-patch14-384",
    )
    report = verify(source)
    assert report.ok
    assert report.hashed == len(files_of(TINY))
    row = list_models()[-1]
    assert (row.name, row.state, row.commit) == (REPOSITORY, "ready", hub.commit)


def test_only_json_text_and_safetensors_of_the_layout_are_fetched(hub: FakeHub):
    manifest = pull(hub)
    assert set(manifest.files) == set(files_of(TINY))
    asked = " ".join(path for _, path, _ in hub.requests)
    assert ".py" not in asked
    assert ".bin" not in asked
    assert ".pt" not in asked


def test_size_and_licence_are_shown_before_anything_is_downloaded(hub: FakeHub):
    hub.card = {"license": "other", "license_name": "research", "license_link": "https://x"}
    seen: list[PullPlan] = []

    def refuse(plan: PullPlan) -> bool:
        seen.append(plan)
        return False

    result = fetch_model(resolve(REPOSITORY), confirm=refuse, endpoint=hub.endpoint)
    assert result is None
    assert seen[0].total_bytes == sum(map(len, files_of(TINY).values()))
    assert seen[0].missing_bytes == seen[0].total_bytes
    assert (seen[0].licence, seen[0].licence_link) == ("other (research)", "https://x")
    assert not [path for _, path, _ in hub.requests if "/resolve/" in path]
    assert read_manifests() == []


def test_a_second_pull_downloads_nothing(hub: FakeHub):
    pull(hub)
    before = len(hub.requests)
    plans = []
    pull(hub, confirm=lambda plan: plans.append(plan) or True)
    assert plans[0].missing_bytes == 0
    assert not [path for _, path, _ in hub.requests[before:] if "/resolve/" in path]


def test_a_stopped_download_goes_on_where_it_ended(hub: FakeHub):
    hub.cut_once = BIG
    with pytest.raises(WeightsError, match="answered 403"):
        pull(hub)
    assert find_local(resolve(REPOSITORY)) is None
    hub.cut_once = None
    before = len(hub.downloads(BIG))
    manifest = pull(hub)
    assert hub.downloads(BIG)[before:] == [f"bytes={len(hub.files[BIG]) // 2}-"]
    assert (manifest.folder / BIG).read_bytes() == hub.files[BIG]


def test_a_file_that_does_not_hash_as_promised_is_refused_and_removed(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch
):
    listing = hub.listing()
    row = next(r for r in listing["siblings"] if r["rfilename"] == BIG)
    row["lfs"]["sha256"] = "0" * 64
    monkeypatch.setattr(hub, "listing", lambda: listing)
    with pytest.raises(WeightsError, match=r"arrived damaged.*pull again"):
        pull(hub)
    assert read_manifests() == []
    monkeypatch.undo()


def test_verify_names_a_changed_a_cut_and_a_missing_file(hub: FakeHub):
    folder = pull(hub).folder
    changed, cut, missing = "llm/vocab.json", BIG, "mm_connector/config.json"
    for name in (changed, cut):
        content = (folder / name).read_bytes()
        (folder / name).unlink()
        (folder / name).write_bytes(content[:-1] + b" " if name == changed else content[:-9])
    (folder / missing).unlink()
    report = verify(resolve(REPOSITORY))
    assert not report.ok
    text = " ".join(report.faults)
    assert f"{changed} has changed" in text
    assert f"{cut} has" in text
    assert f"{missing} is missing" in text
    assert "is cut" in text


def test_removing_a_model_frees_its_files_and_forgets_it(hub: FakeHub):
    manifest = pull(hub)
    freed = remove(resolve(REPOSITORY))
    assert freed >= manifest.size_bytes
    assert not manifest.folder.exists()
    assert read_manifests() == []
    with pytest.raises(WeightsError, match="not on this machine"):
        remove(resolve(REPOSITORY))


def test_what_is_not_ours_is_not_removed():
    with pytest.raises(WeightsError, match="folder of yours"):
        remove(resolve(TINY))
    with pytest.raises(WeightsError, match="part of the program"):
        remove(resolve("apollo-nano"))


def test_a_revision_is_resolved_to_its_commit_and_found_by_it(hub: FakeHub):
    manifest = pull(hub, f"{REPOSITORY}@main")
    assert manifest.commit == hub.commit
    assert find_local(resolve(f"{REPOSITORY}@{hub.commit[:8]}")) == manifest.folder
    assert find_local(resolve(f"{REPOSITORY}@other")) is None


def test_a_complete_copy_in_the_shared_cache_is_found_without_a_manifest(hub: FakeHub):
    folder = pull(hub).folder
    shutil.rmtree(Path(os.environ["APOLLO_HOME"]))
    refs = folder.parents[1] / "refs"
    refs.mkdir(exist_ok=True)
    (refs / "main").write_text(hub.commit)
    assert find_local(resolve(REPOSITORY)) == folder
    assert verify(resolve(REPOSITORY)).hashed == 0
    (folder / BIG).unlink()
    assert find_local(resolve(REPOSITORY)) is None


def test_a_model_that_is_not_here_says_how_to_get_it():
    with pytest.raises(WeightsError, match=r"run apollo models pull apollo-3b \(about 9.9 GB\)"):
        require_local(resolve("apollo-3b"))
    with pytest.raises(WeightsError, match="run apollo models pull someone/x@v1"):
        require_local(resolve("someone/x@v1"))


def test_offline_mode_refuses_before_any_request(hub: FakeHub):
    with pytest.raises(WeightsError, match="offline mode is on"):
        pull(hub, offline=True)
    assert hub.requests == []


def test_a_wrong_name_a_wrong_revision_and_a_closed_door_are_told_apart(hub: FakeHub):
    with pytest.raises(WeightsError, match="does not exist, or is private"):
        pull(hub, "someone/other")
    with pytest.raises(WeightsError, match="no revision 'v9'"):
        pull(hub, f"{REPOSITORY}@v9")
    hub.closed = True
    with pytest.raises(WeightsError, match=r"is gated.*accept"):
        pull(hub)


def test_a_private_repository_opens_with_a_token(hub: FakeHub):
    hub.token = "hf_secret"
    with pytest.raises(WeightsError, match="set HF_TOKEN"):
        pull(hub)
    assert pull(hub, token="hf_secret").commit == hub.commit


def test_no_network_is_one_line_with_a_next_step():
    with pytest.raises(
        WeightsError, match=r"no connection to the hub.*check the network"
    ) as caught:
        fetch_model(resolve(REPOSITORY), confirm=lambda plan: True, endpoint="http://127.0.0.1:9")
    assert "\n" not in str(caught.value)


def test_a_folder_that_cannot_be_written_is_named(
    hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "file").touch()
    with pytest.raises(WeightsError, match=r"cannot be written.*set HF_HOME"):
        pull(hub, cache_dir=tmp_path / "file" / "cache")
    monkeypatch.setenv("APOLLO_HOME", str(tmp_path / "file" / "home"))
    with pytest.raises(WeightsError, match="set APOLLO_HOME"):
        pull(hub)


def test_two_pulls_of_one_repository_do_not_meet(hub: FakeHub):
    messages = []

    def try_another(text: str) -> None:
        if not messages:
            with pytest.raises(WeightsError, match="another pull") as caught:
                pull(hub)
            messages.append(str(caught.value))

    pull(hub, on_status=try_another)
    assert len(messages) == 1


def test_too_little_disk_is_told_with_numbers_before_the_download(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(hub_module, "_free_bytes", lambda folder: 1_000_000)
    with pytest.raises(WeightsError, match=r"needs 0\.2 GB more.*0\.0 GB free"):
        pull(hub)
    assert not [path for _, path, _ in hub.requests if "/resolve/" in path]


def test_what_a_stopped_pull_left_needs_no_room_again(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch
):
    hub.cut_once = BIG
    with pytest.raises(WeightsError):
        pull(hub)
    hub.cut_once, plans = None, list[PullPlan]()
    late = [name for name in hub.files if len(hub.files[name]) > len(hub.files[BIG])]
    left = sum(len(hub.files[name]) for name in [BIG, *late]) - len(hub.files[BIG]) // 2
    monkeypatch.setattr(hub_module, "_free_bytes", lambda folder: hub_module.SPARE_BYTES + left)
    pull(hub, confirm=lambda plan: not plans.append(plan))
    assert [file.name for file in plans[0].missing] == [BIG, *late]
    assert plans[0].missing_bytes == left


@pytest.mark.parametrize(
    ("drop", "message"),
    [
        ("llm/", "has no llm"),
        ("config.json", "has no config.json"),
        ("vision_tower/", "has no vision_tower"),
    ],
)
def test_another_layout_is_refused_before_the_download(hub: FakeHub, drop: str, message: str):
    kept = {n: c for n, c in hub.files.items() if not n.startswith(drop) or n.endswith(".bin")}
    hub.files = kept
    with pytest.raises(WeightsError, match=message):
        pull(hub)


def test_a_damaged_manifest_is_named(hub: FakeHub):
    pull(hub)
    path = next((Path(os.environ["APOLLO_HOME"]) / "models").glob("[!.]*.json"))
    path.write_text("{}")
    with pytest.raises(WeightsError, match=r"is damaged.*delete it"):
        find_local(resolve(REPOSITORY))


def run_cli(hub: FakeHub, tmp_path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {
        "HF_ENDPOINT": hub.endpoint,
        "HF_HUB_OFFLINE": "0",
        "HF_HOME": str(tmp_path / "hf"),
        "APOLLO_HOME": str(tmp_path / "home"),
    }
    return subprocess.run(
        [sys.executable, "-m", "apollo_cli", "models", *arguments],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        check=False,
    )


def test_the_command_shows_pulls_verifies_and_removes(hub: FakeHub, tmp_path: Path):
    asked = run_cli(hub, tmp_path, "pull", REPOSITORY)
    assert asked.returncode == 2
    assert "licence  label on the repository: apache-2.0" in asked.stderr
    assert "add --yes" in asked.stderr
    assert asked.stdout == ""

    pulled = run_cli(hub, tmp_path, "pull", REPOSITORY, "--yes")
    assert pulled.returncode == 0, pulled.stderr
    folder = Path(pulled.stdout.strip())
    assert folder.is_relative_to(tmp_path / "hf")

    shown = json.loads(run_cli(hub, tmp_path, "show", REPOSITORY, "--json").stdout)
    assert shown["commit"] == hub.commit
    assert shown["tokens_per_clip"] == 8

    assert run_cli(hub, tmp_path, "verify", REPOSITORY).returncode == 0
    (folder / BIG).unlink()
    broken = run_cli(hub, tmp_path, "verify", REPOSITORY, "--json")
    assert broken.returncode == 5
    assert json.loads(broken.stdout)["ok"] is False

    assert run_cli(hub, tmp_path, "rm", REPOSITORY, "--yes").returncode == 0
    assert run_cli(hub, tmp_path, "rm", REPOSITORY, "--yes").returncode == 5
