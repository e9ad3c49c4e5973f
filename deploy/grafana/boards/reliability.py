"""Reliability: heartbeats and restarts, weight pushes, checkpoints and drops."""

from __future__ import annotations

from panel import Board, Section, lines, quantile, rate, run_wide, since, spread

PARTS = Section(
    "Parts",
    (
        lines(
            "Targets",
            "1 if the last scrape succeeded.",
            ('min by (job, instance) (up{run!=""})', "{{job}} {{instance}}"),
            unit="none",
            limits={0: "red", 1: "green"},
            alerts=("TargetDown",),
        ),
        lines(
            "Heartbeats",
            "Time since the last heartbeat.",
            ("max by (component) (penstock_heartbeat_age_seconds)", "{{component}}"),
            unit="s",
            limits={60: "red"},
            alerts=("ComponentHeartbeatLost",),
        ),
        lines(
            "Restarts",
            "Restarts in the last hour.",
            (run_wide("increase(penstock_component_restarts_total[1h])", "component"), "{{component}}"),
            unit="suffix:restarts",
            limits={1: "orange"},
            opens=("learner/Role restarts",),
        ),
        lines(
            "Recovery",
            "95th percentile in the last hour. 0 if nothing had to recover.",
            (
                "histogram_quantile(0.95,"
                " sum by (le, component) (increase(penstock_recovery_duration_seconds_bucket[1h]))) > 0"
                " or 0 * sum by (component) (penstock_recovery_duration_seconds_count)",
                "{{component}}",
            ),
            unit="s",
        ),
        lines(
            "Paused servers",
            "Servers that lease nothing because everything that they tried failed.",
            ("max(penstock_rollout_servers_paused)", ""),
            unit="suffix:servers",
            limits={1: "red"},
            opens=("rollout/Given back",),
            alerts=("LeasingPaused",),
        ),
        lines(
            "Quarantined servers",
            "Servers whose groups are not trained because their log-probs disagree with the learner's, and how many "
            "were put into quarantine in the last hour.",
            ("max(penstock_rollout_servers_quarantined)", "now"),
            ("sum(increase(penstock_learner_quarantines_total[1h]))", "last hour"),
            unit="suffix:servers",
            limits={1: "red"},
            opens=("learner/Log-prob mismatch by server",),
            alerts=("ServerQuarantined",),
        ),
        lines(
            "Alerts",
            "Alerts that fire, by name.",
            (
                'max by (run, alertname) (ALERTS{alertstate="firing"})'
                ' or on () label_replace(vector(0), "alertname", "none", "", "")',
                "{{run}} {{alertname}}",
            ),
            unit="none",
            limits={1: "red"},
        ),
    ),
)

WEIGHTS = Section(
    "Weights",
    (
        lines(
            "Push duration",
            "95th percentile, by transport and phase.",
            (quantile(0.95, "penstock_weight_sync_duration_seconds", "transport, phase"), "{{transport}} {{phase}}"),
            unit="s",
            opens=("rollout/Paused",),
        ),
        lines(
            "Pushes",
            "Pushes per minute to single servers, by result.",
            (f"60 * {rate('penstock_weight_syncs_total', 'result')}", "{{result}}"),
            unit="suffix:pushes/min",
            opens=("overview/Policy versions",),
            alerts=("WeightSyncFailing",),
        ),
        lines(
            "Bytes", "Bytes per second, over all servers.", (rate("penstock_weight_sync_bytes_total"), ""), unit="Bps"
        ),
        lines(
            "Since the last push",
            "Time since the last successful push.",
            (since("penstock_weight_sync_last_success_timestamp_seconds"), "{{run}}"),
            unit="s",
        ),
    ),
)

_UPLOADED = "penstock_checkpoint_upload_last_success_timestamp_seconds"

DURABILITY = Section(
    "Durability",
    (
        lines(
            "Disk",
            "Free space on the disk of the run's folder, and what two more checkpoints need.",
            ("min by (job, folder) (penstock_disk_free_bytes)", "{{job}} {{folder}} free"),
            ("max by (job, folder) (penstock_disk_needed_bytes)", "{{job}} {{folder}} needed"),
            ("max by (job, folder) (penstock_disk_size_bytes)", "{{job}} {{folder}} size"),
            unit="bytes",
            opens=("overview/What runs out next?",),
            alerts=("DiskNearlyFull", "DiskRunsOut"),
        ),
        lines(
            "Redis' memory",
            "Memory that Redis uses, its limit, and what it will use in an hour if it grows as in the last half hour.",
            ("max(penstock_redis_memory_used_bytes)", "used"),
            ("clamp_min(max(predict_linear(penstock_redis_memory_used_bytes[30m], 3600)), 0)", "in an hour"),
            ("min(penstock_redis_memory_limit_bytes)", "limit"),
            unit="bytes",
            opens=("overview/What runs out next?", "overview/Bytes"),
            alerts=("RedisMemoryRunsOut",),
        ),
        lines(
            "Host memory",
            "Memory that the machine, or the container, of a process still has, and the smallest of them in an hour.",
            ("min by (job, instance) (penstock_host_memory_available_bytes)", "{{job}} {{instance}}"),
            (
                "clamp_min(min(predict_linear(penstock_host_memory_available_bytes[30m], 3600)), 0)",
                "smallest in an hour",
            ),
            ("min(penstock_host_memory_size_bytes)", "smallest machine"),
            unit="bytes",
            opens=("overview/What runs out next?", "learner/Memory peak"),
            alerts=("HostMemoryRunsOut",),
        ),
        lines(
            "Since the last checkpoint",
            "Time since the last durable checkpoint.",
            (since("penstock_checkpoint_last_success_timestamp_seconds"), "{{run}}"),
            unit="s",
            limits={3600: "orange", 5400: "red"},
            opens=("reliability/Checkpoint duration", "reliability/Disk"),
            alerts=("CheckpointStale",),
        ),
        spread(
            "Checkpoint duration",
            "Time to write a checkpoint and commit its groups.",
            "penstock_checkpoint_duration_seconds",
        ),
        lines(
            "Uploads",
            "Time since the last upload of a checkpoint, and the 95th percentile of its duration. 0 without uploads.",
            (f"{since(_UPLOADED)} or 0 * max by (run) ({_UPLOADED})", "{{run}} since the last"),
            (quantile(0.95, "penstock_checkpoint_upload_duration_seconds", "run"), "{{run}} duration"),
            unit="s",
            opens=("reliability/Failed uploads",),
            alerts=("CheckpointUploadFailing",),
        ),
        lines(
            "Failed uploads",
            "Calls of the object store per minute that failed. They are retried for `upload_timeout_s`.",
            (f"60 * {rate('penstock_checkpoint_upload_failures_total', 'run')}", "{{run}}"),
            unit="suffix:calls/min",
            limits={1: "orange"},
            alerts=("CheckpointUploadFailing",),
        ),
        lines(
            "Dropped",
            "Groups dropped in the last hour, by reason.",
            (run_wide("increase(penstock_expired_total[1h])", "reason"), "expired {{reason}}"),
            (run_wide("increase(penstock_dead_lettered_total[1h])", "reason"), "dead {{reason}}"),
            unit="suffix:groups",
            alerts=("DropsHigh",),
        ),
        lines(
            "Repeated",
            "Groups and prompts delivered again in the last hour.",
            (run_wide("increase(penstock_redelivered_total[1h])"), "groups delivered again"),
            (run_wide("increase(penstock_reclaimed_total[1h])"), "leases that ran out"),
            unit="short",
        ),
        lines(
            "Conservation error",
            "Groups lost or counted twice. Must be 0.",
            ("max(abs(penstock_conservation_error))", ""),
            unit="suffix:groups",
            limits={1: "red"},
            alerts=("ConservationBroken",),
        ),
    ),
)

BOARD = Board("reliability", "Penstock reliability", (PARTS, WEIGHTS, DURABILITY))
