"""Hubs that lie, break off, send on and say back: one line, exit 5, nothing written elsewhere."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from apollo_cli.cli import main
from apollo_cli.errors import WeightsError
from apollo_cli.weights.registry import resolve
from apollo_cli.weights.store import find_local
from tests.weights.hub_server import FakeHub, files_of, serve

TINY = Path(__file__).resolve().parents[1] / "golden" / "tiny-checkpoint"
REPOSITORY = "someone/tiny-apollo"
BIG = "llm/model.safetensors"
TOKEN = "hf_AbCdEfGhIjKlMnOpQrStUvWxYz0123456789"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    from huggingface_hub import constants

    home = tmp_path / "home"
    (home / ".ssh").mkdir(parents=True)
    (home / ".ssh" / "authorized_keys").write_text("the user's own\n")
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("APOLLO_HOME", str(tmp_path / "apollo"))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))
    monkeypatch.delenv("HF_TOKEN", raising=False)
    return home


@pytest.fixture
def hub(home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    from huggingface_hub import constants

    with serve(FakeHub(REPOSITORY, files_of(TINY))) as running:
        monkeypatch.setattr(constants, "ENDPOINT", running.endpoint)
        yield running


def everything(root: Path, but: tuple[str, ...] = ()) -> dict[str, bytes | str]:
    """Each file and link below a folder with its content, but for some of its folders."""
    found: dict[str, bytes | str] = {}
    for path in sorted(root.rglob("*")):
        name = path.relative_to(root).as_posix()
        if not name.startswith(but):
            linked = str(path.readlink()) if path.is_symlink() else ""
            found[name] = linked or (path.read_bytes() if path.is_file() else "")
    return found


def pull(capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    code = main(["models", "pull", REPOSITORY, "--yes"])
    told = capsys.readouterr()
    assert "Traceback" not in told.err
    return code, told.err


def error_line(told: str) -> str:
    """The one line of the error; what was said before it is no part of it."""
    lines = [line for line in told.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1
    assert told.endswith(lines[0] + "\n")
    return lines[0]


def with_top(**values):
    return lambda listing: listing | values


def with_file(**values):
    """The large file's row with other values."""

    def change(listing: dict) -> dict:
        rows = [r | values if r["rfilename"] == BIG else r for r in listing["siblings"]]
        return listing | {"siblings": rows}

    return change


def with_more(*names):
    """Further files, alike but for their names."""

    def change(listing: dict) -> dict:
        row = next(r for r in listing["siblings"] if r["rfilename"] == "config.json")
        return listing | {
            "siblings": [*listing["siblings"], *(row | {"rfilename": n} for n in names)]
        }

    return change


NAMES = [
    "llm/../../../../../home/.ssh/authorized_keys.json",
    "llm/../../refs/main.json",
    "llm//x.json",
    "llm/./x.json",
    "llm/..\\..\\x.json",
    "llm/C:x.json",
    "llm/x\0.json",
    "llm/x\x1b[31m.json",
    "llm/x\n.json",
    "llm/x\u202e.json",
    "llm/con.json",
    "llm/x./y.json",
    "llm/.hidden.json",
    "llm/" + "x" * 250 + ".json",
    "llm/" + "x/" * 50 + "y.json",
    "llm/MODEL.safetensors",
    "LLM/../llm/model.safetensors",
    "llm/model.safetensors",
    "llm/model.safetensors/x.json",
    "x" * 5000,
]
COMMITS = [
    "../../../../home/.ssh",
    "/tmp",
    "main",
    "..",
    "",
    "c" * 39,
    "c" * 41,
    "C" * 40,
    "c" * 40 + "\n",
    "c" * 39 + "\u0663",
    "refs/main",
    ["c" * 40],
    {"x": 1},
    40,
    None,
    True,
]
WRONG = {
    **{f"sha {value!r}"[:60]: with_top(sha=value) for value in COMMITS},
    **{
        f"name {name!r}"[:60]: with_more(name)
        for name in NAMES
        if not name.startswith(("x", "LLM"))
    },
    "case": with_more("llm/Vocab2.json", "llm/vocab2.json"),
    "name of 5000": with_more("x" * 5000),
    **{f"name {value!r}": with_more(value) for value in (7, ["a"], {"a": 1}, True)},
    **{
        f"size {value!r}"[:60]: with_file(lfs={"sha256": "0" * 64, "size": value})
        for value in (-1, 1 << 70, 1e308, float("nan"), float("inf"), "12", None, True, [], {})
    },
    **{f"lfs {value!r}": with_file(lfs=value) for value in (7, "x", [], True, [{}])},
    **{
        f"sha256 {value!r}": with_file(lfs={"sha256": value, "size": 9})
        for value in ("", "../../x", "0" * 63, None, 7, ["0" * 64])
    },
    **{
        f"blobId {value!r}": with_file(lfs=None, blobId=value)
        for value in ("", "../../x", "0" * 64, None, 7)
    },
    **{f"siblings {value!r}": with_top(siblings=value) for value in (None, 7, {}, "x", [1], [[]])},
    **{f"card {value!r}": with_top(cardData=value) for value in (7, "x", [1], True)},
    **{
        f"licence {value!r}"[:60]: with_top(cardData={"license": value})
        for value in (7, {"a": 1}, [{}], "x" * 1000)
    },
    "licence link": with_top(cardData={"license": "mit", "license_link": ["x"]}),
    "licence name": with_top(cardData={"license": "mit", "license_name": {}}),
    "a list": lambda listing: [listing],
    "a number": lambda listing: 7,
    "nothing": lambda listing: b"",
    "half": lambda listing: json.dumps(listing).encode()[:-5],
    "no text": lambda listing: b"\xff\xfe\0",
    "deep": lambda listing: b"[" * 100_000,
    "deep object": lambda listing: b'{"a":' * 100_000,
    "long number": lambda listing: b'{"sha":' + b"1" * 10_000 + b"}",
    "endless": lambda listing: b" " * (33 << 20),
    "web page": lambda listing: b"<!doctype html><title>Log in</title>",
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_listing_is_one_line_and_writes_nothing(
    hub: FakeHub, home: Path, capsys: pytest.CaptureFixture[str], name: str
):
    before = everything(home.parent)
    hub.listed = WRONG[name]
    code, told = pull(capsys)
    assert code == 5, told
    line = error_line(told)
    assert REPOSITORY in line
    assert len(line) < 500
    assert everything(home.parent) == before
    assert not [path for _, path, _ in hub.requests if "/resolve/" in path]


@pytest.mark.parametrize(
    "headers",
    [
        {"X-Repo-Commit": "../../../../home/.ssh", "ETag": '"authorized_keys"'},
        {"X-Linked-Etag": '"../../../../home/.ssh/authorized_keys"', "X-Linked-Size": "-1"},
        {"X-Xet-Hash": "0" * 64, "X-Xet-Refresh-Route": "/etc/ssh"},
        {"ETag": "", "X-Repo-Commit": "\x1b[31m", "Content-Disposition": 'filename="../../x"'},
    ],
)
def test_headers_of_a_hub_name_nothing(
    hub: FakeHub, home: Path, capsys: pytest.CaptureFixture[str], headers: dict[str, str]
):
    before = everything(home)
    hub.headers = headers
    assert pull(capsys)[0] == 0
    assert everything(home) == before
    folder = find_local(resolve(REPOSITORY))
    assert folder is not None
    assert folder == home.parent / "cache" / "models--someone--tiny-apollo/snapshots" / hub.commit
    assert {p.name for p in folder.parents[1].iterdir()} == {"blobs", "snapshots"}
    assert all(len(p.name) in (40, 64) for p in (folder.parents[1] / "blobs").iterdir())


@pytest.mark.parametrize(
    "written", ["../../../home/.ssh", "main", "", "c" * 41, "\x00", b"\xff\xfe", "snapshots"]
)
def test_a_branch_on_disk_that_names_no_commit_is_no_model(
    hub: FakeHub, home: Path, capsys: pytest.CaptureFixture[str], written: str | bytes
):
    assert pull(capsys)[0] == 0
    repository = home.parent / "cache" / "models--someone--tiny-apollo"
    (repository / "refs").mkdir()
    raw = written if isinstance(written, bytes) else written.encode()
    (repository / "refs" / "main").write_bytes(raw)
    (repository / "snapshots" / "main").symlink_to(hub.commit)
    for manifest in (home.parent / "apollo" / "models").glob("*.json"):
        manifest.unlink()
    assert find_local(resolve(REPOSITORY)) is None


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("commit", "../../x"),
        ("commit", "c" * 12),
        ("repository", "../../home"),
        ("files", {"../x": 0}),
    ],
)
def test_a_manifest_that_names_other_places_is_damaged(
    hub: FakeHub, home: Path, capsys: pytest.CaptureFixture[str], key: str, value: object
):
    assert pull(capsys)[0] == 0
    path = next((home.parent / "apollo" / "models").glob("*.json"))
    row = json.loads(path.read_text())
    path.write_text(json.dumps(row | {key: value}))
    with pytest.raises(WeightsError, match=re.escape(path.name)):
        find_local(resolve(REPOSITORY))


@pytest.mark.parametrize(
    "place",
    [
        "file:///etc/passwd",
        "ftp://elsewhere.example/x",
        "http://",
        "http://[::",
        "http://elsewhere.example:99999999/x",
        "http://" + "x" * 9000,
        "http://user:password@elsewhere.example/",
        "/someone/again",
        "//",
        "\udcff",
    ],
)
def test_a_redirect_leads_into_the_web_or_is_refused(
    hub: FakeHub, home: Path, capsys: pytest.CaptureFixture[str], place: str
):
    hub.redirect = place.encode("utf-8", "surrogateescape").decode("latin-1")
    code, told = pull(capsys)
    assert code == 5
    assert "password@" not in error_line(told)
    assert len(hub.requests) < 9


def test_a_token_is_not_sent_on_and_a_redirect_never_leads_inside(
    hub: FakeHub, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    from huggingface_hub import close_session, constants

    # As a proxy, the server answers for any host.
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, hub.endpoint)
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.setenv(name, "")
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setattr(constants, "ENDPOINT", "http://hub.example")
    try:
        close_session()
        hub.redirect = "http://elsewhere.example/x"
        assert pull(capsys)[0] == 5
        assert hub.tokens == [f"Bearer {TOKEN}", None, None, None, None]
        for inside in (
            "127.0.0.1",
            "localhost",
            "[::1]",
            "169.254.169.254",
            "2130706433",
            "router",
        ):
            hub.requests.clear()
            hub.redirect = f"http://{inside}/x"
            assert pull(capsys)[0] == 5
            assert len(hub.requests) == 1
    finally:
        monkeypatch.undo()
        close_session()


def test_a_line_that_is_cut_every_few_bytes_still_brings_all(
    hub: FakeHub, capsys: pytest.CaptureFixture[str]
):
    hub.cut_every = 70_000
    code, told = pull(capsys)
    assert code == 0, told
    steps = [int(r[6:-1]) for r in hub.downloads(BIG) if r]
    assert steps == [70_000 * n for n in range(1, len(hub.files[BIG]) // 70_000 + 1)]


@pytest.mark.parametrize("name", ["config.json", BIG, ""])
@pytest.mark.parametrize("code", [403, 404, 503])
def test_a_refused_file_is_told_with_its_name_and_code(
    hub: FakeHub, capsys: pytest.CaptureFixture[str], name: str, code: int
):
    hub.statuses = {name: code}
    exit_code, told = pull(capsys)
    assert exit_code == 5
    line = error_line(told)
    assert (str(code) in line) or (code == 404 and "does not exist" in line)
    assert name in line
    assert "no connection" not in line
    assert ("may not read" in line) == (code == 403)


@pytest.mark.parametrize("name", ["config.json", BIG])
@pytest.mark.parametrize("grown", [-1, 7])
def test_a_wrong_length_is_told_as_that(
    hub: FakeHub, home: Path, capsys: pytest.CaptureFixture[str], name: str, grown: int
):
    def change(listing: dict) -> dict:
        for row in listing["siblings"]:
            for place in (row, row.get("lfs")) if row["rfilename"] == name else ():
                if place:
                    place["size"] += grown
        return listing

    hub.listed = change
    code, told = pull(capsys)
    line = error_line(told)
    assert code == 5
    assert name in line
    assert str(len(hub.files[name])) in line
    assert "HF_HOME" not in line
    assert find_local(resolve(REPOSITORY)) is None


def test_what_a_stopped_pull_of_another_commit_left_is_cleared(
    hub: FakeHub, home: Path, capsys: pytest.CaptureFixture[str]
):
    blobs = home.parent / "cache" / "models--someone--tiny-apollo" / "blobs"
    hub.cut_once = BIG
    assert pull(capsys)[0] == 5
    (left,) = blobs.glob("*.incomplete")
    hub.cut_once = None
    hub.commit, hub.files[BIG] = "d" * 40, hub.files[BIG].replace(b"embed", b"other")
    pull(capsys)
    assert not left.exists()
    assert not list(blobs.glob("*.incomplete"))


def test_a_folder_of_the_cache_that_links_elsewhere_is_not_written_through(
    hub: FakeHub, home: Path, capsys: pytest.CaptureFixture[str]
):
    snapshot = home.parent / "cache/models--someone--tiny-apollo/snapshots" / hub.commit
    snapshot.mkdir(parents=True)
    (snapshot / "llm").symlink_to(home / ".ssh")
    before = everything(home)
    code, told = pull(capsys)
    assert code == 5
    assert str(snapshot / "llm") in error_line(told)
    assert everything(home) == before


def test_a_token_in_escapes_reaches_neither_the_disk_nor_stdout(
    hub: FakeHub,
    home: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    spelled = "".join(f"\\u{ord(letter):04x}" for letter in TOKEN).encode()
    card = {"license": TOKEN, "license_name": f"of {TOKEN}"}
    hub.listed = lambda listing: (
        json.dumps(listing | {"cardData": card}).encode().replace(TOKEN.encode(), spelled)
    )
    assert main(["models", "pull", REPOSITORY, "--yes", "--json"]) == 0
    told = capsys.readouterr()
    assert TOKEN not in told.out + told.err
    assert not [p for p in (home.parent / "apollo").rglob("*.json") if TOKEN in p.read_text()]


@pytest.mark.parametrize("where", ["licence", "file", "headers", "redirect", "commit"])
@pytest.mark.parametrize("token", [TOKEN, "corp-Token.of.another-kind"])
def test_a_token_that_a_hub_says_back_is_blanked(
    hub: FakeHub,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    where: str,
    token: str,
):
    from huggingface_hub import constants

    # One in the environment, the other in the file of a login.
    if token == TOKEN:
        monkeypatch.setenv("HF_TOKEN", token)
    else:
        Path(constants.HF_TOKEN_PATH).write_text(token)
    changes = {
        "licence": with_top(cardData={"license": token, "license_link": f"https://x/?{token}"}),
        "file": with_more(f"llm/{token} \0.json"),
        "commit": with_top(sha=token),
    }
    hub.listed = changes.get(where, hub.listed)
    if where == "redirect":
        hub.redirect = f"https://user:{token}@127.0.0.1:9/{token}"
    if where == "headers":
        hub.headers = {"X-Error-Message": token, "Warning": token}
        hub.statuses = {"config.json": 400}
    for arguments in (
        ["models", "pull", REPOSITORY, "--yes"],
        ["--debug", "models", "pull", REPOSITORY, "--yes"],
        ["models", "show", REPOSITORY, "--json"],
    ):
        main(arguments)
        told = capsys.readouterr()
        assert token not in told.out + told.err
    assert hub.tokens[0] == f"Bearer {token}"


@pytest.mark.parametrize("debug", [[], ["--debug"]])
def test_a_token_that_cannot_be_sent_is_not_told(
    hub: FakeHub,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    debug: list[str],
):
    token = "hf_t\u00f6ken-that-is-no-ascii"
    monkeypatch.setenv("HF_TOKEN", token)
    assert main([*debug, "models", "pull", REPOSITORY, "--yes"]) == 5
    told = capsys.readouterr()
    for piece in (token, token[3:9], repr(token)[1:-1]):
        assert piece not in told.out + told.err


def test_a_password_in_the_address_of_the_hub_is_not_told(
    hub: FakeHub, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    from huggingface_hub import constants

    address = hub.endpoint.replace("://", "://user:password123@")
    monkeypatch.setattr(constants, "ENDPOINT", address)
    hub.statuses = {"": 500}
    for arguments in (
        ["models", "pull", REPOSITORY, "--yes"],
        ["--debug", "models", "pull", REPOSITORY, "--yes"],
        ["doctor"],
    ):
        main(arguments)
        told = capsys.readouterr()
        assert "password123" not in told.out + told.err
