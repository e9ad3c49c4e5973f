"""Sessions of agents."""

from __future__ import annotations

from penstock.client.responses.body import Metrics, ResponseBody
from penstock.client.responses.groups import Sampling


class SessionSummary(ResponseBody):
    """A session: OPEN, then REWARDED while it waits for its task or for room in the queue, then FINISHED, without its
    calls."""

    session_id: str
    state: str
    reward: float | None
    """None while it is open."""
    reward_parts: Metrics
    task_id: str
    """Empty: it belongs to no task."""
    num_calls: int
    num_bytes: int
    prompt_ids: tuple[int, ...]
    """Prompts of the groups that it became."""


class SessionPage(ResponseBody):
    sessions: tuple[SessionSummary, ...]
    next_page_token: str


class SessionNode(ResponseBody):
    """A call of a session. Where the request's bound is reached, its tokens are cut or left out: compare their number
    with `num_inserted` and `num_sampled`."""

    number: int
    parent: int | None
    """The call that this one continues, token by token. None: a path begins here."""
    server_id: str
    finish_reason: str
    sampling: Sampling
    finished_at_ms: int
    num_prompt_tokens: int
    num_inserted: int
    num_sampled: int
    inserted_token_ids: tuple[int, ...]
    """The part of the prompt that comes after the parent's tokens, such as messages and replies of tools."""
    inserted_tokens: tuple[str, ...]
    token_ids: tuple[int, ...]
    """What the engine sampled; so are `log_probs` and `policy_versions`."""
    tokens: tuple[str, ...]
    """Text of each token. It is empty, like `inserted_tokens`, if the gateway has no tokenizer."""
    log_probs: tuple[float, ...]
    policy_versions: tuple[int, ...]


class SessionPath(ResponseBody):
    """From a call that continues none to one that none continues. Each path is one trajectory."""

    calls: tuple[int, ...]
    trained_calls: tuple[int, ...]
    """Calls that are trained in this path. The others are trained in an earlier one."""
    num_trained_tokens: int
    reward: float | None


class Session(SessionSummary):
    """A session as a tree of its calls, in the order in which they were recorded."""

    calls: tuple[SessionNode, ...]
    paths: tuple[SessionPath, ...]


class RewardedSession(ResponseBody):
    """What a reward did. `is_waiting`: the session waits for the other sessions of its task."""

    prompt_ids: tuple[int, ...]
    replayed: bool
    is_waiting: bool
