"""The verdicts on the keys of verl that matter, in words of our own and in every example script of verl.

The scripts are not ours: PENSTOCK_VERL names a checkout of github.com/verl-project/verl.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest

from penstock.config.learner import LoraConfig
from penstock.errors import ConfigError
from penstock_tools.verl_import.command import Imported, _read, import_words, report_lines
from penstock_tools.verl_import.keys import ALL_KEYS, is_same

CHECKOUT = Path(os.environ.get("PENSTOCK_VERL", "nowhere")) / "examples"
VERL = Path(sys.prefix) / "verl"
"""Where `make setup-dev` installs it, without its examples."""
ACTOR, MODEL, ROLLOUT = "actor_rollout_ref.actor.", "actor_rollout_ref.model.", "actor_rollout_ref.rollout."
VERDICTS: tuple[tuple[str, Any, str], ...] = (
    ("data.custom_cls.path", "mine.py", "danger"),
    ("data.train_max_samples", 100, "missing"),
    ("data.train_max_samples", -1, "same"),
    ("data.return_raw_chat", True, "unneeded"),
    ("data.train_files", "data/train.parquet", "same"),
    ("data.max_response_length", 1024, "same"),
    (MODEL + "path", "vl-project/Qwen3-8B-vllm", "same"),
    (MODEL + "mtp.enable", True, "missing"),
    (MODEL + "mtp.enable", False, "same"),
    (MODEL + "mtp.num_speculative_tokens", 1, "unneeded"),
    (MODEL + "custom_chat_template", "{{ messages }}", "danger"),
    (MODEL + "trust_remote_code", True, "missing"),
    (MODEL + "trust_remote_code", False, "same"),
    (MODEL + "use_remove_padding", True, "unneeded"),
    (ACTOR + "fsdp_config.param_offload", True, "changed"),
    (ACTOR + "fsdp_config.param_offload", False, "same"),
    (ACTOR + "fsdp_config.optimizer_offload", True, "changed"),
    (ACTOR + "megatron.grad_offload", True, "changed"),
    (ACTOR + "megatron.tensor_model_parallel_size", 4, "unneeded"),
    (ACTOR + "optim.override_optimizer_config.optimizer_cpu_offload", True, "changed"),
    (ACTOR + "optim.optimizer", "FusedAdam", "missing"),
    (ACTOR + "fsdp_config.offload_policy", True, "same"),
    (ACTOR + "policy_loss.loss_mode", "vanilla", "same"),
    (ACTOR + "policy_loss.loss_mode", "mine", "danger"),
    (ACTOR + "ppo_mini_batch_size", 256, "changed"),
    (ACTOR + "router_replay.mode", "R2", "missing"),
    ("actor_rollout_ref.ref.fsdp_config.param_offload", True, "same"),
    (ROLLOUT + "n", 8, "same"),
    (ROLLOUT + "temperature", 1.0, "same"),
    (ROLLOUT + "val_kwargs.temperature", 0.6, "same"),
    (ROLLOUT + "val_kwargs.do_sample", True, "unneeded"),
    (ROLLOUT + "max_concurrent_requests", 64, "missing"),
    (ROLLOUT + "data_parallel_size", 4, "missing"),
    (ROLLOUT + "data_parallel_size", 1, "same"),
    (ROLLOUT + "data_parallel_size", True, "missing"),
    (ROLLOUT + "gpu_memory_utilization", 0.6, "changed"),
    (ROLLOUT + "agent.default_agent_loop", "mine", "danger"),
    (ROLLOUT + "agent.agent_loop_config_path", "loops.yaml", "danger"),
    (ROLLOUT + "multi_turn.function_tool_path", "tools.py", "danger"),
    (ROLLOUT + "multi_turn.completion_callback", "mine.Callback", "danger"),
    (ROLLOUT + "free_cache_engine", True, "unneeded"),
    ("reward_model.reward_manager", "mine", "danger"),
    ("reward.reward_manager.name", "gdpo", "changed"),
    ("reward_model.sandbox_fusion.url", "http://sandbox:8080", "danger"),
    ("algorithm.adv_estimator", "grpo", "same"),
    ("algorithm.adv_estimator", "optimal_token_baseline", "danger"),
    ("algorithm.use_pf_ppo", True, "danger"),
    ("distillation.enabled", True, "danger"),
    ("trainer.log_val_generations", 10, "changed"),
    ("trainer.n_gpus_per_node", 8, "changed"),
    ("trainer.save_freq", 20, "changed"),
    ("trainer.device", "npu", "missing"),
    ("trainer.resume_from_path", "checkpoints/", "same"),
    ("trainer.total_epochs", 15, "same"),
)  # fmt: skip
"""Keys, values and what becomes of them in a run of GRPO with validations."""
ANY_VALUE: tuple[tuple[str, type | tuple[type, ...], str], ...] = (
    ("data.custom_cls.path", str, "danger"),
    (ROLLOUT + "val_kwargs.temperature", (int, float), "same"),
    (ROLLOUT + "val_kwargs.top_p", (int, float), "same"),
    ("*.max_concurrent_requests", int, "missing"),
    ("trainer.save_freq", int, "changed"),
    ("data.max_*_length", int, "same"),
)
"""Patterns of keys whose verdict does not depend on the value."""


def verdicts(result: Imported) -> dict[str, str]:
    """The verdicts on the keys that do not mean the same."""
    return {name: verdict for verdict, entries in result.findings.keys.items() for name, _, _ in entries}


def word(value: Any) -> str:
    return f"'{value}'" if isinstance(value, str) else str(value)


@pytest.mark.parametrize(("key", "value", "verdict"), VERDICTS, ids=str)
def test_the_verdict_on_a_key(key: str, value: Any, verdict: str) -> None:
    found = verdicts(import_words(["algorithm.adv_estimator=grpo", "trainer.test_freq=5", f"{key}={word(value)}"]))
    assert found.get(key, "same") == verdict


CRITIC_KEYS: tuple[tuple[str, Any, str, str, Any], ...] = (
    ("optim.lr_warmup_steps", 5, "same", "warmup_steps", 5),
    ("optim.lr_warmup_steps_ratio", 0.1, "changed", "warmup_steps", 10),
    ("optim.weight_decay", 0.1, "same", "weight_decay", 0.1),
    ("grad_clip", 0.5, "same", "max_grad_norm", 0.5),
    ("ppo_epochs", 3, "same", "epochs_per_step", 3),
    ("ppo_mini_batch_size", 128, "changed", "minibatches_per_step", 8),
    ("optim.lr", 1e-4, "same", "lr", 1e-4),
    ("model.lora_rank", 8, "same", "lora", LoraConfig(rank=8, alpha=16)),
    ("optim.betas", [0.8, 0.9], "missing", "warmup_steps", 0),
    ("optim.lr_scheduler_type", "cosine", "missing", "warmup_steps", 0),
    ("model.override_config.attn_implementation", "eager", "missing", "warmup_steps", 0),
    ("model.external_lib", "mine", "missing", "warmup_steps", 0),
    ("model.use_remove_padding", True, "unneeded", "warmup_steps", 0),
    ("forward_max_token_len_per_gpu", 9, "unneeded", "warmup_steps", 0),
    ("shuffle", True, "missing", "warmup_steps", 0),
    ("mine", 1, "missing", "warmup_steps", 0),
)


@pytest.mark.parametrize(("key", "value", "verdict", "ours", "wanted"), CRITIC_KEYS, ids=str)
def test_the_verdict_on_a_key_of_the_critic(key: str, value: Any, verdict: str, ours: str, wanted: Any) -> None:
    policy = ("optim.weight_decay=0.3", "grad_clip=2.0", "ppo_epochs=2", "ppo_mini_batch_size=512")
    words = [*(ACTOR + each for each in policy), f"critic.{key}={word(value)}", "trainer.total_training_steps=100"]
    result = import_words(["algorithm.adv_estimator=gae", "data.train_batch_size=1024", *words])
    critic = result.config.learner.critic
    assert verdicts(result).get(f"critic.{key}", "same") == verdict
    assert getattr(critic, ours) == wanted


def test_frozen_models_are_offloaded_where_verl_offloads_them() -> None:
    reference, scoring = ("actor_rollout_ref.ref.fsdp_config.", "reward_model.model.fsdp_config.")
    words = [f"{reference}param_offload=True", f"{scoring}param_offload=True"]
    scored = import_words([*words, "reward_model.enable=True", "reward_model.model.path=models/judge"])
    assert scored.config.learner.reward_model is not None and scored.config.learner.reward_model.offload
    assert scored.config.learner.reference.offload and scored.config.learner.offload == "none"
    assert import_words(words).config.learner.reward_model is None


def test_other_roles_share_sequences_where_verls_do() -> None:
    words = ["algorithm.adv_estimator=gae", "algorithm.use_kl_in_reward=True", "trainer.n_gpus_per_node=16",
             f"{ACTOR}ulysses_sequence_parallel_size=2", "critic.ulysses_sequence_parallel_size=4"]  # fmt: skip
    imported = import_words(words)
    learner = imported.config.learner
    roles = ("policy", "reference", "critic")
    assert [learner.sequence_parallel_of(role) for role in roles] == [2, 2, 4], "verl's reference is as its policy"
    assert (
        import_words(
            [*words, "actor_rollout_ref.ref.ulysses_sequence_parallel_size=1"]
        ).config.learner.reference.sequence_parallel
        == 1
    )
    imported = import_words([*words, "trainer.n_gpus_per_node=8"])
    assert imported.config.learner.sequence_parallel_of("critic") == 2
    (lost,) = [entry for entry in imported.findings.keys["missing"] if entry[0].startswith("critic.")]
    assert lost == ("critic.ulysses_sequence_parallel_size", 4, "made smaller, 2, to divide the ranks of the critic")


def test_verls_critic_does_not_take_the_policys_decay_clipping_and_warm_up() -> None:
    actor = ("optim.weight_decay=0.3", "grad_clip=2.0", "optim.lr_warmup_steps=7", "ppo_mini_batch_size=512")
    words = ["algorithm.adv_estimator=gae", "data.train_batch_size=1024", *(ACTOR + each for each in actor)]
    learner = import_words(words).config.learner
    critic = learner.training_of("critic")
    assert (critic.weight_decay, critic.max_grad_norm, critic.warmup_steps) == (0.01, 1.0, 0)
    assert (learner.weight_decay, learner.max_grad_norm, learner.warmup_steps) == (0.3, 2.0, 7)
    assert critic.minibatches_per_step == learner.minibatches_per_step == 2, "which verl takes from the policy"


def test_tables_of_samples_have_the_rows_of_verls() -> None:
    for rows, ours in ((10, 10), (0, 8), (2000, 1000)):
        assert import_words([f"trainer.log_val_generations={rows}"]).config.learner.samples.table_rows == ours


def test_the_default_alpha_of_an_adapter_is_that_of_its_rank() -> None:
    for words, alpha in (("lora_rank=8", 16), ("lora.rank=8", 32), ("lora.rank=8 lora.alpha=4", 4)):
        lora = import_words([f"{MODEL}{word}" for word in words.split()]).config.learner.lora
        assert lora is not None and lora.alpha == alpha


def test_the_first_key_may_name_a_file() -> None:
    found = import_words([f"{ROLLOUT}multi_turn.tool_config_path=config/tools.yaml"])
    assert str(found.config.rollout.agents.tools_file) == "config/tools.yaml"


def test_a_value_inside_a_value_may_be_none() -> None:
    inner = "${oc.select:actor_rollout_ref.actor.mine,${oc.select:actor_rollout_ref.actor.yours,null}}"
    assert not verdicts(import_words([f"actor_rollout_ref.rollout.mine={inner}"]))


def test_every_default_is_of_one_type() -> None:
    """A pattern of keys has no list of the values of all of them: each would pass for any of them."""
    assert is_same(1, 1.0) and is_same(True, True) and not is_same(True, 1) and not is_same(0, False)
    for row in ALL_KEYS:
        if "*" in row.verl:
            assert all(value in (False, None, {}) for value in row.harmless), row.verl


@pytest.mark.parametrize(
    "key", ["data.image_key=pictures", f"{MODEL}path=Qwen/Qwen2.5-VL-7B-Instruct", f"{ACTOR}freeze_vision_tower=True",
            f"{ROLLOUT}limit_images=2", "data.mm_processor_kwargs.size=2"],
)  # fmt: skip
def test_a_run_that_reads_images_is_refused(key: str) -> None:
    with pytest.raises(ConfigError, match="only text is trained, no images, videos or sound") as refusal:
        import_words(["algorithm.adv_estimator=grpo", key])
    assert str(refusal.value).startswith(f"{key}: ")
    if "model.path" not in key:
        import_words(["algorithm.adv_estimator=grpo", key, f"{key.partition('=')[0]}=null"])


def test_a_file_with_all_of_verls_defaults_reads_no_images() -> None:
    assert not verdicts(import_words(["data.image_key=images", "data.video_key=videos", "data.audio_key=audios"]))


def test_samples_at_temperature_0_are_equal() -> None:
    validation = ROLLOUT + "val_kwargs."
    sampled = import_words(["trainer.test_freq=5", f"{validation}n=8", f"{validation}temperature=0.6"])
    assert (sampled.config.dataset.validation.temperature, sampled.config.dataset.validation.num_samples) == (0.6, 8)
    for words in ((), (f"{validation}do_sample=True",)):
        greedy = import_words(["trainer.test_freq=5", f"{validation}n=8", *words])
        assert (greedy.config.dataset.validation.temperature, greedy.config.dataset.validation.num_samples) == (0, 1)
        assert verdicts(greedy)[f"{validation}n"] == "danger"


@pytest.mark.parametrize("name", ["rloo", "rloo_vectorized", "opo", "grpo_passk"])
def test_an_advantage_that_compares_samples_needs_several(name: str) -> None:
    one = import_words([f"algorithm.adv_estimator={name}"])
    assert verdicts(one)["algorithm.adv_estimator"] == "danger"
    advantage = one.config.learner.algorithm.advantage
    assert (advantage.name, advantage.normalize_by_std) == ("grpo", False)
    several = import_words([f"algorithm.adv_estimator={name}", ROLLOUT + "n=4"])
    assert several.config.learner.algorithm.advantage.name == name.removesuffix("_vectorized")
    assert "algorithm.adv_estimator" not in verdicts(several)


def test_dangers_are_the_first_lines_of_the_report() -> None:
    lines = report_lines(
        import_words(["trainer.device=npu", "algorithm.use_pf_ppo=True", "trainer.balance_batch=True"])
    )
    assert lines[0].startswith("Danger: ") and lines[1] == "  algorithm.use_pf_ppo=True"
    assert "write a step" in lines[2] and lines[4].startswith("No counterpart")


def test_only_a_model_is_taken_for_an_id_of_the_hub() -> None:
    words = ("data.train_files=data/train", "custom_reward_function.path=recipe/reward.py", MODEL + "path=org/model")
    notes = import_words([*words, ROLLOUT + "multi_turn.tool_config_path=config/tools"]).findings.notes
    for path in ("data/train", "recipe/reward.py", "config/tools"):
        assert any(f": {path} is not on this machine" in note for note in notes)
    assert not any("org/model" in note for note in notes)


def test_generation_has_an_engine_for_all_gpus() -> None:
    words = ["python3", "-m", "verl.trainer.main_generation", "trainer.n_gpus_per_node=8"]
    for parallel, servers in (("1", ["--servers", "8"]), ("2", ["--servers", "4"]), ("8", [])):
        found = import_words([*words, f"rollout.tensor_model_parallel_size={parallel}"])
        assert found.command[-2:] == servers if servers else "--servers" not in found.command
        assert not verdicts(found)


def test_the_generation_server_has_the_keys_of_training() -> None:
    words = [f"{ROLLOUT}n=3", f"{ROLLOUT}top_k=50", f"{MODEL}path=org/m", "data.train_files=p.parquet"]
    found = import_words(
        ["python3", "-m", "verl.trainer.main_generation_server", *words, "+data.output_path=o.parquet"]
    )
    assert verdicts(found) == {f"{ROLLOUT}top_k": "unneeded"} and str(found.config.model.path) == "org/m"
    assert found.config.rollout.engine.tensor_parallel_size == 2
    command = " ".join(found.command)
    assert "generate p.parquet" in command and "--output o.parquet --n 3" in command
    assert "--top-p 1.0 --top-k 0" in command, "the defaults are those of training, and verl reads no top_k"


def test_only_a_checkpoint_that_is_asked_for_is_missed() -> None:
    words = ["trainer.resume_from_path=old", "trainer.resume_mode=resume_path"]
    assert verdicts(import_words(words))["trainer.resume_from_path"] == "danger"


def test_a_band_of_weights_is_a_band() -> None:
    prefix = "algorithm.rollout_correction.rollout_is"
    correction = import_words([f"{prefix}=token", f"{prefix}_threshold='0.5_4.0'"]).config.learner.algorithm.correction
    assert (correction.weight, correction.band_low, correction.band_high) == ("band", 0.5, 4.0)


# ── scripts: some of ours, which name the keys of verl's, and verl's own ──

SCRIPTS = {
    "vision": """
set -x
ENGINE=${1:-vllm}
python3 -m verl.trainer.main_ppo \\
    algorithm.adv_estimator=grpo data.image_key=images data.max_prompt_length=1024 data.max_response_length=2048 \\
    actor_rollout_ref.model.path=Qwen/Qwen2.5-VL-7B-Instruct actor_rollout_ref.rollout.name=$ENGINE \\
    actor_rollout_ref.actor.freeze_vision_tower=True trainer.test_freq=5 $@
""",
    "sampled validation": """
n=8
python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo trainer.test_freq=10 trainer.save_freq=20 \\
    actor_rollout_ref.rollout.n=${n} actor_rollout_ref.rollout.val_kwargs.n=30 \\
    actor_rollout_ref.rollout.val_kwargs.temperature=0.6 actor_rollout_ref.rollout.val_kwargs.do_sample=True \\
    actor_rollout_ref.actor.fsdp_config.param_offload=True actor_rollout_ref.actor.fsdp_config.optimizer_offload=True \\
    actor_rollout_ref.ref.fsdp_config.param_offload=True trainer.log_val_generations=10
""",
    "own classes": """
python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo trainer.test_freq=5 trainer.device=npu \\
    data.custom_cls.path=mine.py data.custom_cls.name=Mine actor_rollout_ref.rollout.max_concurrent_requests=64 \\
    actor_rollout_ref.rollout.agent.agent_loop_config_path=loops.yaml actor_rollout_ref.model.mtp.enable=True \\
    reward_model.reward_manager=mine reward_model.sandbox_fusion.url=http://sandbox:8080 \\
    actor_rollout_ref.rollout.multi_turn.function_tool_path=tools.py
""",
}
IN_SCRIPTS = {"vision": 1, "sampled validation": 10, "own classes": 10}
"""How many keys of each script have a verdict above. One that reads images is refused."""


def scripts() -> list[Path]:
    entry = re.compile(r"main_(ppo|dapo|generation|eval)|sft_trainer")
    # A script that starts `$COMMAND` does not say what it starts.
    texts = {path: path.read_text() for path in sorted(CHECKOUT.rglob("*.sh"))}
    return [path for path, text in texts.items() if entry.search(text) and "$COMMAND" not in text]


def expected(key: str, value: Any) -> Iterator[str]:
    yield from (verdict for name, each, verdict in VERDICTS if name == key and is_same(each, value))
    for pattern, kinds, verdict in ANY_VALUE:
        if fnmatchcase(key, pattern) and isinstance(value, kinds):
            yield verdict


def judge(path: Path) -> int:
    """Compare the verdicts on the keys of a script with those above. Returns how many have one."""
    text, num_judged = path.read_text(), 0
    program, given = _read([str(path)])
    try:
        result = import_words([str(path)])
    except ConfigError as error:
        assert "only text is trained" in str(error) and re.search(r"image_key=|-vl\b|omni", text, re.IGNORECASE), path
        return 1
    assert not re.search(r"data\.image_key=|model\.(path|partial_pretrain)=\S*-VL-", text), path
    unknown = [name for name, _, reason in result.findings.keys["missing"] if reason == "this key is not known"]
    assert not unknown, path
    found = verdicts(result)
    if program not in ("ppo", "dapo") or result.config.dataset.validation.file is None:
        return 0
    for key, value in given.values.items():
        for verdict in expected(key, value):
            assert found.get(key, "same") == verdict, f"{path}: {key}={value}"
            num_judged += 1
    temperature = given.values.get(ROLLOUT + "val_kwargs.temperature", 0)
    assert result.config.dataset.validation.temperature == temperature, path
    return num_judged


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_keys_of_a_script_have_their_verdicts(name: str, tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text(SCRIPTS[name])
    assert judge(script) >= IN_SCRIPTS[name]


@pytest.mark.skipif(not CHECKOUT.is_dir(), reason="PENSTOCK_VERL names no checkout of github.com/verl-project/verl")
def test_every_example_of_verl_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(CHECKOUT.parent)
    assert sum(map(judge, scripts())) > 100


@pytest.mark.skipif(not VERL.is_dir(), reason=f"there is no {VERL}; make setup-dev installs it")
@pytest.mark.parametrize("name", ["ppo_trainer", "ppo_megatron_trainer"])
def test_every_key_of_verls_own_config_is_known(name: str) -> None:
    """None of its defaults is lost."""
    file = VERL / "verl" / "trainer" / "config" / f"_generated_{name}.yaml"
    assert not {"danger", "missing"} & set(verdicts(import_words([str(file)])).values())
