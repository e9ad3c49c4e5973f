"""The whole run: whether it is well, its progress, the queue, the gateway."""

from __future__ import annotations

from panel import WINDOW, Board, Panel, Query, Section, lines, mean, or_zero, quantile, rate, run_wide, since, time_left

FINDINGS = {0: "green", 2: "orange", 3: "red"}
"""Colors of a finding: fine, a warning, a failure."""
STATES = {
    "running": "green", "finished": "green", "waiting": "blue", "created": "blue", "paused": "orange",
    "stopped": "orange", "failed": "red",
}  # fmt: skip
_STALENESS = "penstock_trajectory_staleness_versions"


def runs_out_next() -> str:
    """PromQL: the time left of everything that can be used up, with its name as the label `what`."""
    redis, disk = "penstock_redis_memory_used_bytes", "penstock_disk_free_bytes"
    memory, prompts = "penstock_host_memory_available_bytes", 'penstock_queue_depth{queue="prompts"}'
    found = (
        ("Redis' memory", "", time_left(f"(penstock_redis_memory_limit_bytes - {redis})", redis, "")),
        ("disk of $1", "folder", time_left(disk, disk, "-")),
        ("memory of $1", "instance", time_left(memory, memory, "-")),
        ("prompts", "", time_left(prompts, prompts, "-")),
    )
    named = (
        f'label_replace(min by (run{", " if label else ""}{label}) ({expr}), "what", "{what}", "{label}", "(.*)")'
        for what, label, expr in found
    )
    return f"sort(max by (run, what) ({' or '.join(named)}))"


WELL = Section(
    "Is it well?",
    (
        Panel(
            "Is it training?",
            "State of the run. It trains while it is running.",
            (Query("max by (run, state) (penstock_run_state) == 1", "{{run}} {{state}}"),),
            "none",
            look="name",
            colors=STATES,
            opens=("overview/State", "reliability/Heartbeats"),
            alerts=("LearnerStalled", "RunPausedItself", "RolloutServersDown", "RedisUnreachable"),
            width=5,
            height=5,
        ),
        Panel(
            "How fast?",
            "Mean time of a step, and the time since the last one.",
            (
                Query(mean("penstock_learner_step_duration_seconds", "run"), "{{run}} a step"),
                Query(since("penstock_learner_last_step_timestamp_seconds"), "{{run}} since the last"),
            ),
            "s",
            look="number",
            limits={600: "orange", 900: "red"},
            opens=("learner/Step duration", "learner/Phases", "overview/Trained tokens"),
            alerts=("LearnerStalled",),
            width=5,
            height=5,
        ),
        Panel(
            "How stale?",
            "Policy versions between sampling and training, and the bound. A run whose learner is the bottleneck is "
            "close to the bound: its queue is full.",
            (
                Query(mean(_STALENESS, "run"), "{{run}} mean"),
                Query("max by (run) (penstock_staleness_limit_versions)", "{{run}} bound"),
            ),
            "suffix:versions",
            look="number",
            opens=("overview/Staleness", "rollout/Version span", "learner/Off-policy"),
            alerts=("StalenessNearLimit", "PolicyVersionSkew"),
            width=5,
            height=5,
        ),
        Panel(
            "What is the bottleneck?",
            "What the run waits for most: the learner itself, groups, prompts, rewards, weights, admission (the "
            "staleness bound), kv_full (the KV cache) or engine (requests that wait in it).",
            (Query("max by (run, finding) (penstock_run_speed) > 0", "{{run}} {{finding}}"),),
            "none",
            look="name",
            limits=FINDINGS,
            opens=("learner/Phases", "rollout/Groups at once", "rollout/KV cache", "rollout/Waiting for room"),
            alerts=("LearnerStarved", "RolloutBackpressured"),
            width=5,
            height=5,
        ),
        Panel(
            "Is the reward rising?",
            "The trend of the newest steps, or why the reward does not rise.",
            (Query("max by (run, finding) (penstock_run_learning) > 0", "{{run}} {{finding}}"),),
            "none",
            look="name",
            limits=FINDINGS,
            opens=("overview/Reward", "learner/Groups without spread", "learner/Lost samples"),
            alerts=("RewardErrors", "EntropyCollapse", "KLDivergence"),
            width=4,
            height=5,
        ),
        Panel(
            "Firing alerts",
            "Names of the alerts that fire.",
            (
                Query(
                    'max by (run, alertname) (ALERTS{alertstate="firing"})'
                    ' or on () label_replace(vector(0), "alertname", "none", "", "")',
                    "{{run}} {{alertname}}",
                ),
            ),
            "none",
            look="name",
            limits={1: "red"},
            opens=("reliability/Alerts",),
            width=6,
            height=6,
        ),
        Panel(
            "Serving servers",
            "Servers that are READY or LOADING.",
            (
                Query(
                    'sum by (run) (max by (run, state) (penstock_rollout_servers{state=~"READY|LOADING"}))', "{{run}}"
                ),
            ),
            "suffix:servers",
            look="number",
            limits={0: "red", 1: "green"},
            opens=("rollout/Servers", "reliability/Restarts"),
            alerts=("RolloutServersDown",),
            width=4,
            height=6,
        ),
        Panel(
            "Failing rewards",
            "Share of samples whose reward failed: in the newest step, and since the servers started. Samples that "
            "fail before the first step, or while the run is paused, are in no step.",
            (
                Query("max by (run) (penstock_reward_failed_ratio)", "{{run}} newest step"),
                Query(
                    "sum by (run) (penstock_reward_errors_total) / sum by (run) (penstock_trajectories_produced_total)",
                    "{{run}} since the start",
                ),
            ),
            "percentunit",
            look="number",
            limits={0.01: "orange", 0.5: "red"},
            opens=("rollout/Reward errors", "rollout/Reward errors by server"),
            alerts=("RewardErrors", "RunPausedItself"),
            width=4,
            height=6,
        ),
        Panel(
            "What runs out next?",
            "Time until it is used up, if it goes on as in the last hour and the last minutes, shortest first. "
            "A week stands for no end in sight, and for less than a quarter of an hour of data.",
            (Query(runs_out_next(), "{{run}} {{what}}"),),
            "s",
            look="bars",
            limits={0: "red", 3600: "orange", 4 * 3600: "green"},
            opens=("reliability/Redis' memory", "reliability/Disk", "reliability/Host memory", "overview/Waiting"),
            alerts=("RedisMemoryRunsOut", "DiskRunsOut", "HostMemoryRunsOut", "DiskNearlyFull"),
            width=10,
            height=6,
        ),
    ),
)

_STEPS_LEFT = "(max(penstock_learner_num_steps) - max(penstock_learner_step))"
_STEP_S = mean("penstock_learner_step_duration_seconds").replace(WINDOW, "[1h]")

RUN = Section(
    "Run",
    (
        Panel(
            "Step",
            "Newest step of the run.",
            (Query("max(penstock_learner_step)"),),
            "none",
            look="number",
            width=4,
            height=4,
        ),
        Panel(
            "Progress",
            "Newest step over `learner.num_steps`. A run also ends with its dataset.",
            (Query("max(penstock_learner_step) / max(penstock_learner_num_steps)"),),
            "percentunit",
            look="number",
            width=5,
            height=4,
        ),
        Panel(
            "Time left",
            "Time until `learner.num_steps`, if steps take as long as in the last hour.",
            (Query(f"{_STEPS_LEFT} * {_STEP_S}"),),
            "s",
            look="number",
            width=5,
            height=4,
        ),
        Panel(
            "Policy version",
            "Newest version that the learner published.",
            (Query('max by (run) (penstock_policy_version{component="learner"})', "{{run}}"),),
            "none",
            look="number",
            opens=("overview/Policy versions",),
            width=5,
            height=4,
        ),
        Panel(
            "Conservation error",
            "Groups lost or counted twice. Must be 0.",
            (Query("max by (run) (abs(penstock_conservation_error))", "{{run}}"),),
            "suffix:groups",
            look="number",
            limits={1: "red"},
            alerts=("ConservationBroken",),
            width=5,
            height=4,
        ),
        lines(
            "State",
            "1 for the current state of the run, 0 for the others.",
            ("max by (state) (penstock_run_state)", "{{state}}"),
            ("max by (who) (penstock_run_paused)", "paused by the {{who}}"),
            unit="none",
            alerts=("RunPausedItself",),
        ),
        lines(
            "Reward",
            "Mean reward in the last batch, by data source, and the mean over an hour.",
            ("avg by (env) (penstock_reward_mean)", "{{env}}"),
            ("avg(avg_over_time(penstock_reward_mean[1h]))", "mean of an hour"),
            unit="none",
            opens=("learner/Reward spread", "learner/Reward parts"),
        ),
        lines(
            "Evaluations",
            "Score of the newest finished evaluation.",
            ("max by (benchmark) (penstock_eval_score)", "{{benchmark}}"),
            unit="none",
        ),
        lines(
            "Policy versions",
            "Version that the learner published, and the oldest one that a server serves which is not pinned.",
            ('max(penstock_policy_version{component="learner"})', "learner"),
            (
                'min(penstock_policy_version{component="rollout"}'
                " unless ignoring (component) penstock_policy_pinned == 1)",
                "slowest server",
            ),
            ("sum(penstock_policy_pinned)", "pinned servers"),
            ("max(penstock_rewinds_total)", "rewinds"),
            unit="none",
            opens=("rollout/Version served",),
            alerts=("PolicyVersionSkew", "WeightSyncFailing"),
        ),
        lines(
            "Trained tokens",
            "Tokens per second.",
            (rate("penstock_learner_tokens_total", "kind"), "{{kind}}"),
            unit="suffix:tokens/s",
            opens=("learner/MFU",),
        ),
        lines(
            "Build",
            "Version of Penstock and placement of the learner.",
            ("max by (placement, version) (penstock_build_info)", "{{placement}} {{version}}"),
            unit="none",
        ),
    ),
)

QUEUE = Section(
    "Queue",
    (
        lines(
            "Waiting",
            "Prompts that wait for a server, and groups that wait for the learner.",
            ("max by (queue) (penstock_queue_depth)", "{{queue}}"),
            unit="short",
            alerts=("LearnerStarved",),
        ),
        lines(
            "Handed out",
            "Prompts leased to servers, and groups delivered to the learner.",
            ("max by (queue) (penstock_queue_in_flight)", "{{queue}}"),
            unit="short",
        ),
        lines(
            "Bytes",
            "Size of the ready groups. At the capacity, producers wait.",
            ("max(penstock_queue_bytes)", "bytes"),
            ("max(penstock_queue_capacity_bytes)", "capacity"),
            unit="bytes",
            opens=("reliability/Redis' memory",),
            alerts=("RolloutBackpressured",),
        ),
        lines(
            "Oldest",
            "How long the oldest entry has waited.",
            ("max by (queue) (penstock_queue_oldest_age_seconds)", "{{queue}}"),
            unit="s",
            limits={900: "orange"},
            alerts=("QueueOld",),
        ),
        lines(
            "Admission",
            "Groups that may be admitted now, and the upper bound.",
            ("max(penstock_queue_admission_room)", "room"),
            ("max(penstock_queue_admission_limit)", "limit"),
            unit="suffix:groups",
        ),
        lines(
            "Flow",
            "Groups per second.",
            (run_wide(f"rate(penstock_admitted_total{WINDOW})"), "admitted"),
            (run_wide(f"rate(penstock_inserted_total{WINDOW})"), "appended"),
            (run_wide(f"rate(penstock_trained_total{WINDOW})"), "committed"),
            unit="suffix:groups/s",
            opens=("reliability/Dropped",),
        ),
        lines(
            "Staleness",
            "Policy versions between sampling and training. Close to the bound is normal while the learner is the "
            "bottleneck.",
            (mean(_STALENESS), "mean"),
            (quantile(0.95, _STALENESS), "p95"),
            ("max(penstock_staleness_limit_versions)", "bound"),
            unit="suffix:versions",
            opens=("rollout/Version span", "learner/Off-policy"),
            alerts=("StalenessNearLimit",),
        ),
        lines(
            "Samples per insert",
            "Groups trained per group appended.",
            ("max(penstock_queue_samples_per_insert)", ""),
            unit="none",
        ),
    ),
)

_HISTORY = rate("penstock_gateway_session_history_tokens_total")
_REQUESTS = rate("penstock_gateway_requests_total")
_FAILED = 'penstock_gateway_requests_total{code=~"5..|INTERNAL|UNAVAILABLE|DEADLINE_EXCEEDED"}'

GATEWAY = Section(
    "Gateway",
    (
        lines(
            "Requests",
            "Requests per second, by status code.",
            (rate("penstock_gateway_requests_total", "protocol, code"), "{{protocol}} {{code}}"),
            unit="reqps",
        ),
        lines(
            "Failed requests",
            "Share of requests that failed with an error of the server.",
            (f"({rate(_FAILED)} or 0 * {_REQUESTS}) / {_REQUESTS}", "failed"),
            unit="percentunit",
            limits={0.05: "orange"},
            alerts=("GatewayErrors",),
        ),
        lines(
            "Time to answer",
            "99th percentile, by protocol.",
            (quantile(0.99, "penstock_gateway_request_duration_seconds", "protocol"), "{{protocol}}"),
            unit="s",
        ),
        lines(
            "In flight",
            "Requests that are being served.",
            ("sum by (protocol) (penstock_gateway_inflight_requests)", "{{protocol}}"),
            unit="short",
        ),
        lines(
            "API keys",
            "Keys that are valid, and files of keys that cannot be used.",
            ("min(penstock_gateway_api_keys)", "valid"),
            ("max(penstock_gateway_broken_key_files)", "broken files"),
            unit="short",
            alerts=("GatewayKeysBroken",),
        ),
        lines(
            "Prefix cache of sessions",
            "Share of the history of session calls that their server has computed before.",
            (f"{rate('penstock_gateway_session_cached_tokens_total')} / {_HISTORY}", "hits"),
            unit="percentunit",
        ),
        lines(
            "Tasks of workers",
            "Sessions that tasks still want. Every gateway reports the same.",
            (run_wide("penstock_task_places", "state"), "{{state}}"),
            unit="short",
        ),
        lines(
            "Session calls",
            "Calls of sessions per second, by how they continue, and those that moved to another server.",
            (or_zero(rate("penstock_gateway_session_calls_total", "kind")), "{{kind}}"),
            (or_zero(rate("penstock_gateway_session_moved_calls_total")), "moved"),
            unit="suffix:calls/s",
        ),
        lines(
            "Open sessions and tasks",
            "Sessions with recorded calls, and tasks that have begun and are not complete.",
            (run_wide("penstock_sessions"), "sessions"),
            (run_wide("penstock_open_tasks"), "tasks"),
            unit="short",
        ),
        lines(
            "Tasks that ended",
            "Tasks, and sessions of tasks, that ended per second, by outcome.",
            (or_zero(run_wide(f"rate(penstock_tasks_ended_total{WINDOW})", "outcome")), "tasks {{outcome}}"),
            (
                or_zero(run_wide(f"rate(penstock_task_places_ended_total{WINDOW})", "outcome")),
                "sessions {{outcome}}",
            ),
            unit="suffix:/s",
        ),
        lines(
            "Memory of sessions and samples",
            "Calls of sessions and tokens of unfinished samples in Redis, and what gateways remember.",
            (run_wide("penstock_session_bytes"), "sessions in Redis"),
            (run_wide("penstock_queue_saved_bytes"), "saved tokens in Redis"),
            ("max(penstock_gateway_session_cache_bytes)", "a gateway"),
            unit="bytes",
        ),
    ),
)

BOARD = Board("overview", "Penstock overview", (WELL, RUN, QUEUE, GATEWAY))
