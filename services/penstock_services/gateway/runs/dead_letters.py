"""Dead letters of a run: prompts and groups that were put aside as unusable."""

from __future__ import annotations

from penstock.config.run import RunConfig
from penstock.replay.inspection import DeadLetter, QueueInspector
from penstock.replay.redis_queue import RedisReplayQueue
from penstock.replay.results import entry_order
from penstock.v1 import runs_pb2
from penstock_services.gateway import validation
from penstock_services.gateway.operations import AuditLog, operation

_LETTER_ID = r"[0-9]{1,19}-[0-9]{1,19}"


class DeadLetterHandlers:
    def __init__(self, config: RunConfig, audit: AuditLog, queue: RedisReplayQueue) -> None:
        self.config = config
        self.audit = audit
        self.inspector = QueueInspector(queue.client, config.run, config.replay)

    @operation("read")
    async def list_dead_letters(self, request: runs_pb2.ListDeadLettersRequest) -> runs_pb2.ListDeadLettersResponse:
        page_size = validation.checked_page_size(request.page_size)
        before = validation.decode_page_token("dead", request.page_token, _LETTER_ID)
        found: list[DeadLetter] = []
        async for letter in self.inspector.dead_letters(request.kind, newest_first=True):
            if before is None or entry_order(letter.stream_id) < entry_order(before):
                found.append(letter)
            if len(found) > page_size:
                break
        page = found[:page_size]
        token = validation.encode_page_token("dead", page[-1].stream_id) if len(found) > page_size else ""
        letters = [
            runs_pb2.DeadLetter(
                letter_id=letter.stream_id, prompt_id=letter.prompt_id, reason=letter.reason,
                buried_at_ms=letter.time_ms, prompt_bytes=letter.prompt_bytes, group_bytes=letter.group_bytes,
            )
            for letter in page
        ]  # fmt: skip
        reasons = await self.inspector.queue.dead_letter_reasons()
        return runs_pb2.ListDeadLettersResponse(dead_letters=letters, next_page_token=token, reasons=reasons)

    @operation("admin")
    async def requeue_dead_letter(
        self, request: runs_pb2.RequeueDeadLetterRequest
    ) -> runs_pb2.RequeueDeadLetterResponse:
        return runs_pb2.RequeueDeadLetterResponse(prompt_id=await self.inspector.requeue(request.letter_id))
