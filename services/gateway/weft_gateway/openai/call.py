"""A client's call of a model on its way, and the ways to call one: how each API reads requests and writes answers."""

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, ClassVar, Generic, TypeVar

from weft.domain.request import Priority
from weft.domain.routes import PoolRoute, Route
from weft_gateway.core.events import Emit, End
from weft_gateway.core.routes import Principal
from weft_gateway.errors import ApiError
from weft_gateway.forms.answer_form import AnswerForm
from weft_gateway.openai.schema import Common
from weft_gateway.openai.spans import RequestTrace
from weft_gateway.openai.usage import CallUsage
from weft_gateway.shell.app_state import AppState
from weft_gateway.shell.request_ids import Ids
from weft_gateway.shell.tokenizer import ModelTokenizer

JSON = "application/json"
PLAIN = AnswerForm()
MAX_PROMPT_CHARS = 4096  # of `Prompt.text`
T = TypeVar("T", bound=Common)
Encode = Callable[[ModelTokenizer, int], list[int]]  # within a context of that many tokens


@dataclass(slots=True)
class Prompt:
    """One prompt of a call.

    `text`: its end, which holds the question, for the predictor; `echo`: what answers begin with; `form`: of answers;
    `rendered`: through a template, which is foreign code.
    """

    text: str
    encode: Encode
    echo: str = ""
    tokens: tuple[int, ...] = ()
    form: AnswerForm = PLAIN
    rendered: bool = False


@dataclass(slots=True)
class Call:
    """One call from its arrival to its answer. Fields after `trace` are set by `prepare.submit`."""

    ids: Ids
    principal: Principal
    arrived_unix_ms: int
    priority: Priority = Priority.INTERACTIVE
    is_line: bool = False  # of a batch
    model: str | None = None  # once it is found
    named_model: str | None = None  # the model that a refused request names, for the log
    trace: RequestTrace | None = None  # of a request that is sampled
    is_gone: Callable[[], Awaitable[bool]] | None = None  # whether its client is
    params: Common = field(init=False)
    route: Route = field(init=False)
    pool: PoolRoute = field(init=False)
    tokenizer: ModelTokenizer = field(init=False)
    prompts: Sequence[Prompt] = field(init=False)
    digest: str = field(init=False)  # of the weights that answer
    draft: tuple[int, ...] = ()  # what its client expects of each answer


class AnswerEncoder(ABC):
    """Writes an answer as an API has it: whole, or in chunks, the first one before any token.

    `index` is that of a choice: those to the first prompt come first. `media_type` and `headers` are those of a whole
    answer, once there is its body. `cached_tokens`: of the prompts, reused for the choices of a stream that have begun.
    """

    media_type: str = JSON
    headers: Mapping[str, str] = MappingProxyType({})
    cached_tokens: int = 0

    @property
    def reasoning_tokens(self) -> int:
        """Count the tokens of the reasoning in the choices, as far as they are written."""
        return 0

    @property
    def span_attributes(self) -> Mapping[str, str | None]:
        """What this API's answer has more, by names of OpenTelemetry's conventions."""
        return {}

    def first_chunk(self) -> bytes:
        """Open a stream, before any token."""
        return b""

    def _with_reasoning(self, usage: CallUsage) -> CallUsage:
        """Complete the usage by what has been counted while the choices were written."""
        return replace(usage, reasoning_tokens=self.reasoning_tokens)

    @abstractmethod
    def chunk(self, index: int, emit: Emit) -> bytes: ...

    @abstractmethod
    def finish_chunk(self, index: int, end: End) -> bytes: ...

    @abstractmethod
    def last_chunk(self, usage: CallUsage) -> bytes:
        """Close a stream."""

    @abstractmethod
    def body(self, choices: Sequence[tuple[Emit, End]], usage: CallUsage) -> bytes: ...

    def error_body(self, error: ApiError) -> bytes:
        """Write an error before the first byte."""
        return error.body()

    def error_chunk(self, error: ApiError) -> bytes:
        """Write an error after the first byte; the stream closes after it."""
        return b"data: " + error.body() + b"\n\n"


class ModelEndpoint(ABC, Generic[T]):
    """One way to call a model. `name`: of its operation; `operation`: `gen_ai.operation.name` of its spans.

    `completed`, if present, adds what is not in a request's body; it raises ApiError. `before_end` does what is
    due once every choice has ended well, before the last bytes are sent; it returns the body of an answer that is sent
    whole where it has become another.
    """

    name: ClassVar[str]
    path: ClassVar[str]
    operation: ClassVar[str] = "chat"
    encoder: Callable[[Any, Call], AnswerEncoder]
    completed: Callable[[AppState, Call, Any], Awaitable[T]] | None = None
    before_end: Callable[[AppState, Call, Any, CallUsage], Awaitable[bytes | None]] | None = None

    @abstractmethod
    def parse(self, body: bytes) -> T:
        """Return the typed request. Raises BadRequest, ParameterError."""

    @abstractmethod
    def prompts(self, params: T, call: Call) -> list[Prompt]:
        """Return the prompts, to be encoded within the context. Raises ParameterError."""
