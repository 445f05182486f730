"""Containerfiles and their locks, as far as they can be checked without building an image."""

import re
import tomllib
from fnmatch import fnmatch

import pytest

from harness.containerfile import IMAGES, ROOT, Stage, stages

CONTAINERFILES = ("control", "runner")
LOCKS = ("control", "runner", "runner-cpu")
PIN = re.compile(r"(?m)^([a-z0-9][a-z0-9._-]*)(?:\[[^]]*\])?==([^ ;\\]+)(.*)$")


def pins(path: str) -> set[tuple[str, str]]:
    """(package, version) of a lock."""
    return {(name, version) for name, version, _ in PIN.findall((ROOT / path).read_text())}


def names(path: str) -> set[str]:
    return {name for name, _ in pins(path)}


def final(name: str) -> Stage:
    return stages(IMAGES / f"{name}.Containerfile")[-1]


@pytest.mark.parametrize("name", CONTAINERFILES)
def test_what_is_copied_is_there_and_in_the_context(name: str) -> None:
    ignore = (IMAGES / f"{name}.Containerfile.dockerignore").read_text().splitlines()
    given = [line.removeprefix("!") for line in ignore if line.startswith("!")]
    sources = {
        source for stage in stages(IMAGES / f"{name}.Containerfile") for copy in stage.copies() for source in copy[0]
    }
    assert sources
    for source in sources:
        assert (ROOT / source).exists(), source
        assert any(fnmatch(source, pattern) for pattern in given), f"{source} is not in the context"


@pytest.mark.parametrize("name", CONTAINERFILES)
def test_every_package_of_the_wheel_is_copied_before_it_is_built(name: str) -> None:
    wheel = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
    (building,) = [
        stage for stage in stages(IMAGES / f"{name}.Containerfile") if "hatchling build" in " ".join(stage.all("RUN"))
    ]
    copied = {target for _, target in building.copies()}
    assert {package.split("/")[0] for package in wheel["packages"]} <= copied


@pytest.mark.parametrize("name", CONTAINERFILES)
def test_a_later_stage_builds_on_an_earlier_one_or_on_the_base_image(name: str) -> None:
    known = {"${PYTHON_IMAGE}"}
    for stage in stages(IMAGES / f"{name}.Containerfile"):
        bases = {stage.base.replace("${VARIANT}", variant) for variant in ("cuda", "cpu")}
        assert bases <= known, stage.base
        known.add(stage.name)


@pytest.mark.parametrize("name", CONTAINERFILES)
def test_what_runs_is_no_root_and_nothing_is_installed_there(name: str) -> None:
    stage = final(name)
    assert stage.base == {"control": "${PYTHON_IMAGE}", "runner": "run-${VARIANT}"}[name]
    assert stage.all("USER") == ["65532:65532"]
    assert stage.all("RUN") == [], "nothing is installed where it runs"
    assert [copy for copy in stage.all("COPY") if not copy.startswith("--from=")] == []
    (labels,) = stage.all("LABEL")
    assert set(re.findall(r"org\.opencontainers\.image\.(\w+)=", labels)) == {"title", "description", "licenses"}


def test_a_runner_for_gpus_has_the_c_compiler_that_triton_needs_and_one_for_cpus_none() -> None:
    known = {stage.name: stage for stage in stages(IMAGES / "runner.Containerfile")}
    assert {known[f"run-{variant}"].base for variant in ("cuda", "cpu")} == {"${PYTHON_IMAGE}"}
    assert known["run-cpu"].instructions == ()
    (installed,) = known["run-cuda"].all("RUN")
    assert re.findall(r"recommends (.*?) &&", installed) == ["gcc libc6-dev"]


@pytest.mark.parametrize("variant", ["cuda", "cpu"])
def test_the_runners_wheel_carries_kernels_that_were_compiled_in_its_build(variant: str) -> None:
    known = {stage.name: stage for stage in stages(IMAGES / "runner.Containerfile")}
    building, commands = known["built"], known["built"].all("RUN")
    assert "WEFT_WHEEL_KERNELS=require python -m hatchling build" in " ".join(commands)
    while building.base != "${PYTHON_IMAGE}":
        building = known[building.base.replace("${VARIANT}", variant)]
        commands = [*building.all("RUN"), *commands]
    assert re.search(r"apt-get install [^&]*\bg\+\+", commands[0]), "a compiler comes before all that changes"


def test_the_control_planes_wheel_has_no_kernels_and_its_image_no_compiler() -> None:
    commands = " ".join(command for stage in stages(IMAGES / "control.Containerfile") for command in stage.all("RUN"))
    assert "WEFT_WHEEL_KERNELS=skip python -m hatchling build" in commands
    assert "apt-get" not in commands


@pytest.mark.parametrize("name", LOCKS)
def test_images_have_the_versions_that_tests_ran_with(name: str) -> None:
    ours = pins(f"images/{name}.lock")
    assert len(ours) > 10
    assert ours <= pins("requirements.lock"), "run `make lock`"


@pytest.mark.parametrize("name", [*LOCKS, "build"])
def test_everything_is_pinned_by_hash(name: str) -> None:
    entries = re.split(r"(?m)^(?=[a-z0-9])", (IMAGES / f"{name}.lock").read_text())[1:]
    assert entries
    assert [entry.split()[0] for entry in entries if "--hash=sha256:" not in entry] == []


def test_the_control_planes_image_has_every_extra_that_a_process_of_it_needs() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [
        re.split(r"[\[<>=!~ ]", requirement)[0].lower()
        for extra, requirements in project["optional-dependencies"].items()
        if extra not in "runner torch training encoder-training bench conformance docs dev all".split()
        for requirement in (*requirements, *project["dependencies"])
    ]
    assert set(wanted) - {"weft"} <= names("images/control.lock")


def test_the_control_planes_image_has_no_torch() -> None:
    heavy = [
        name
        for name in names("images/control.lock")
        if re.match(r"torch|triton|nvidia|cuda|transformers|safetensors", name)
    ]
    assert heavy == []


def test_the_runners_image_has_no_web_framework_and_no_control_plane() -> None:
    assert {"torch", "numpy", "google-re2", "psutil", "grpcio"} <= names("images/runner.lock")
    light = {"fastapi", "starlette", "uvicorn", "kopf", "kubernetes", "pydantic", "sqlalchemy", "botocore"}
    assert names("images/runner.lock") & light == set()


def test_the_cpu_variant_is_the_runner_without_torch_and_what_torch_alone_asks_for() -> None:
    without = names("images/runner.lock") - names("images/runner-cpu.lock")
    assert "torch" in without
    asked = {"filelock", "fsspec", "jinja2", "markupsafe", "mpmath", "networkx", "setuptools", "sympy"}
    assert [name for name in without - asked if not re.match(r"torch|triton|nvidia|cuda", name)] == []
    assert names("images/runner-cpu.lock") < names("images/runner.lock")


def test_make_up_installs_every_process_without_torch_scipy_and_kubernetes() -> None:
    assert pins("up.lock") <= pins("requirements.lock"), "run `make lock`"
    assert {"fastapi", "sqlalchemy", "botocore", "ml-dtypes", "typer"} <= names("up.lock")
    heavy = r"torch|triton|nvidia|cuda|transformers|scipy|kubernetes"
    assert [name for name in names("up.lock") if re.match(heavy, name)] == []
