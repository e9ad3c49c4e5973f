"""The one form of a conversation, and the message of an answer."""

from __future__ import annotations

from penstock.protocols.answers import Choice
from penstock.protocols.chat import token_log_probs
from penstock.protocols.conversation import AnswerMessage, Conversation, Message, ToolUse
from penstock.v1 import generate_pb2

CALL = ToolUse("call-1", "add", '{"a": 2, "b": 2}')
ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


def test_a_conversation_survives_the_wire() -> None:
    conversation = Conversation(
        (
            Message("system", "be brief"),
            Message("user", "2+2?", name="ann"),
            Message("assistant", "", (CALL, ToolUse("call-2", "add", '{"a": 1'))),
            Message("tool", "4", tool_call_id="call-1"),
            Message("assistant", "four", reasoning="2 and 2"),
        ),
        tools=(ADD,),
        tool_choice=generate_pb2.TOOL_CHOICE_NAMED,
        tool_name="add",
        single_tool_call=True,
        template_arguments={"enable_thinking": False},
    )
    request = generate_pb2.GenerateRequest()
    conversation.fill(request)
    assert (
        Conversation.from_request(generate_pb2.GenerateRequest.FromString(request.SerializeToString())) == conversation
    )
    plain = generate_pb2.GenerateRequest()
    Conversation((Message("user", "hi"),)).fill(plain)
    assert not plain.tools_json and not plain.template_arguments_json and not plain.messages[0].fields_json


def test_the_message_of_an_answer_is_what_a_client_sends_back() -> None:
    answer = AnswerMessage()
    part = generate_pb2.ToolCallPart
    answer.add(generate_pb2.GenerateChunk(text="I "))
    answer.add(generate_pb2.GenerateChunk(text="add", tool_calls=[part(index=0, call_id="call-1", name="add")]))
    answer.add(generate_pb2.GenerateChunk(tool_calls=[part(index=0, arguments='{"a": 2,')]))
    later = [part(index=0, arguments=' "b": 2}'), part(index=1, call_id="call-2", name="end", arguments="{}")]
    answer.add(generate_pb2.GenerateChunk(tool_calls=later))
    assert answer.message == Message("assistant", "I add", (CALL, ToolUse("call-2", "end", "{}")))


def test_bytes_of_a_part_of_a_character_are_not_made_up() -> None:
    """Half of an é decodes to a replacement character, whose bytes are others."""
    choice = Choice(0)
    choice.token_ids, choice.log_probs = [1, 2], [-0.5, -0.25]
    found = token_log_probs(choice, 0, 2, lambda ids: ["é", "\N{REPLACEMENT CHARACTER}"])
    assert [one["bytes"] for one in found] == [[0xC3, 0xA9], None]
