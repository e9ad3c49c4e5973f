"""Rollout servers: generation, engines, waiting, rewards and tools."""

from __future__ import annotations

from panel import SERVER, WINDOW, Board, Section, by_server, lines, mean, or_zero, quantile, rate, run_wide, spread

GENERATION = Section(
    "Generation",
    (
        lines(
            "Groups at once",
            "Groups that a server generates at once, and its limit.",
            (by_server(f"sum by ({SERVER}) (penstock_rollout_inflight)"), "{{server}}"),
            (by_server(f"sum by ({SERVER}) (penstock_rollout_concurrency_limit)"), "limit {{server}}"),
            unit="suffix:groups",
            opens=("rollout/Requests in the engine",),
            alerts=("LearnerStarved",),
        ),
        lines(
            "Groups",
            "Groups appended per second.",
            (rate("penstock_groups_produced_total", "env"), "{{env}}"),
            unit="suffix:groups/s",
        ),
        lines(
            "Groups by server",
            "Groups appended per second, by server.",
            (by_server(rate("penstock_groups_produced_total", SERVER)), "{{server}}"),
            unit="suffix:groups/s",
        ),
        lines(
            "Groups by pool",
            "Groups appended per second, by pool of the chart's `rollout.pools`.",
            (rate("penstock_groups_produced_total", "pool"), "{{pool}}"),
            unit="suffix:groups/s",
            opens=("rollout/Groups by server",),
        ),
        lines(
            "Samples",
            "Samples generated and scored per second.",
            (rate("penstock_trajectories_produced_total", "env"), "{{env}}"),
            unit="suffix:samples/s",
        ),
        spread(
            "Group duration",
            "Time from the lease of a prompt to its group in the queue.",
            "penstock_rollout_episode_duration_seconds",
            opens=("rollout/Group duration by server",),
        ),
        lines(
            "Group duration by server",
            "95th percentile of the time from the lease of a prompt to its group in the queue, by server.",
            (by_server(quantile(0.95, "penstock_rollout_episode_duration_seconds", SERVER)), "{{server}}"),
            unit="s",
            opens=("rollout/Time per token", "rollout/Reward duration by server"),
        ),
        spread("Response length", "Tokens per response.", "penstock_rollout_response_tokens", unit="suffix:tokens"),
        lines(
            "Truncated",
            "Share of samples whose response was cut off.",
            (
                f"{rate('penstock_rollout_truncated_total')} / {rate('penstock_trajectories_produced_total')}",
                "responses",
            ),
            unit="percentunit",
            limits={0.5: "orange", 0.9: "red"},
        ),
        lines(
            "Truncated prompts",
            "Prompts per second that were cut to rollout.prompt.max_tokens.",
            (rate("penstock_rollout_prompts_truncated_total"), "prompts"),
            unit="suffix:prompts/s",
        ),
        lines("Turns", "Assistant turns per sample.", (mean("penstock_rollout_turns"), "mean"), unit="suffix:turns"),
        lines(
            "Version span",
            "Policy versions within one trajectory, minus one.",
            (mean("penstock_trajectory_version_span"), "mean"),
            (quantile(0.95, "penstock_trajectory_version_span"), "p95"),
            unit="suffix:versions",
        ),
        lines(
            "Version served",
            "Policy version, by server.",
            (by_server(f'max by ({SERVER}) (penstock_policy_version{{component="rollout"}})'), "{{server}}"),
            unit="none",
            opens=("reliability/Pushes",),
            alerts=("PolicyVersionSkew",),
        ),
    ),
)


def _engine(vllm: str, sglang: str) -> str:
    """PromQL: an expression over vLLM's metrics, or the one over SGLang's, whichever the server has. Both have the
    labels SERVER."""
    return by_server(f"{vllm} or {sglang}")


def _of_engine(metric: str, how: str = "sum") -> str:
    return f"{how} by ({SERVER}) ({metric})"


def _slowest(histogram: str) -> str:
    """PromQL: 95th percentile of a histogram that both engines have."""
    return _engine(*(quantile(0.95, f"{engine}:{histogram}", SERVER) for engine in ("vllm", "sglang")))


ENGINE = Section(
    "Engines (vLLM and SGLang)",
    (
        lines(
            "KV cache",
            "Share of the KV cache that is in use, by server. A full cache preempts requests.",
            (
                _engine(_of_engine("vllm:kv_cache_usage_perc", "max"), _of_engine("sglang:token_usage", "max")),
                "{{server}}",
            ),
            unit="percentunit",
            limits={0.95: "orange"},
            opens=("rollout/Preemptions", "rollout/Requests in the engine"),
        ),
        lines(
            "Requests in the engine",
            "Requests that are being decoded, and requests that wait in the engine's queue, by server.",
            (
                _engine(_of_engine("vllm:num_requests_running"), _of_engine("sglang:num_running_reqs")),
                "running {{server}}",
            ),
            (
                _engine(_of_engine("vllm:num_requests_waiting"), _of_engine("sglang:num_queue_reqs")),
                "waiting {{server}}",
            ),
            unit="suffix:requests",
            opens=("rollout/KV cache",),
        ),
        lines(
            "Preemptions",
            "Requests per second whose cache was dropped and has to be computed again, by server.",
            (
                _engine(
                    rate("vllm:num_preemptions_total", SERVER), rate("sglang:num_retracted_requests_total", SERVER)
                ),
                "{{server}}",
            ),
            unit="suffix:requests/s",
            limits={1: "orange"},
            opens=("rollout/KV cache",),
        ),
        lines(
            "Prefix hits",
            "Share of prompt tokens that were found in the prefix cache, by server. The samples of a group share their "
            "prompt; a new version of the policy finds nothing of an older one.",
            (
                _engine(
                    f"{rate('vllm:prefix_cache_hits_total', SERVER)} / "
                    f"{rate('vllm:prefix_cache_queries_total', SERVER)}",
                    _of_engine("sglang:cache_hit_rate", "max"),
                ),
                "{{server}}",
            ),
            unit="percentunit",
        ),
        lines(
            "Generated tokens",
            "Tokens per second, by server.",
            (
                _engine(rate("vllm:generation_tokens_total", SERVER), rate("sglang:generation_tokens_total", SERVER)),
                "{{server}}",
            ),
            unit="suffix:tokens/s",
        ),
        lines(
            "Time per token",
            "95th percentile of the time between two tokens of a response, by server.",
            (_slowest("inter_token_latency_seconds"), "{{server}}"),
            unit="s",
        ),
        lines(
            "Time to first token",
            "95th percentile of the time from a request to its first token, with its wait in the engine, by server.",
            (_slowest("time_to_first_token_seconds"), "{{server}}"),
            unit="s",
            opens=("rollout/Requests in the engine",),
        ),
    ),
)

_GENERATING = rate("penstock_rollout_generating_seconds_total", SERVER)
_PAUSED = rate("penstock_rollout_paused_seconds_total", SERVER)

WAITING = Section(
    "Waiting servers",
    (
        lines(
            "GPU busy",
            "Share of the time in which the engine had a request and was not paused, by server. NVIDIA's DCGM exporter "
            "has the figure of the hardware: DCGM_FI_PROF_SM_ACTIVE.",
            (by_server(f"clamp_min({_GENERATING} - {_PAUSED}, 0)"), "{{server}}"),
            unit="percentunit",
            limits={0: "orange", 0.8: "green"},
            opens=("overview/Waiting", "rollout/Paused"),
        ),
        lines(
            "Paused",
            "Share of the time in which decoding was paused, by reason and server.",
            (
                by_server(f"sum by ({SERVER}, reason) (rate(penstock_rollout_paused_seconds_total{WINDOW}))"),
                "{{server}} {{reason}}",
            ),
            unit="percentunit",
            limits={0.2: "orange"},
            opens=("reliability/Push duration",),
        ),
        lines(
            "Waiting for room",
            "Seconds per second that groups wait for room in the queue, summed over all groups of a server.",
            (by_server(rate("penstock_rollout_append_wait_seconds_total", SERVER)), "{{server}}"),
            unit="s",
            limits={0.5: "orange"},
            opens=("overview/Bytes",),
            alerts=("RolloutBackpressured",),
        ),
        lines(
            "Given back",
            "Prompts given back per second, by reason.",
            (or_zero(rate("penstock_rollout_failures_total", "reason")), "{{reason}}"),
            unit="suffix:prompts/s",
            alerts=("LeasingPaused",),
        ),
        lines(
            "Outbox",
            "Finished groups that no checkpoint covers yet.",
            (by_server(f"sum by ({SERVER}) (penstock_rollout_outbox_groups)"), "{{server}}"),
            unit="suffix:groups",
            opens=("reliability/Since the last checkpoint",),
        ),
        lines(
            "Servers",
            "Number of servers, by state.",
            (run_wide("penstock_rollout_servers", "state"), "{{state}}"),
            unit="suffix:servers",
            alerts=("RolloutServersDown",),
        ),
        lines(
            "Engines",
            "Number of servers, by engine and, with the chart's `rollout.pools`, by pool.",
            ("count by (engine, pool) (penstock_rollout_info)", "{{engine}} {{pool}}"),
            unit="suffix:servers",
            opens=("rollout/Groups by pool",),
        ),
    ),
)

_CALLS = rate("penstock_tool_calls_total", "tool")
_OK_CALLS = rate('penstock_tool_calls_total{result="ok"}', "tool")

REWARDS = Section(
    "Rewards and tools",
    (
        spread(
            "Reward duration",
            "Time to score one group.",
            "penstock_reward_duration_seconds",
            opens=("rollout/Reward duration by server",),
        ),
        lines(
            "Reward duration by server",
            "95th percentile of the time to score one group, by server.",
            (by_server(quantile(0.95, "penstock_reward_duration_seconds", SERVER)), "{{server}}"),
            unit="s",
        ),
        lines(
            "Reward errors",
            "Errors per second, by kind.",
            (rate("penstock_reward_errors_total", "kind"), "{{kind}}"),
            unit="suffix:errors/s",
            opens=("rollout/Reward errors by server", "learner/Lost samples"),
            alerts=("RewardErrors",),
        ),
        lines(
            "Reward errors by server",
            "Share of the samples whose reward failed, by server.",
            (
                by_server(
                    f"{rate('penstock_reward_errors_total', SERVER)} / "
                    f"{rate('penstock_trajectories_produced_total', SERVER)}"
                ),
                "{{server}}",
            ),
            unit="percentunit",
            limits={0.01: "orange", 0.5: "red"},
            alerts=("RewardErrors",),
        ),
        lines(
            "Tool calls",
            "Calls per second, by result.",
            (or_zero(rate("penstock_tool_calls_total", "result")), "{{result}}"),
            unit="suffix:calls/s",
            opens=("rollout/Tool errors",),
        ),
        lines(
            "Tool errors",
            "Share of calls with another result than ok, by tool. 0 without tools.",
            (or_zero(f"1 - ({_OK_CALLS} or 0 * {_CALLS}) / {_CALLS}"), "{{tool}}"),
            unit="percentunit",
            limits={0.1: "orange", 0.5: "red"},
        ),
        spread("Tool duration", "Time of one call.", "penstock_tool_duration_seconds"),
        lines(
            "Saved tokens",
            "Tokens of unfinished samples per second: saved, continued by another server, and generated again.",
            (or_zero(rate("penstock_rollout_saved_tokens_total")), "saved"),
            (or_zero(rate("penstock_rollout_continued_tokens_total")), "continued"),
            (or_zero(rate("penstock_rollout_regenerated_tokens_total", "reason")), "again: {{reason}}"),
            unit="suffix:tokens/s",
        ),
    ),
)

BOARD = Board("rollout", "Penstock rollout", (GENERATION, ENGINE, WAITING, REWARDS))
