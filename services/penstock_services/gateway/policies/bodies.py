"""JSON of policies."""

from __future__ import annotations

from penstock.v1 import policies_pb2
from penstock_services.gateway.bodies import Body, Int64, Json, finite


class PinPolicyBody(Body):
    policy_version: Int64


def policy_to_json(policy: policies_pb2.Policy) -> Json:
    return {
        "policy_version": policy.policy_version,
        "step": policy.step,
        "parent_version": policy.parent_version if policy.HasField("parent_version") else None,
        "published_at_ms": policy.published_at_ms,
        "weights_digest": policy.weights_digest,
        "snapshot_path": policy.snapshot_path,
        "state": policies_pb2.Policy.State.Name(policy.state),
        "metrics": finite(dict(policy.metrics)),
        "server_ids": list(policy.server_ids),
        "is_held": policy.is_held,
        "pins": list(policy.pins),
    }


def policies_to_json(response: policies_pb2.ListPoliciesResponse) -> Json:
    return {
        "policies": [policy_to_json(policy) for policy in response.policies],
        "next_page_token": response.next_page_token,
    }


def comparison_to_json(comparison: policies_pb2.PolicyComparison) -> Json:
    return {
        "policy": policy_to_json(comparison.policy),
        "other": policy_to_json(comparison.other),
        "metric_changes": finite(dict(comparison.metric_changes)),
        "steps_between": comparison.steps_between,
        "same_weights": comparison.same_weights,
    }
