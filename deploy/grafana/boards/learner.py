"""The learner: time and memory of a step, and the statistics of the algorithm."""

from __future__ import annotations

from panel import Board, Section, lines, mean, quantile, rate, since, spread

LEARNER = Section(
    "Learner",
    (
        spread(
            "Step duration",
            "Time of a step, with the wait for data.",
            "penstock_learner_step_duration_seconds",
            opens=("learner/Phases",),
        ),
        lines(
            "Phases",
            "Share of the time, by phase of the step.",
            (rate("penstock_learner_phase_seconds_total", "phase"), "{{phase}}"),
            unit="percentunit",
            opens=("rollout/Groups at once", "overview/Waiting"),
            alerts=("LearnerStarved",),
        ),
        lines(
            "Outside of training",
            "Share of the last step in which the policy's ranks run no forward pass, backward pass or optimizer, "
            "without and with waiting for groups.",
            ("max(penstock_learner_overhead_ratio)", "without waiting"),
            ("max(penstock_learner_idle_ratio)", "with waiting"),
            unit="percentunit",
            opens=("learner/Phases",),
        ),
        lines(
            "GPU busy",
            "Share of the time in which the policy's ranks run a forward pass, a backward pass or the optimizer. "
            "NVIDIA's DCGM exporter has the figure of the hardware: DCGM_FI_PROF_SM_ACTIVE.",
            (rate("penstock_learner_compute_seconds_total"), ""),
            unit="percentunit",
            opens=("learner/Outside of training", "rollout/GPU busy"),
        ),
        lines(
            "Steps",
            "Steps per minute.",
            (f"60 * {rate('penstock_learner_steps_total')}", ""),
            unit="suffix:steps/min",
            alerts=("LearnerStalled",),
        ),
        lines(
            "Tokens",
            "Tokens per second.",
            (rate("penstock_learner_tokens_total", "kind"), "{{kind}}"),
            unit="suffix:tokens/s",
        ),
        lines(
            "Throughput by phase",
            "Tokens per second of a phase while it runs: of a busy server, the policy's log-probs, the other roles and "
            "the update.",
            ("max by (phase) (penstock_learner_phase_tokens_per_second)", "{{phase}}"),
            unit="suffix:tokens/s",
            opens=("learner/Phases",),
        ),
        lines(
            "MFU",
            "Model FLOPs utilisation: FLOPs of the model over the peak of the devices. 0 if the peak is not known.",
            ("max(penstock_learner_mfu_ratio)", ""),
            unit="percentunit",
        ),
        lines(
            "Memory peak",
            "Peak of allocated memory, by policy rank.",
            ("max by (rank) (penstock_learner_memory_peak_bytes)", "rank {{rank}}"),
            unit="bytes",
            opens=("reliability/Host memory",),
        ),
        lines(
            "Non-finite steps",
            "Steps skipped in the last hour because the loss or a gradient was not finite.",
            ("sum(increase(penstock_learner_nonfinite_steps_total[1h]))", ""),
            unit="suffix:steps",
            limits={2: "red"},
            opens=("learner/Gradient norm", "learner/Importance ratio"),
            alerts=("NonFiniteSteps",),
        ),
        lines(
            "Role restarts",
            "Restarts in the last hour, after a rank died or hung.",
            ("sum by (role) (increase(penstock_learner_role_restarts_total[1h]))", "{{role}}"),
            unit="suffix:restarts",
            limits={1: "orange"},
        ),
        lines(
            "Since the last step",
            "Time since the last finished step.",
            (since("penstock_learner_last_step_timestamp_seconds"), "{{run}}"),
            unit="s",
            limits={600: "orange", 900: "red"},
            alerts=("LearnerStalled",),
        ),
    ),
)

ALGORITHM = Section(
    "Algorithm",
    (
        lines(
            "Loss", "Loss of the last step, by term.", ("max by (term) (penstock_algo_loss)", "{{term}}"), unit="none"
        ),
        lines(
            "KL",
            "Divergence of the policy, per token.",
            ("max by (against) (penstock_algo_kl_nats)", "{{against}}"),
            unit="suffix:nats",
            limits={1: "orange"},
            alerts=("KLDivergence",),
        ),
        lines(
            "Entropy",
            "Entropy of the policy, per token. Below 0.05 nats it hardly explores.",
            ("max(penstock_algo_entropy_nats)", ""),
            unit="suffix:nats",
            limits={0: "orange", 0.05: "green"},
            alerts=("EntropyCollapse",),
        ),
        lines(
            "Learning rate",
            "Learning rate of the policy in the last step.",
            ("max(penstock_learner_lr)", ""),
            unit="none",
        ),
        lines(
            "Gradient norm",
            "Norm before clipping.",
            ("max(penstock_algo_grad_norm)", "policy"),
            ("max(penstock_algo_critic_grad_norm)", "critic"),
            unit="none",
        ),
        lines(
            "Values",
            "Critic: share of the variance of returns that it explains, and share of tokens whose value was clipped.",
            ("max(penstock_algo_value_explained_variance)", "explained"),
            ("max(penstock_algo_critic_clip_ratio)", "clipped"),
            unit="percentunit",
        ),
        lines(
            "Experts: load",
            "Mixture of experts: load of the busiest expert over the mean of its layer, and the auxiliary loss.",
            ("max(penstock_algo_expert_load_max_ratio)", "busiest expert"),
            ("max(penstock_algo_router_aux_loss)", "auxiliary loss"),
            unit="none",
        ),
        lines(
            "Experts: use",
            "Mixture of experts: share of experts that no token chose, and share of choices that were the engine's.",
            ("max(penstock_algo_unused_expert_ratio)", "unused"),
            ("max(penstock_algo_router_replayed_ratio)", "replayed"),
            unit="percentunit",
        ),
        lines(
            "Clipped",
            "Share of trained tokens that were clipped.",
            ("max by (side) (penstock_algo_clip_ratio)", "{{side}}"),
            unit="percentunit",
        ),
        lines(
            "Importance ratio",
            "Probability under the policy over that under the behaviour policy, by token.",
            (quantile(0.05, "penstock_algo_importance_ratio"), "p5"),
            (quantile(0.5, "penstock_algo_importance_ratio"), "p50"),
            (quantile(0.95, "penstock_algo_importance_ratio"), "p95"),
            (mean("penstock_algo_importance_ratio"), "mean"),
            unit="none",
        ),
        lines(
            "Off-policy",
            "Share of tokens whose weight was truncated, share that was rejected, and effective sample ratio.",
            ("max(penstock_algo_is_truncated_ratio)", "truncated"),
            ("max(penstock_algo_is_rejected_ratio)", "rejected"),
            ("max(penstock_algo_effective_sample_ratio)", "effective"),
            unit="percentunit",
            opens=("overview/Staleness",),
            alerts=("StalenessNearLimit",),
        ),
        lines(
            "Lost samples",
            "Share of the step's samples whose reward failed, and whose response was cut at a limit.",
            ("max(penstock_reward_failed_ratio)", "reward failed"),
            ("max(penstock_train_truncated_ratio)", "cut"),
            unit="percentunit",
            limits={0.5: "orange", 0.9: "red"},
            opens=("rollout/Reward errors", "rollout/Truncated"),
            alerts=("RewardErrors", "RunPausedItself"),
        ),
        lines(
            "Groups without spread",
            "Share of groups whose rewards are all equal, or that have only one sample.",
            ("max(penstock_algo_zero_advantage_group_ratio)", "equal"),
            ("max(penstock_algo_singleton_group_ratio)", "one sample"),
            unit="percentunit",
            limits={0.9: "orange"},
        ),
        lines(
            "Log-prob mismatch",
            "Difference in nats between learner and engine on the same weights.",
            ("max(penstock_algo_logprob_mismatch_nats)", ""),
            unit="suffix:nats",
            limits={0.1: "orange"},
            opens=("learner/Log-prob mismatch by server",),
            alerts=("TrainInferMismatch",),
        ),
        lines(
            "Log-prob mismatch by server",
            "Difference in nats between the learner and each server on the samples compared in a step, and the "
            "lowest limit of a server. Samples of older versions differ because the policy has moved.",
            ("max by (server) (penstock_algo_server_logprob_mismatch_nats)", "{{server}}"),
            ("min(penstock_algo_server_logprob_limit_nats)", "limit"),
            unit="suffix:nats",
            opens=("reliability/Quarantined servers",),
            alerts=("ServerQuarantined",),
        ),
        lines(
            "Reward",
            "Mean reward in the last batch.",
            ("avg by (env) (penstock_reward_mean)", "{{env}}"),
            unit="none",
            opens=("overview/Evaluations",),
        ),
        lines(
            "Reward spread",
            "Lowest and highest reward in the last batch, and the standard deviation.",
            ("min(penstock_reward_min)", "lowest"),
            ("max(penstock_reward_max)", "highest"),
            ("max(penstock_reward_std)", "standard deviation"),
            unit="none",
        ),
        lines(
            "Reward parts",
            "Mean of each part of the reward in the last batch; the whole reward if it has no parts.",
            ("avg by (part) (penstock_reward_part_mean) or on (run) avg(penstock_reward_mean)", "{{part}}"),
            unit="none",
        ),
    ),
)

BOARD = Board("learner", "Penstock learner and algorithm", (LEARNER, ALGORITHM))
