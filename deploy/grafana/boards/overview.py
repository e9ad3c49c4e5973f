"""The whole run: progress, the queue, the gateway."""

from __future__ import annotations

from panel import Board, Section, lines, mean, number, quantile, rate

RUN = Section(
    "Run",
    (
        number("Steps", "Steps since the learner was started.", "max(penstock_learner_steps_total)"),
        number(
            "Policy version",
            "Newest version that the learner published.",
            'max(penstock_policy_version{component="learner"})',
        ),
        number(
            "Serving servers",
            "Servers that are READY or LOADING.",
            'sum(penstock_rollout_servers{state=~"READY|LOADING"})',
        ),
        number(
            "Conservation error", "Groups lost or counted twice. Must be 0.", "max(abs(penstock_conservation_error))"
        ),
        lines(
            "State",
            "1 for the current state of the run, 0 for the others.",
            ("max by (state) (penstock_run_state)", "{{state}}"),
        ),
        lines(
            "Build",
            "Version of Penstock and placement of the learner.",
            ("max by (placement, version) (penstock_build_info)", "{{placement}} {{version}}"),
        ),
        lines("Reward", "Mean reward in the last batch.", ("avg by (env) (penstock_reward_mean)", "{{env}}")),
        lines(
            "Evaluations",
            "Score of the newest finished evaluation.",
            ("max by (benchmark) (penstock_eval_score)", "{{benchmark}}"),
        ),
        lines(
            "Policy versions",
            "Version that the learner published, and the oldest one that a server serves.",
            ('max(penstock_policy_version{component="learner"})', "learner"),
            ('min(penstock_policy_version{component="rollout"})', "slowest server"),
        ),
        lines("Trained tokens", "Tokens per second.", (rate("penstock_learner_tokens_total", "kind"), "{{kind}}")),
    ),
)

QUEUE = Section(
    "Queue",
    (
        lines(
            "Waiting",
            "Prompts that wait for a server, and groups that wait for the learner.",
            ("max by (queue) (penstock_queue_depth)", "{{queue}}"),
        ),
        lines(
            "Handed out",
            "Prompts leased to servers, and groups delivered to the learner.",
            ("max by (queue) (penstock_queue_in_flight)", "{{queue}}"),
        ),
        lines(
            "Bytes",
            "Size of the ready groups. At the capacity, producers wait.",
            ("max(penstock_queue_bytes)", "bytes"),
            ("max(penstock_queue_capacity_bytes)", "capacity"),
            unit="bytes",
        ),
        lines(
            "Oldest",
            "How long the oldest entry has waited.",
            ("max by (queue) (penstock_queue_oldest_age_seconds)", "{{queue}}"),
            unit="s",
        ),
        lines(
            "Admission",
            "Groups that may be admitted now, and the upper bound.",
            ("max(penstock_queue_admission_room)", "room"),
            ("max(penstock_queue_admission_limit)", "limit"),
        ),
        lines(
            "Flow",
            "Groups per second.",
            (rate("penstock_admitted_total"), "admitted"),
            (rate("penstock_inserted_total"), "appended"),
            (rate("penstock_trained_total"), "committed"),
        ),
        lines(
            "Staleness",
            "Policy versions between sampling and training.",
            (mean("penstock_trajectory_staleness_versions"), "mean"),
            (quantile(0.95, "penstock_trajectory_staleness_versions"), "p95"),
            ("max(penstock_staleness_limit_versions)", "bound"),
        ),
        lines(
            "Samples per insert", "Groups trained per group appended.", ("max(penstock_queue_samples_per_insert)", "")
        ),
    ),
)

GATEWAY = Section(
    "Gateway",
    (
        lines(
            "Requests",
            "Requests per second, by status code.",
            (rate("penstock_gateway_requests_total", "protocol, code"), "{{protocol}} {{code}}"),
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
        ),
        lines(
            "API keys",
            "Keys that are valid, and files of keys that cannot be used.",
            ("min(penstock_gateway_api_keys)", "valid"),
            ("max(penstock_gateway_broken_key_files)", "broken files"),
        ),
    ),
)

BOARD = Board("overview", "Penstock overview", (RUN, QUEUE, GATEWAY))
