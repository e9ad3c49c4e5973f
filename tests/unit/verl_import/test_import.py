"""`penstock import-verl`: what becomes of verl's keys, and that none is dropped in silence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from penstock.cli import main as cli
from penstock.config.loading import load_config
from penstock.config.run import RunConfig
from penstock.errors import ConfigError
from penstock_tools.verl_import.command import Imported, config_text, import_words
from penstock_tools.verl_import.keys import CONVERTERS, KEYS_BY_PROGRAM, VERDICTS, look_up

GRPO = (
    "algorithm.adv_estimator=grpo", "data.train_files=/d/train.parquet", "data.val_files=/d/test.parquet",
    "data.train_batch_size=1024", "data.max_prompt_length=512", "data.max_response_length=1024",
    "data.filter_overlong_prompts=True", "data.truncation='error'", "actor_rollout_ref.model.path=Qwen/Qwen3-8B",
    "actor_rollout_ref.actor.optim.lr=1e-6", "actor_rollout_ref.actor.ppo_mini_batch_size=256",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4", "actor_rollout_ref.actor.use_kl_loss=True",
    "actor_rollout_ref.actor.kl_loss_coef=0.002", "actor_rollout_ref.actor.kl_loss_type=low_var_kl",
    "actor_rollout_ref.rollout.tensor_model_parallel_size=2", "actor_rollout_ref.rollout.name=vllm",
    "actor_rollout_ref.rollout.gpu_memory_utilization=0.6", "actor_rollout_ref.rollout.n=5",
    "trainer.logger=['console','wandb']", "trainer.experiment_name='Qwen3 8B'", "trainer.n_gpus_per_node=8",
    "trainer.save_freq=20", "trainer.test_freq=5", "trainer.total_epochs=15",
)  # fmt: skip


def imported(*words: str, base: tuple[str, ...] = GRPO, max_staleness: int = 0) -> Imported:
    return import_words([*base, *words], max_staleness)


def field(name: str, *words: str, **options: Any) -> Any:
    """Our field after an import: its value in the whole config."""
    return look_up(imported(*words, **options).config.model_dump(mode="json"), name)


def reasons(result: Imported) -> dict[str, str]:
    return {name: reason for verdict in ("danger", "missing") for name, _, reason in result.findings.keys[verdict]}


def test_a_grpo_run_means_the_same_here() -> None:
    config = imported().config
    assert (config.run, str(config.model.path), config.model.dtype) == ("qwen3-8b", "Qwen/Qwen3-8B", "bfloat16")
    assert (config.replay.groups_per_step, config.dataset.num_samples, config.dataset.epochs) == (1024, 5, 15)
    assert (config.replay.max_staleness, config.replay.stale_policy) == (0, "wait")
    learner = config.learner
    assert (learner.minibatches_per_step, learner.micro_batch_tokens) == (4, 4 * 1536)
    assert (learner.betas, learner.weight_decay, learner.lr) == ((0.9, 0.999), 0.01, 1e-6), "verl's defaults"
    algorithm = learner.algorithm
    assert (algorithm.kl.placement, algorithm.kl.penalty, algorithm.kl.coefficient) == ("loss", "k3", 0.002)
    assert (algorithm.correction.mode, algorithm.loss.aggregation) == ("none", "token-mean")
    assert (config.rollout.num_servers, config.rollout.engine.tensor_parallel_size) == (2, 2)
    assert (learner.policy.num_ranks, learner.reference.num_ranks, learner.placement) == (4, 4, "split-collocate")
    validation = config.dataset.validation
    assert (validation.every_steps, validation.temperature, validation.max_tokens) == (5, 0.0, 1024)
    assert (config.rollout.prompt.overlong, config.rollout.engine.max_model_len) == ("filter", 1536)
    assert (config.dataset.last_batch, config.rollout.reward.compat) == ("drop", "verl")


_TURNS = "actor_rollout_ref.rollout.multi_turn."
_VALIDATION = "actor_rollout_ref.rollout.val_kwargs."
_CORRECTION = "algorithm.rollout_correction."
_DAPO = "reward_model.reward_manager=dapo"
_BUFFER = "+reward_model.reward_kwargs.overlong_buffer_cfg."


@pytest.mark.parametrize(
    ("words", "name", "value"),
    [
        (("actor_rollout_ref.actor.clip_ratio_high=0.28",), "learner.algorithm.loss.clip_high", 0.28),
        (("actor_rollout_ref.actor.clip_ratio=0.1",), "learner.algorithm.loss.clip_low", 0.1),
        (("actor_rollout_ref.actor.clip_ratio_c=10.0",), "learner.algorithm.loss.dual_clip", 10.0),
        (("actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-sum-norm",),
         "learner.algorithm.loss.constant_length", 1024),
        (("algorithm.norm_adv_by_std_in_grpo=False",), "learner.algorithm.advantage.normalize_by_std", False),
        (("algorithm.use_kl_in_reward=True", "algorithm.kl_ctrl.kl_coef=0.01"),
         "learner.algorithm.kl.coefficient", 0.01),
        (("algorithm.use_kl_in_reward=True",), "learner.algorithm.kl.placement", "both"),
        (("actor_rollout_ref.actor.policy_loss.loss_mode=gspo",), "learner.algorithm.loss.name", "gspo"),
        (("algorithm.adv_estimator=rloo_vectorized",), "learner.algorithm.advantage.name", "rloo"),
        (("actor_rollout_ref.actor.use_dynamic_bsz=True", "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=9000"),
         "learner.micro_batch_tokens", 9000),
        (("actor_rollout_ref.actor.optim.lr_warmup_steps_ratio=0.1", "trainer.total_training_steps=200"),
         "learner.warmup_steps", 20),
        (("actor_rollout_ref.actor.fsdp_config.offload_policy=True",), "learner.offload", "all"),
        (("actor_rollout_ref.actor.fsdp_config.model_dtype=bf16",), "learner.master_dtype", "bfloat16"),
        (("actor_rollout_ref.actor.ulysses_sequence_parallel_size=2",), "learner.sequence_parallel", 2),
        (("trainer.n_gpus_per_node=1",), "rollout.engine.gpu_memory_utilization", 0.4),
        (("trainer.n_gpus_per_node=8", "actor_rollout_ref.rollout.tensor_model_parallel_size=8"),
         "rollout.engine.tensor_parallel_size", 4),
        ((_VALIDATION + "temperature=0.6",), "dataset.validation.temperature", 0.6),
        (("actor_rollout_ref.rollout.top_k=-1",), "dataset.top_k", 0),
        (("actor_rollout_ref.rollout.max_num_batched_tokens=8192",),
         "rollout.engine.extra.max_num_batched_tokens", 8192),
        (("+actor_rollout_ref.rollout.engine_kwargs.vllm.swap_space=8",), "rollout.engine.extra.swap_space", 8),
        ((_DAPO, _BUFFER + "enable=True", _BUFFER + "len=256"), "learner.algorithm.overlong.buffer_num_tokens", 256),
        ((_DAPO, _BUFFER + "enable=True", _BUFFER + "len=256"), "learner.algorithm.overlong.max_num_tokens", 1024),
        (("custom_reward_function.path=r.py", "reward_model.reward_manager=batch"),
         "rollout.reward.function_batch", True),
        (("custom_reward_function.path=r.py", "+custom_reward_function.reward_kwargs.a=2"),
         "rollout.reward.function_kwargs.a", 2),
        (("reward_model.enable=True", "reward_model.model.path=org/rm"), "learner.reward_model.combine", "replace"),
        ((_TURNS + "tool_config_path=tools.yaml", _TURNS + "max_assistant_turns=3"), "rollout.agents.max_turns", 3),
        ((_TURNS + "enable=True", _TURNS + "max_tool_response_length=99"),
         "rollout.agents.max_tool_response_chars", 99),
        ((_TURNS + "enable=True", _TURNS + "max_parallel_calls=2"), "rollout.agents.max_calls_per_turn", 2),
        ((_TURNS + "enable=True", _TURNS + "tool_response_truncate_side=left"),
         "rollout.agents.tool_response_keep", "head"),
        ((_TURNS + "enable=True", _TURNS + "tool_response_truncate_side=right"),
         "rollout.agents.tool_response_keep", "tail"),
        ((_TURNS + "enable=True",), "rollout.agents.tool_response_keep", "both"),
        ((_TURNS + "enable=True", _TURNS + "max_user_turns=2"), "rollout.agents.max_user_turns", 2),
        ((_TURNS + "enable=True", _TURNS + "max_user_turns=20"), "rollout.agents.max_turns", 21),
        ((_TURNS + "enable=True",), "rollout.agents.max_turns", 512),
        ((_TURNS + "enable=True",), "rollout.agents.turn_rewards", "record"),
        ((_TURNS + "enable=True", _TURNS + "tool_config_path=t.yaml"), "rollout.agents.default_agent", "tool_agent"),
        ((_TURNS + "enable=True", _TURNS + "tool_config_path=t.yaml", _TURNS + "interaction_config_path=i.yaml"),
         "rollout.agents.default_agent", "tool_agent"),
        ((_TURNS + "enable=True", _TURNS + "interaction_config_path=i.yaml"),
         "rollout.agents.default_agent", "interaction_agent"),
        (("actor_rollout_ref.rollout.agent.default_agent_loop=tool_agent",),
         "rollout.agents.default_agent", "tool_agent"),
        (("actor_rollout_ref.actor.shuffle=True",), "learner.shuffle_minibatches", True),
        (("actor_rollout_ref.actor.shuffle=True",), "learner.shuffle_seed", 42),
        (("algorithm.filter_groups.enable=True",), "replay.dynamic_sampling", True),
        ((_CORRECTION + "rollout_is=token", _CORRECTION + "rollout_is_threshold=4"),
         "learner.algorithm.correction.cap", 4),
        ((_CORRECTION + "rollout_is=sequence",), "learner.algorithm.correction.weight", "sequence_truncation"),
        ((_CORRECTION + "bypass_mode=True",), "learner.algorithm.correction.mode", "bypass"),
        ((_CORRECTION + "bypass_mode=True", _CORRECTION + "loss_type=reinforce"),
         "learner.algorithm.loss.name", "reinforce"),
        ((_CORRECTION + "rollout_rs=token_k1", _CORRECTION + "rollout_rs_threshold='0.6_1.6'"),
         "learner.algorithm.correction.rejection_low", 0.6),
        (("trainer.resume_mode=disable",), "learner.checkpoint.resume", "off"),
        (("trainer.save_freq=-1",), "learner.checkpoint.every_steps", 25),
        (("trainer.test_freq=-1", "trainer.val_before_train=False"), "dataset.validation.file", None),
        (("trainer.default_local_dir=/ckpt",), "run_dir", "/ckpt"),
        (("data.truncation=left", "data.filter_overlong_prompts=False"), "rollout.prompt.overlong", "truncate_left"),
        (("+data.apply_chat_template_kwargs.enable_thinking=False",),
         "rollout.prompt.template_arguments.enable_thinking", False),
        (("data.seed=7",), "dataset.shuffle_seed", 7),
        (("actor_rollout_ref.model.lora_rank=32", "actor_rollout_ref.model.lora_alpha=64"), "learner.lora.alpha", 64),
        (("data.train_files=['a.parquet', 'b.parquet']",), "dataset.file", ["a.parquet", "b.parquet"]),
    ],
)  # fmt: skip
def test_a_key_sets_our_field(words: tuple[str, ...], name: str, value: object) -> None:
    assert field(name, *words) == value


def test_ppo_has_a_critic() -> None:
    words = (
        "algorithm.adv_estimator=gae",
        "critic.optim.lr=2e-5",
        "critic.model.path=org/critic",
        "trainer.critic_warmup=3",
    )
    learner = imported("algorithm.adv_estimator=gae", *words).config.learner
    assert learner.critic is not None
    assert (learner.critic.lr, str(learner.critic.path), learner.critic_warmup_steps) == (2e-5, "org/critic", 3)
    assert learner.policy.num_ranks + learner.critic.num_ranks == 4


def test_staleness_turns_the_correction_on() -> None:
    assert field("learner.algorithm.correction.mode", max_staleness=2) == "decoupled"
    assert field("replay.max_staleness", max_staleness=2) == 2


def test_losses_and_the_order_of_minibatches_have_counterparts() -> None:
    actor = "actor_rollout_ref.actor."
    words = (f"{actor}policy_loss.loss_mode=geo_mean", f"{actor}shuffle=True", f"{actor}data_loader_seed=7")
    for path, value in (
        ("learner.algorithm.loss.name", "geo_mean"),
        ("learner.algorithm.loss.aggregation", "seq-mean-token-mean"),
        ("learner.shuffle_minibatches", True),
        ("learner.shuffle_seed", 7),
    ):
        assert field(path, *words) == value
    assert field("learner.algorithm.advantage.name", "algorithm.adv_estimator=gpg") == "gpg"
    loss = f"{actor}policy_loss."
    words = (f"{loss}loss_mode=kl-cov", f"{loss}kl_cov_ratio=0.002", f"{loss}ppo_kl_coef=1", f"{loss}clip_cov_lb=2")
    for path, value in (("name", "kl_cov"), ("cov_share", 0.002), ("cov_kl_coefficient", 1.0), ("cov_low", 2.0)):
        assert field(f"learner.algorithm.loss.{path}", *words) == value


@pytest.mark.parametrize(
    ("word", "reason"),
    [
        ("actor_rollout_ref.actor.policy_loss.loss_mode=my_loss", "your own"),
        ("algorithm.adv_estimator=optimal_token_baseline", "your own"),
        ("trainer.device=npu", "NVIDIA"),
        ("trainer.logger=['swanlab']", "swanlab"),
        ("actor_rollout_ref.rollout.name=trtllm", "engines are"),
        ("actor_rollout_ref.actor.optim.lr_warmup_steps_ratio=0.1", "learner.warmup_steps"),
        ("data.custom_cls.path=mine.py", "dataset.loader"),
        ("trainer.no_such_key=1", "not known"),
        ("my_own.section=1", "not known"),
    ],
)
def test_what_has_no_counterpart_is_listed_with_the_reason(word: str, reason: str) -> None:
    found = reasons(imported(word))
    assert reason in found[word.partition("=")[0]]


def test_every_given_key_is_counted_once() -> None:
    result = imported("trainer.no_such_key=1", "actor_rollout_ref.actor.optim.warmup_style=constant")
    assert result.findings.num_same + sum(map(len, result.findings.keys.values())) == len(GRPO) + 2


def test_every_key_that_means_the_same_sets_its_field() -> None:
    words = ("algorithm.adv_estimator=gae", "algorithm.use_kl_in_reward=True", "custom_reward_function.path=r.py")
    base = (*GRPO, *words, _TURNS + "enable=True", "actor_rollout_ref.actor.shuffle=True")
    experts = "actor_rollout_ref.actor.megatron.override_transformer_config.moe_aux_loss_coeff"
    chosen = {"algorithm.kl_ctrl.type": "adaptive", _TURNS + "max_user_turns": 2, experts: 0.1, "critic.ppo_epochs": 2}
    for row in KEYS_BY_PROGRAM["ppo"]:
        if row.convert == "=" and not row.verl.endswith(("gdpo_reward_keys", "gdpo_reward_weights", "dro_beta")):
            default = "file.yaml" if row.default is None else row.default
            config = imported(f"{row.verl}={chosen.get(row.verl, default)}", base=base).config
            assert look_up(config.model_dump(mode="json", exclude_unset=True), row.ours[0]) is not None, row.verl


def test_the_table_names_fields_that_exist_and_gives_reasons() -> None:
    known = _paths(RunConfig.model_json_schema())
    for rows in KEYS_BY_PROGRAM.values():
        names = [row.verl for row in rows]
        for row in rows:
            assert row.kind in ("set", "alias", *VERDICTS) and row.convert in ("", *CONVERTERS), row.verl
            assert row.ours or row.note or row.harmless, row.verl
            if row.kind == "alias":
                stem = row.ours[0].removesuffix("*")
                assert any(other.startswith(stem) for other in names if other != row.verl), row.verl
                continue
            for ours in row.ours:
                assert ours.startswith("--") or ours in known, f"{row.verl}: {ours} is not a field"
        assert len(names) == len(set(names)), "each key has one row"


def _paths(schema: dict[str, Any]) -> set[str]:
    """Dotted names of all fields and sections of a JSON schema."""
    found: set[str] = set()

    def walk(node: dict[str, Any], prefix: str) -> None:
        for part in (node, *node.get("anyOf", []), *node.get("allOf", [])):
            inner = schema["$defs"][part["$ref"].rpartition("/")[2]] if "$ref" in part else part
            for name, field in inner.get("properties", {}).items():
                found.add(prefix + name)
                walk(field, f"{prefix}{name}.")

    walk(schema, "")
    return found


def test_a_yaml_file_is_read_with_its_defaults_and_interpolations(tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text("data: {train_batch_size: 64, max_prompt_length: 100}\n")
    (tmp_path / "actor").mkdir()
    (tmp_path / "actor" / "mine.yaml").write_text("optim: {lr: 3e-6}\n_target_: verl.Something\n")
    file = tmp_path / "run.yaml"
    file.write_text(
        "hydra: {searchpath: [file://verl/trainer/config]}\n"
        "defaults: [ppo_trainer, base, {actor@actor_rollout_ref.actor: mine}, _self_]\n"
        "algorithm: {adv_estimator: grpo}\n"
        "data: {max_prompt_length: 200, max_response_length: '${data.max_prompt_length}'}\n"
        "actor_rollout_ref: {rollout: {name: '???', n: '${oc.select:nothing.here,4}'}}\n"
    )
    config = import_words([str(file), "trainer.total_epochs=2"]).config
    assert (config.replay.groups_per_step, config.dataset.max_tokens, config.learner.lr) == (64, 200, 3e-6)
    assert (config.dataset.num_samples, config.dataset.epochs) == (4, 2)


def test_a_missing_config_is_an_error_and_not_an_empty_run() -> None:
    with pytest.raises(ConfigError, match=r"mine\.yaml does not exist"):
        import_words(["python3", "-m", "verl.trainer.main_ppo", "--config-path=conf", "--config-name=mine", "a.b=1"])


def test_generation_and_evaluation_become_commands(tmp_path: Path) -> None:
    generation = import_words(
        ["python3", "-m", "verl.trainer.main_generation", "model.path=org/m", "data.path=p.parquet", "data.n_samples=4"]
    )
    assert generation.command[:3] == ["penstock", "generate", "p.parquet"]
    assert generation.command[generation.command.index("--n") + 1] == "4"
    assert str(generation.config.model.path) == "org/m"
    evaluation = import_words(
        ["python3", "-m", "verl.trainer.main_eval", "data.path=r.parquet", "custom_reward_function.path=r.py"]
    )
    assert evaluation.command[:3] == ["penstock", "evaluate", "r.parquet"]
    assert str(evaluation.config.rollout.reward.function_file) == "r.py"


def test_the_command_writes_a_file_that_loads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "run.sh"
    script.write_text("N=4\npython3 -m verl.trainer.main_ppo \\\n  " + " \\\n  ".join(GRPO) + " trainer.nnodes=$N $@\n")
    out = tmp_path / "run.yaml"
    arguments = ["import-verl", "-o", str(out), "--max-staleness", "1", str(script), "trainer.device=npu"]
    assert cli.main(arguments) == 0
    assert load_config(out).replay.max_staleness == 1
    printed = capsys.readouterr().out
    assert "trainer.device=npu" in printed and "trainer.device=npu" in out.read_text(), "the file keeps the report"
    assert yaml.safe_load(out.read_text())["learner"]["policy"]["num_ranks"] == 16
    assert cli.main(arguments) == 2, "the file is not overwritten"


def test_the_command_takes_a_verl_command_line_with_its_options(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["python3", "-u", "-m", "verl.trainer.main_ppo", *GRPO, "data.train_batch_size=48"]
    assert cli.main(["import-verl", "--max-staleness", "1", *command]) == 0
    assert yaml.safe_load(capsys.readouterr().out)["replay"]["groups_per_step"] == 48
    assert cli.main(["import-verl", "--max-stalenes", "1", *command]) == 2
    assert "did you mean --max-staleness?" in capsys.readouterr().err


def test_losses_of_newer_versions_are_taken_over() -> None:
    actor = "actor_rollout_ref.actor."
    loss = "learner.algorithm.loss."
    mode = f"{actor}policy_loss.loss_mode="
    assert field(loss + "tau_positive", mode + "sapo", f"{actor}tau_pos=2.0") == 2.0
    assert (
        field(loss + "aggregation", mode + "gspo", f"{actor}loss_agg_mode=seq-mean-token-sum") == "seq-mean-token-sum"
    )
    assert field(loss + "aggregation", f"{actor}loss_agg_mode=token-sum") == "token-sum"
    assert field(loss + "name", mode + "dppo_kl") == "dppo_kl"
    assert field(loss + "dro_beta", mode + "dro", f"{actor}policy_loss.dro_beta=0.1") == 0.1
    parts = ("algorithm.adv_estimator=gdpo", "algorithm.gdpo_reward_keys=[right,short]")
    assert field("learner.algorithm.advantage.reward_keys", *parts) == ["right", "short"]
    assert field("learner.algorithm.kl.placement", *parts, "algorithm.use_kl_in_reward=True") == "loss"


def test_supervised_trainers_become_a_config_and_a_command(tmp_path: Path) -> None:
    pq.write_table(pa.table({"messages": [[{"role": "user", "content": "a"}]] * 70}), tmp_path / "d.parquet")
    words = [f"data.train_files={tmp_path}/d.parquet", "data.train_batch_size=16", "trainer.default_local_dir=out"]
    older = ["torchrun", "--nproc_per_node=2", "-m", "verl.trainer.fsdp_sft_trainer", *words, "model.lora_rank=8"]
    keys = ["data.prompt_key=extra_info", "data.prompt_dict_keys=['question']", "data.response_key=answer"]
    found = import_words([*older, *keys, "model.partial_pretrain=org/m", "ulysses_sequence_parallel_size=2"])
    assert found.command[-4:] == ["--config", "CONFIG", "--out", "out"] and found.command[0] == "torchrun"
    sft, learner = found.config.sft, found.config.learner
    assert (sft.columns.prompt, sft.columns.response, sft.text_prompts) == ("extra_info.question", "answer", "user")
    assert (learner.warmup_steps, learner.lr, learner.lr_schedule) == (1, 1e-5, "cosine"), "0.1 of 4 x 4 steps"
    assert learner.lora is not None and (learner.lora.rank, learner.sequence_parallel) == (8, 2)
    assert (sft.batch_size, sft.epochs, sft.last_batch, sft.max_tokens) == (16, 4, "drop", 1024)
    newer = import_words(["python", "-m", "verl.trainer.sft_trainer", *words, "data.truncation=right", "optim=fsdp"])
    assert (newer.config.sft.too_long, newer.config.sft.text_prompts) == ("cut", "text")
    assert (newer.config.learner.lr, newer.config.learner.betas) == (1e-3, (0.9, 0.999))
    assert "sft --config my.yaml --out out" in config_text(newer, "x", "my.yaml") and not newer.findings.keys["missing"]


def test_rewards_have_the_names_of_newer_versions_too() -> None:
    own = "reward.custom_reward_function."
    words = (f"{own}path=r.py", f"{own}name=score", f"+{own}reward_kwargs.weight=2", "reward.num_workers=3")
    assert field("rollout.reward.function_kwargs.weight", *words) == 2
    assert field("rollout.reward.function_name", *words) == "score"
    assert field("rollout.reward.num_processes", *words) == 3
    buffer = "+reward.reward_kwargs.overlong_buffer_cfg."
    dapo = (
        "reward.reward_manager.name=dapo",
        f"{buffer}enable=True",
        f"{buffer}len=128",
        f"{buffer}penalty_factor=0.5",
    )
    for path, value in (("max_num_tokens", 512), ("buffer_num_tokens", 128), ("factor", 0.5)):
        assert field(f"learner.algorithm.overlong.{path}", *dapo, "+reward.reward_kwargs.max_resp_len=512") == value
    engines = ("actor_rollout_ref.rollout.nnodes=1", "actor_rollout_ref.rollout.n_gpus_per_node=6")
    assert field("rollout.num_servers", *engines, "actor_rollout_ref.rollout.tensor_model_parallel_size=2") == 3
    lost = imported("trainer.v1.trainer_mode=separate_async", "distillation.enabled=False").findings.keys["missing"]
    assert [name for name, _, _ in lost] == ["trainer.v1.trainer_mode"]


def test_words_that_are_not_a_verl_run_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "empty.sh"
    script.write_text("echo hello\n")
    assert cli.main(["import-verl", str(script)]) == 2
    assert "starts no verl run" in capsys.readouterr().err
    assert cli.main(["import-verl", "nothing"]) == 2
    assert cli.main(["import-verl"]) == 2


def test_files_are_checked_as_far_as_they_are_here(tmp_path: Path) -> None:
    example = Path(__file__).parents[3] / "examples" / "arithmetic"
    words = [f"data.train_files={example}/train.parquet", f"data.val_files={example}/heldout.parquet"]
    words += [f"actor_rollout_ref.model.path={example}/model", f"custom_reward_function.path={example}/reward.py"]
    assert imported(*words).findings.notes == []
    (tmp_path / "reward.py").write_text("def other(): ...\n")
    notes = imported(*words, f"custom_reward_function.path={tmp_path}/reward.py").findings.notes
    assert len(notes) == 1 and "does not define compute_score" in notes[0]
    assert "dataset.file: /d/train.parquet is not on this machine" in imported().findings.notes


def test_a_warm_up_ratio_counts_the_rows_that_are_here() -> None:
    example = Path(__file__).parents[3] / "examples" / "arithmetic"
    words = (f"data.train_files={example}/train.parquet", "data.train_batch_size=8", "trainer.total_epochs=2")
    ratio = "actor_rollout_ref.actor.optim.lr_warmup_steps_ratio=0.5"
    mini = "actor_rollout_ref.actor.ppo_mini_batch_size=8"
    result = imported(*words, ratio, mini)
    import pyarrow.parquet as parquet

    rows = parquet.ParquetFile(example / "train.parquet").metadata.num_rows
    assert result.config.learner.warmup_steps == 2 * (rows // 8) // 2


def test_a_note_of_several_lines_stays_a_comment_of_the_file(tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text("SEED=$(ask a server \\\n  for: a seed)\npython3 -m verl.trainer.main_ppo\n")
    result = import_words([str(script), *GRPO])
    assert any("\n" in note for note in result.findings.notes)
    assert yaml.safe_load(config_text(result, "run.sh", "run.yaml"))["run"] == "qwen3-8b"
