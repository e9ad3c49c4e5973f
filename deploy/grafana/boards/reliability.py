"""Reliability: heartbeats and restarts, weight pushes, checkpoints and drops."""

from __future__ import annotations

from panel import Board, Section, lines, quantile, rate, spread

PARTS = Section(
    "Parts",
    (
        lines(
            "Targets",
            "1 if the last scrape succeeded.",
            ('min by (job, instance) (up{job=~"penstock-.*"})', "{{job}} {{instance}}"),
        ),
        lines(
            "Heartbeats",
            "Time since the last heartbeat.",
            ("max by (component) (penstock_heartbeat_age_seconds)", "{{component}}"),
            unit="s",
        ),
        lines(
            "Restarts",
            "Restarts in the last hour.",
            ("sum by (component) (increase(penstock_component_restarts_total[1h]))", "{{component}}"),
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
        ),
        lines(
            "Quarantined servers",
            "Servers whose groups are not trained because their log-probs disagree with the learner's, and how many "
            "were put into quarantine in the last hour.",
            ("max(penstock_rollout_servers_quarantined)", "now"),
            ("sum(increase(penstock_learner_quarantines_total[1h]))", "last hour"),
        ),
        lines("Alerts", "Alerts that fire.", ('count(ALERTS{alertstate="firing"}) or vector(0)', "")),
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
        ),
        lines(
            "Pushes",
            "Pushes per minute to single servers, by result.",
            (f"60 * {rate('penstock_weight_syncs_total', 'result')}", "{{result}}"),
        ),
        lines(
            "Bytes", "Bytes per second, over all servers.", (rate("penstock_weight_sync_bytes_total"), ""), unit="Bps"
        ),
        lines(
            "Since the last push",
            "Time since the last successful push.",
            ("time() - max(penstock_weight_sync_last_success_timestamp_seconds)", ""),
            unit="s",
        ),
    ),
)

DURABILITY = Section(
    "Durability",
    (
        lines(
            "Disk",
            "Free space on the disk of the run's folder, and what two more checkpoints need.",
            ("min by (folder) (penstock_disk_free_bytes)", "{{folder}} free"),
            ("max by (folder) (penstock_disk_needed_bytes)", "{{folder}} needed"),
            ("max by (folder) (penstock_disk_size_bytes)", "{{folder}} size"),
            unit="bytes",
        ),
        lines(
            "Since the last checkpoint",
            "Time since the last durable checkpoint.",
            ("time() - max(penstock_checkpoint_last_success_timestamp_seconds)", ""),
            unit="s",
        ),
        spread(
            "Checkpoint duration",
            "Time to write a checkpoint and commit its groups.",
            "penstock_checkpoint_duration_seconds",
        ),
        lines(
            "Dropped",
            "Groups dropped in the last hour, by reason.",
            ("sum by (reason) (increase(penstock_expired_total[1h]))", "expired {{reason}}"),
            ("sum by (reason) (increase(penstock_dead_lettered_total[1h]))", "dead {{reason}}"),
        ),
        lines(
            "Repeated",
            "Groups and prompts delivered again in the last hour.",
            ("sum(increase(penstock_redelivered_total[1h]))", "groups delivered again"),
            ("sum(increase(penstock_reclaimed_total[1h]))", "leases that ran out"),
        ),
        lines(
            "Conservation error", "Groups lost or counted twice. Must be 0.", ("max(penstock_conservation_error)", "")
        ),
    ),
)

BOARD = Board("reliability", "Penstock reliability", (PARTS, WEIGHTS, DURABILITY))
