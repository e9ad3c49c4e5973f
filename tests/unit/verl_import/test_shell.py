"""Shell scripts are followed as bash does, and never run."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from penstock_tools.verl_import.shell import read_script

SCRIPT = r"""#!/usr/bin/env bash
set -xeuo pipefail   # a comment, with a 'quote
name='GRPO run'
length=$((1024 * 2)); batch=${BATCH:-64}
export MODEL="${MODEL_PATH:-"Qwen/Qwen3-8B"}"
FILES="['$HOME/a.parquet', '$HOME/b.parquet']"
engine=${1:-vllm}
if [ "$engine" = "vllm" ]; then
    mode=async
elif [[ $engine == "sglang" ]]; then
    mode=sync
else
    mode=none
fi
COMMON=(
    data.train_batch_size=${batch}   # not a word
    # the engine's own setting (
    data.max_prompt_length=$length
    'trainer.logger=["console","wandb"]'
)
COMMON+=("trainer.experiment_name=$name")
stamp() { echo x_$(basename /models/m.bin .bin); }
cat <<EOF > /dev/null
python3 -m verl.trainer.main_ppo in.a=document
EOF
PYTHONUNBUFFERED=1 python3 -m verl.trainer.main_ppo \
    --config-name='ppo_megatron_trainer.yaml'\
    "${COMMON[@]}" \
    data.train_files="$FILES" \
    actor_rollout_ref.model.path=$MODEL \
    actor_rollout_ref.rollout.mode=$mode \
    data.max_response_length=$((length + 2 * batch)) \
    trainer.project_name=$(stamp) \
    +ray.path=${MODEL##*/} "$@" 2>&1 | tee log.txt
"""
WORDS = [
    "--config-name=ppo_megatron_trainer.yaml",
    "data.train_batch_size=64",
    "data.max_prompt_length=2048",
    'trainer.logger=["console","wandb"]',
    "trainer.experiment_name=GRPO run",
    "data.train_files=['/home/u/a.parquet', '/home/u/b.parquet']",
    "actor_rollout_ref.model.path=Qwen/Qwen3-8B",
    "actor_rollout_ref.rollout.mode=async",
    "data.max_response_length=2176",
    "trainer.project_name=x_m",
    "+ray.path=Qwen3-8B",
]


def test_a_script_gives_the_words_of_its_verl_command() -> None:
    read = read_script(SCRIPT, "run.sh", [], {"HOME": "/home/u"})
    (command,) = read.commands
    assert (command.program, command.words) == ("ppo", WORDS)
    assert read.unknown == ["$PWD"] or read.unknown == []


def test_arguments_and_the_environment_change_the_words() -> None:
    read = read_script(SCRIPT, "run.sh", ["sglang"], {"HOME": "/h", "BATCH": "8"})
    words = read.commands[0].words
    assert "actor_rollout_ref.rollout.mode=sync" in words and "data.train_batch_size=8" in words
    assert words[-1] == "sglang", '"$@" is passed on'


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_bash_gives_the_same_words(tmp_path: Path) -> None:
    python = tmp_path / "python3"
    python.write_text(f'#!/bin/bash\nprintf "%s\\0" "$@" > {tmp_path}/words\n')
    python.chmod(0o755)
    script = tmp_path / "run.sh"
    script.write_text(SCRIPT)
    environment = {"HOME": "/home/u", "PATH": f"{tmp_path}:/usr/bin:/bin"}
    subprocess.run(["bash", str(script)], env=environment, cwd=tmp_path, capture_output=True, timeout=60, check=True)
    words = (tmp_path / "words").read_text().split("\0")[:-1]
    assert words[2:] == WORDS


def test_what_only_the_cluster_knows_is_reported() -> None:
    text = 'N=$SLURM_NNODES\npython3 -m verl.trainer.main_ppo trainer.nnodes=$N a.b="$(nvidia-smi -L | wc -l)"\n'
    read = read_script(text, "run.sh", [], {})
    assert read.unknown == ["$SLURM_NNODES", "$(nvidia-smi -L | wc -l)"]
    assert read.commands[0].words == ["trainer.nnodes=", "a.b="]


def test_functions_loops_and_conditions_are_followed() -> None:
    text = """
    train() { python -m verl.trainer.main_ppo data.seed=$1 x=$kind; }
    [ -z "$kind" ] && kind=plain || kind=other
    for seed in 3 4; do
        train "$seed"
    done
    case $kind in plain) kind=changed ;; esac
    """
    read = read_script(text, "run.sh", [], {"kind": ""})
    assert [command.words for command in read.commands] == [["data.seed=3", "x=plain"]]
    assert any("loop over seed" in note for note in read.skipped) and any("case" in note for note in read.skipped)


def test_nothing_of_a_script_is_run(tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    read = read_script(f"touch {marker}\nX=$(touch {marker})\npython -m verl.trainer.main_ppo a.b=$X", "run.sh", [], {})
    assert read.commands[0].words == ["a.b="] and not marker.exists()


@pytest.mark.parametrize(
    ("a", "b", "kind"),
    [("1", "1", "both"), ("1", "2", "a"), ("2", "2", "b"), ("2", "1", "none"), ("3", "1", "none"), ("4", "4", "first")],
)
def test_of_nested_conditions_the_branch_that_holds_is_followed(a: str, b: str, kind: str) -> None:
    text = """
    if [ $A = 4 ]; then kind=first
    elif [ $A = 1 ] && true; then
        if [ $B = 1 ]; then kind=both; else kind=a; fi
    elif [ $B = 2 ]; then
        kind=b
        if [ $A = 1 ]; then kind=wrong; elif [ $B = 1 ]; then kind=wrong; fi
    else
        kind=none
    fi
    f() { if [ -n "$1" ]; then python -m verl.trainer.main_ppo kind=$1; else wrong; fi; }
    f $kind
    """
    (command,) = read_script(text, "run.sh", [], {"A": a, "B": b}).commands
    assert command.words == [f"kind={kind}"]
