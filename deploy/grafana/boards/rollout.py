"""Rollout servers: generation, waiting, rewards and tools."""

from __future__ import annotations

from panel import Board, Section, lines, mean, quantile, rate, spread

GENERATION = Section(
    "Generation",
    (
        lines(
            "Groups at once",
            "Groups that a server generates at once, and its limit.",
            ("sum by (instance) (penstock_rollout_inflight)", "{{instance}}"),
            ("sum by (instance) (penstock_rollout_concurrency_limit)", "limit {{instance}}"),
        ),
        lines("Groups", "Groups appended per second.", (rate("penstock_groups_produced_total", "env"), "{{env}}")),
        lines(
            "Samples",
            "Samples generated and scored per second.",
            (rate("penstock_trajectories_produced_total", "env"), "{{env}}"),
        ),
        spread(
            "Group duration",
            "Time from the lease of a prompt to its group in the queue.",
            "penstock_rollout_episode_duration_seconds",
        ),
        spread("Response length", "Tokens per response.", "penstock_rollout_response_tokens", unit="short"),
        lines(
            "Truncated",
            "Share of samples whose response was cut off.",
            (
                f"{rate('penstock_rollout_truncated_total')} / {rate('penstock_trajectories_produced_total')}",
                "responses",
            ),
            (rate("penstock_rollout_prompts_truncated_total"), "prompts per second"),
            unit="percentunit",
        ),
        lines("Turns", "Assistant turns per sample.", (mean("penstock_rollout_turns"), "mean")),
        lines(
            "Version span",
            "Policy versions within one trajectory, minus one.",
            (mean("penstock_trajectory_version_span"), "mean"),
            (quantile(0.95, "penstock_trajectory_version_span"), "p95"),
        ),
        lines(
            "Version served",
            "Policy version, by server.",
            ('max by (instance) (penstock_policy_version{component="rollout"})', "{{instance}}"),
        ),
    ),
)

WAITING = Section(
    "Waiting servers",
    (
        lines(
            "Paused",
            "Share of the time in which decoding was paused, by reason.",
            (rate("penstock_rollout_paused_seconds_total", "reason"), "{{reason}}"),
            unit="percentunit",
        ),
        lines(
            "Waiting for room",
            "Seconds per second that groups wait for room in the queue, summed over all groups.",
            (rate("penstock_rollout_append_wait_seconds_total"), ""),
            unit="s",
        ),
        lines(
            "Given back",
            "Prompts given back per second, by reason.",
            ("sum by (reason) (rate(penstock_rollout_failures_total[$__rate_interval])) or vector(0)", "{{reason}}"),
        ),
        lines(
            "Outbox",
            "Finished groups that no checkpoint covers yet.",
            ("sum by (instance) (penstock_rollout_outbox_groups)", "{{instance}}"),
        ),
        lines("Servers", "Number of servers, by state.", ("sum by (state) (penstock_rollout_servers)", "{{state}}")),
    ),
)

REWARDS = Section(
    "Rewards and tools",
    (
        spread("Reward duration", "Time to score one group.", "penstock_reward_duration_seconds"),
        lines(
            "Reward errors", "Errors per second, by kind.", (rate("penstock_reward_errors_total", "kind"), "{{kind}}")
        ),
        lines(
            "Tool calls",
            "Calls per second, by result.",
            ("sum by (result) (rate(penstock_tool_calls_total[$__rate_interval])) or vector(0)", "{{result}}"),
        ),
        spread("Tool duration", "Time of one call.", "penstock_tool_duration_seconds"),
    ),
)

BOARD = Board("rollout", "Penstock rollout", (GENERATION, WAITING, REWARDS))
