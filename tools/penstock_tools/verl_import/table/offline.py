"""Keys of verl's generation and evaluation programs, which `penstock generate` and `penstock evaluate` replace."""

from __future__ import annotations

from penstock_tools.verl_import.table.key import Key, computed, missing, unneeded

_RAY = "the command is one process and starts no Ray"

GENERATION_KEYS: tuple[Key, ...] = (
    computed("model.path", "model.path", "~/models/Qwen2-7B-Instruct"),
    computed("data.path", "dataset.file", "~/data/rlhf/math/test.parquet"),
    computed("data.prompt_key", "dataset.columns.prompt", "prompt"),
    computed("data.n_samples", "dataset.num_samples", 5),
    computed("data.output_path", "--output", "generated.parquet"),
    unneeded("data.batch_size", "prompts are answered as the engine has room"),
    computed("rollout.name", "rollout.engine.name", "vllm"),
    computed("rollout.temperature", "dataset.temperature", 1.0),
    computed("rollout.top_p", "dataset.top_p", 0.7),
    computed("rollout.top_k", "dataset.top_k", 50),
    computed("rollout.ignore_eos", "dataset.ignore_eos", False),
    computed("rollout.prompt_length", "rollout.prompt.max_tokens", 1536),
    computed("rollout.response_length", "dataset.max_tokens", 512),
    computed("rollout.max_model_len", "rollout.engine.max_model_len"),
    computed("rollout.max_num_seqs", "rollout.engine.max_num_seqs", 1024),
    computed("rollout.tensor_model_parallel_size", "rollout.engine.tensor_parallel_size", 1),
    computed("rollout.gpu_memory_utilization", "rollout.engine.gpu_memory_utilization", 0.5),
    computed("rollout.enforce_eager", "rollout.engine.enforce_eager", True),
    computed("rollout.dtype", "model.dtype", "bfloat16"),
    missing("rollout.n", "the number of samples is data.n_samples", 1),
    missing("rollout.do_sample", "set the temperature to 0 for greedy decoding", True),
    missing("rollout.data_parallel_size", "start one command for each part of the file", 1),
    unneeded("rollout.*", "the engine works with its own settings: rollout.engine"),
    missing("model.trust_remote_code", "code of model folders is never run", False),
    missing("model.external_lib", "models are those of transformers; docs/models.md lists them"),
    missing("trainer.nnodes", "the command runs on one machine; start one for each part of the file", 1),
    unneeded("trainer.n_gpus_per_node", "the command starts one engine on rollout.engine.tensor_parallel_size GPUs", 8),
    missing("trainer.device", "engines need NVIDIA GPUs, or CPUs for tiny models", "cuda", "cpu"),
    unneeded("actor.*", "nothing is trained"),
    unneeded("ray_kwargs.*", _RAY),
)

EVALUATION_KEYS: tuple[Key, ...] = (
    computed("data.path", "dataset.file", "generated.parquet"),
    computed("data.response_key", "--response-column", "responses"),
    unneeded("data.prompt_key", "the prompt is copied as it is"),
    computed("data.data_source_key", "dataset.columns.data_source", "data_source"),
    computed("data.reward_model_key", "dataset.columns.ground_truth", "reward_model"),
    computed("custom_reward_function.path", "rollout.reward.function_file"),
    computed("custom_reward_function.name", "rollout.reward.function_name", "compute_score"),
    computed("custom_reward_function.reward_kwargs.*", "rollout.reward.function_kwargs"),
    unneeded("ray_kwargs.*", _RAY),
)
