"""What the dashboards show, as data: see make_dashboards.py.

An expression never comes back empty from a healthy run: what exists only after a fault starts at 0, or ends in
`or vector(0)`.
"""

from __future__ import annotations

from dataclasses import dataclass

WINDOW = "[$__rate_interval]"


@dataclass(frozen=True)
class Query:
    expr: str
    """`penstock_` metrics without the run's label: `build` adds it."""
    legend: str = ""


@dataclass(frozen=True)
class Panel:
    title: str
    about: str
    queries: tuple[Query, ...]
    unit: str = "short"
    is_number: bool = False
    """One large number instead of lines."""


@dataclass(frozen=True)
class Section:
    title: str
    panels: tuple[Panel, ...]


@dataclass(frozen=True)
class Board:
    name: str
    title: str
    sections: tuple[Section, ...]


def lines(title: str, about: str, *queries: tuple[str, str], unit: str = "short") -> Panel:
    return Panel(title, about, tuple(Query(*query) for query in queries), unit)


def number(title: str, about: str, expr: str, unit: str = "short") -> Panel:
    return Panel(title, about, (Query(expr),), unit, is_number=True)


def rate(metric: str, by: str = "") -> str:
    grouped = f"sum by ({by}) " if by else "sum"
    return f"{grouped}(rate({metric}{WINDOW}))"


def quantile(share: float, histogram: str, by: str = "") -> str:
    labels = f"le, {by}" if by else "le"
    return f"histogram_quantile({share}, sum by ({labels}) (rate({histogram}_bucket{WINDOW})))"


def mean(histogram: str) -> str:
    return f"{rate(histogram + '_sum')} / {rate(histogram + '_count')}"


def spread(title: str, about: str, histogram: str, unit: str = "s") -> Panel:
    """Median and 95th percentile."""
    return lines(title, about, (quantile(0.5, histogram), "p50"), (quantile(0.95, histogram), "p95"), unit=unit)


RUN = Section(
    "Run",
    (
        number("Step", "Of the newest published version.", "max(penstock_learner_steps_total)"),
        number("Policy version", "Newest published.", 'max(penstock_policy_version{component="learner"})'),
        number("Serving servers", "READY or LOADING.", 'sum(penstock_rollout_servers{state=~"READY|LOADING"})'),
        number("Conservation error", "Must be 0.", "max(abs(penstock_conservation_error))"),
        lines("State", "1 for the state that the run is in.", ("max by (state) (penstock_run_state)", "{{state}}")),
        lines(
            "Build",
            "Version and placement.",
            ("max by (placement, version) (penstock_build_info)", "{{placement}} {{version}}"),
        ),
        lines("Reward", "Mean reward in the last batch.", ("avg by (env) (penstock_reward_mean)", "{{env}}")),
        lines(
            "Evaluations", "Newest finished evaluation.", ("max by (benchmark) (penstock_eval_score)", "{{benchmark}}")
        ),
        lines(
            "Policy versions",
            "What the learner published and servers serve.",
            ('max(penstock_policy_version{component="learner"})', "learner"),
            ('min(penstock_policy_version{component="rollout"})', "slowest server"),
        ),
        lines("Trained tokens", "Tokens a second.", (rate("penstock_learner_tokens_total", "kind"), "{{kind}}")),
    ),
)

QUEUE = Section(
    "Queue",
    (
        lines(
            "Waiting",
            "Prompts for servers, groups for the learner.",
            ("max by (queue) (penstock_queue_depth)", "{{queue}}"),
        ),
        lines(
            "Handed out", "Leased prompts, delivered groups.", ("max by (queue) (penstock_queue_pending)", "{{queue}}")
        ),
        lines(
            "Bytes",
            "Ready groups, and where producers wait.",
            ("max(penstock_queue_bytes)", "bytes"),
            ("max(penstock_queue_capacity_bytes)", "capacity"),
            unit="bytes",
        ),
        lines(
            "Oldest",
            "How long the next in line has waited.",
            ("max by (queue) (penstock_queue_oldest_age_seconds)", "{{queue}}"),
            unit="s",
        ),
        lines(
            "Admission",
            "What may be admitted now, and the bound of all.",
            ("max(penstock_queue_admission_room)", "room"),
            ("max(penstock_queue_admission_limit)", "limit"),
        ),
        lines(
            "Flow",
            "Groups a second.",
            (rate("penstock_admitted_total"), "admitted"),
            (rate("penstock_inserted_total"), "handed in"),
            (rate("penstock_trained_total"), "committed"),
        ),
        lines(
            "Staleness",
            "Versions between sampling and training.",
            (mean("penstock_trajectory_staleness_versions"), "mean"),
            (quantile(0.95, "penstock_trajectory_staleness_versions"), "p95"),
            ("max(penstock_staleness_limit_versions)", "bound"),
        ),
        lines(
            "Samples per insert", "Groups trained for each handed in.", ("max(penstock_queue_samples_per_insert)", "")
        ),
    ),
)

GATEWAY = Section(
    "Gateway",
    (
        lines(
            "Requests",
            "A second, by code.",
            (rate("penstock_gateway_requests_total", "protocol, code"), "{{protocol}} {{code}}"),
        ),
        lines(
            "Time to answer",
            "99th percentile by protocol.",
            (quantile(0.99, "penstock_gateway_request_duration_seconds", "protocol"), "{{protocol}}"),
            unit="s",
        ),
        lines(
            "In flight",
            "Requests being served.",
            ("sum by (protocol) (penstock_gateway_inflight_requests)", "{{protocol}}"),
        ),
    ),
)

GENERATION = Section(
    "Generation",
    (
        lines(
            "Groups at once",
            "Being generated, and the limit, by server.",
            ("sum by (instance) (penstock_rollout_inflight)", "{{instance}}"),
            ("sum by (instance) (penstock_rollout_concurrency_limit)", "limit {{instance}}"),
        ),
        lines("Groups", "Handed in a second.", (rate("penstock_groups_produced_total", "env"), "{{env}}")),
        lines(
            "Samples",
            "Generated and scored a second.",
            (rate("penstock_trajectories_produced_total", "env"), "{{env}}"),
        ),
        spread("Group duration", "From lease to hand-in.", "penstock_rollout_episode_duration_seconds"),
        spread("Response length", "Tokens.", "penstock_rollout_response_tokens", unit="short"),
        lines(
            "Truncated",
            "Responses cut, of all samples.",
            (
                f"{rate('penstock_rollout_truncated_total')} / {rate('penstock_trajectories_produced_total')}",
                "responses",
            ),
            (rate("penstock_rollout_prompts_truncated_total"), "prompts a second"),
            unit="percentunit",
        ),
        lines("Turns", "Assistant turns of a sample.", (mean("penstock_rollout_turns"), "mean")),
        lines(
            "Version span",
            "Versions within one trajectory, minus one.",
            (mean("penstock_trajectory_version_span"), "mean"),
            (quantile(0.95, "penstock_trajectory_version_span"), "p95"),
        ),
        lines(
            "Version served",
            "By server.",
            ('max by (instance) (penstock_policy_version{component="rollout"})', "{{instance}}"),
        ),
    ),
)

STANDSTILL = Section(
    "What holds servers up",
    (
        lines(
            "Paused",
            "Share of the time in which decoding stood still.",
            (rate("penstock_rollout_paused_seconds_total", "reason"), "{{reason}}"),
            unit="percentunit",
        ),
        lines(
            "Waiting for room",
            "Seconds a second, over all groups.",
            (rate("penstock_rollout_append_wait_seconds_total"), ""),
            unit="s",
        ),
        lines(
            "Given back",
            "Prompts a second, by reason.",
            ("sum by (reason) (rate(penstock_rollout_failures_total[$__rate_interval])) or vector(0)", "{{reason}}"),
        ),
        lines(
            "Outbox",
            "Groups that no checkpoint covers.",
            ("sum by (instance) (penstock_rollout_outbox_groups)", "{{instance}}"),
        ),
        lines("Servers", "By state.", ("sum by (state) (penstock_rollout_servers)", "{{state}}")),
    ),
)

REWARDS = Section(
    "Rewards and tools",
    (
        spread("Reward duration", "Scoring one group.", "penstock_reward_duration_seconds"),
        lines("Reward errors", "A second, by kind.", (rate("penstock_reward_errors_total", "kind"), "{{kind}}")),
        lines(
            "Tool calls",
            "A second, by result.",
            ("sum by (result) (rate(penstock_tool_calls_total[$__rate_interval])) or vector(0)", "{{result}}"),
        ),
        spread("Tool duration", "One call.", "penstock_tool_duration_seconds"),
    ),
)

LEARNER = Section(
    "Learner",
    (
        spread("Step duration", "Waiting for data included.", "penstock_learner_step_duration_seconds"),
        lines(
            "Phases",
            "Share of the time.",
            (rate("penstock_learner_phase_seconds_total", "phase"), "{{phase}}"),
            unit="percentunit",
        ),
        lines("Steps", "A minute.", (f"60 * {rate('penstock_learner_steps_total')}", "")),
        lines("Tokens", "A second.", (rate("penstock_learner_tokens_total", "kind"), "{{kind}}")),
        lines(
            "MFU",
            "Model FLOPs over what the devices can do; 0 where that is not known.",
            ("max(penstock_learner_mfu_ratio)", ""),
            unit="percentunit",
        ),
        lines(
            "Memory peak",
            "By policy rank.",
            ("max by (rank) (penstock_learner_memory_peak_bytes)", "rank {{rank}}"),
            unit="bytes",
        ),
        lines(
            "Non-finite steps",
            "Skipped in the last hour.",
            ("sum(increase(penstock_learner_nonfinite_steps_total[1h]))", ""),
        ),
        lines(
            "Role restarts",
            "In the last hour, after a rank died or hung.",
            ("sum by (role) (increase(penstock_learner_role_restarts_total[1h]))", "{{role}}"),
        ),
        lines("Since the last step", "", ("time() - max(penstock_learner_last_step_timestamp_seconds)", ""), unit="s"),
    ),
)

ALGORITHM = Section(
    "Algorithm",
    (
        lines("Loss", "By term.", ("max by (term) (penstock_algo_loss)", "{{term}}")),
        lines("KL", "Nats a token.", ("max by (against) (penstock_algo_kl_nats)", "{{against}}")),
        lines("Entropy", "Nats a token.", ("max(penstock_algo_entropy_nats)", "")),
        lines(
            "Gradient norm",
            "Before clipping.",
            ("max(penstock_algo_grad_norm)", "policy"),
            ("max(penstock_algo_critic_grad_norm)", "critic"),
        ),
        lines(
            "Values",
            "The critic, where there is one: variance of the returns that it explains, tokens whose value was clipped.",
            ("max(penstock_algo_value_explained_variance)", "explained"),
            ("max(penstock_algo_critic_clip_ratio)", "clipped"),
            unit="percentunit",
        ),
        lines(
            "Clipped",
            "Share of trained tokens.",
            ("max by (side) (penstock_algo_clip_ratio)", "{{side}}"),
            unit="percentunit",
        ),
        lines(
            "Importance ratio",
            "Policy over behaviour policy, by token.",
            (quantile(0.05, "penstock_algo_importance_ratio"), "p5"),
            (quantile(0.5, "penstock_algo_importance_ratio"), "p50"),
            (quantile(0.95, "penstock_algo_importance_ratio"), "p95"),
            (mean("penstock_algo_importance_ratio"), "mean"),
        ),
        lines(
            "Off-policy",
            "Tokens whose weight was cut, tokens left out; effective samples.",
            ("max(penstock_algo_is_truncated_ratio)", "truncated"),
            ("max(penstock_algo_is_rejected_ratio)", "rejected"),
            ("max(penstock_algo_effective_sample_ratio)", "effective"),
            unit="percentunit",
        ),
        lines(
            "Groups without spread",
            "All rewards equal, or one sample only.",
            ("max(penstock_algo_zero_advantage_group_ratio)", "equal"),
            ("max(penstock_algo_singleton_group_ratio)", "one sample"),
            unit="percentunit",
        ),
        lines(
            "Log-prob mismatch",
            "Learner and engine on the same weights, nats.",
            ("max(penstock_algo_logprob_mismatch_nats)", ""),
        ),
        lines("Reward", "Mean reward in the last batch.", ("avg by (env) (penstock_reward_mean)", "{{env}}")),
    ),
)

WEIGHTS = Section(
    "Weights",
    (
        lines(
            "Push duration",
            "95th percentile by phase.",
            (quantile(0.95, "penstock_weight_sync_duration_seconds", "transport, phase"), "{{transport}} {{phase}}"),
            unit="s",
        ),
        lines(
            "Pushes",
            "Members a minute, by result.",
            (f"60 * {rate('penstock_weight_syncs_total', 'result')}", "{{result}}"),
        ),
        lines("Bytes", "A second, over all members.", (rate("penstock_weight_sync_bytes_total"), ""), unit="Bps"),
        lines(
            "Since the last push",
            "",
            ("time() - max(penstock_weight_sync_last_success_timestamp_seconds)", ""),
            unit="s",
        ),
    ),
)

PARTS = Section(
    "Parts",
    (
        lines(
            "Targets",
            "1 where a scrape succeeds.",
            ('min by (job, instance) (up{job=~"penstock-.*"})', "{{job}} {{instance}}"),
        ),
        lines(
            "Heartbeats",
            "Since the last sign of life.",
            ("max by (component) (penstock_heartbeat_age_seconds)", "{{component}}"),
            unit="s",
        ),
        lines(
            "Restarts",
            "In the last hour.",
            ("sum by (component) (increase(penstock_component_restarts_total[1h]))", "{{component}}"),
        ),
        lines(
            "Recovery",
            "95th percentile in the last hour; 0 where nothing had to recover.",
            (
                "histogram_quantile(0.95,"
                " sum by (le, component) (increase(penstock_recovery_duration_seconds_bucket[1h]))) > 0"
                " or 0 * sum by (component) (penstock_recovery_duration_seconds_count)",
                "{{component}}",
            ),
            unit="s",
        ),
        lines("Alerts", "That fire.", ('count(ALERTS{alertstate="firing"}) or vector(0)', "")),
    ),
)

DURABILITY = Section(
    "Durability",
    (
        lines(
            "Since the last checkpoint",
            "",
            ("time() - max(penstock_checkpoint_last_success_timestamp_seconds)", ""),
            unit="s",
        ),
        spread("Checkpoint duration", "Commit included.", "penstock_checkpoint_duration_seconds"),
        lines(
            "Dropped",
            "Groups in the last hour, by reason.",
            ("sum by (reason) (increase(penstock_expired_total[1h]))", "expired {{reason}}"),
            ("sum by (reason) (increase(penstock_dead_lettered_total[1h]))", "dead {{reason}}"),
        ),
        lines(
            "Repeated",
            "In the last hour.",
            ("sum(increase(penstock_redelivered_total[1h]))", "groups delivered again"),
            ("sum(increase(penstock_reclaimed_total[1h]))", "leases that ran out"),
        ),
        lines("Conservation error", "Must be 0.", ("max(penstock_conservation_error)", "")),
    ),
)

BOARDS = (
    Board("overview", "Penstock overview", (RUN, QUEUE, GATEWAY)),
    Board("rollout", "Penstock rollout", (GENERATION, STANDSTILL, REWARDS)),
    Board("learner", "Penstock learner and algorithm", (LEARNER, ALGORITHM)),
    Board("reliability", "Penstock reliability", (PARTS, WEIGHTS, DURABILITY)),
)
