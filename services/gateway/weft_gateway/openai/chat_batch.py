"""`POST /v1/chat/completions/batch`: many chats in one request, as vLLM has it; their answers are the choices."""

from typing import Any

from pydantic import PrivateAttr

from weft_gateway.errors import ParameterError
from weft_gateway.openai.call import Call, Prompt
from weft_gateway.openai.chat import ChatEndpoint, echoed, prompt_of
from weft_gateway.openai.schema import ChatRequest, checked, naming, object_of
from weft_gateway.shell.request_ids import MAX_PROMPTS


class BatchedChats(ChatRequest):
    """The first chat, and all of them: they share every parameter but their messages."""

    _chats: list[ChatRequest] = PrivateAttr(default_factory=list[ChatRequest])

    @property
    def chats(self) -> list[ChatRequest]:
        return self._chats

    @property
    def prompts(self) -> int:
        return len(self._chats)

    @classmethod
    def of(cls, value: dict[str, Any]) -> "BatchedChats":
        """Check `value`, a chat whose messages are lists of messages. Raises ParameterError."""
        chats = value.get("messages")
        if not isinstance(chats, list) or not 0 < len(chats) <= MAX_PROMPTS:
            text = f"messages: must be a list of 1 to {MAX_PROMPTS} chats, each of which is a list of messages."
            raise ParameterError(text, param="messages")
        checked_chats: list[ChatRequest] = []
        for index, messages in enumerate(chats):
            with naming({"messages": f"messages[{index}]"}):
                checked_chats.append(checked(ChatRequest, value | {"messages": messages}))
        request = checked(cls, value | {"messages": chats[0]})
        if request.stream:
            raise ParameterError("stream: the answers to many chats are written whole; leave it out.", param="stream")
        request._chats = checked_chats
        return request


class BatchedChatsEndpoint(ChatEndpoint):
    """Many chats: a choice for each."""

    name = "batched_chats"
    path = f"{ChatEndpoint.path}/batch"

    def parse(self, body: bytes) -> BatchedChats:
        return BatchedChats.of(object_of(body))

    def prompts(self, params: ChatRequest, call: Call) -> list[Prompt]:
        assert isinstance(params, BatchedChats)
        return [prompt_of(chat, call, echoed(chat)) for chat in params.chats]


CHATS = BatchedChatsEndpoint()
